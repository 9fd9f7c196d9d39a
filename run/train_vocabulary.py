"""The vocabulary of a run: the named one, the one of its checkpoint, or a new one."""

import io
import itertools
import re
from collections.abc import Iterable, Iterator

import sentencepiece
from ml_collections import ConfigDict

from formats.vocabulary import (
    add_tokens,
    kept_file,
    mark_sentinels,
    named_vocabulary,
    of_model,
    read_model,
)
from messages import Refused
from paths import AnyPath
from sources import Share
from stream import OpenMixture
from vocabulary import EOS_ID, PAD_ID, UNK_ID, SentencePieceVocabulary, Vocabulary

SAMPLE_CHARACTERS = 10_000_000  # a vocabulary is trained on this much text
SAMPLE_LINE_CHARACTERS = 1000  # SentencePiece drops long lines, so they are cut


def find_or_train_vocabulary(
    data_group: ConfigDict,
    workdir: AnyPath,
    texts: Iterable[str],
    max_size: int,
    model: bytes = b'',
) -> Vocabulary:
    """Return the vocabulary of a run, with `data_group.added_tokens`.

    The first of: the one that `data_group.vocabulary` names, `model` from a restored checkpoint, the workdir's, one
    trained on `texts`. Raises Refused if the workdir has another one, and if the vocabulary is missing, unreadable
    or larger than `max_size` ids.
    """
    file = kept_file(workdir)
    vocabulary: Vocabulary
    if data_group.vocabulary:
        vocabulary = named_vocabulary(
            'data.vocabulary', data_group.vocabulary, data_group.extra_ids
        )
    elif model:
        vocabulary = of_model(model, data_group.extra_ids)
    elif file is not None:
        remedy = "remove it: the run takes its newest checkpoint's, or trains it again"
        vocabulary = read_model(file, data_group.extra_ids, remedy)
    else:
        model = train_vocabulary(texts, data_group.num_pieces)
        vocabulary = SentencePieceVocabulary(model, data_group.extra_ids)
    vocabulary = add_tokens(vocabulary, data_group.added_tokens)
    if vocabulary.model and file is not None and vocabulary.model != file.read_bytes():
        raise Refused(
            f'{file} differs from data.vocabulary={data_group.vocabulary!r}, or the vocabulary of the checkpoint, with '
            f'data.added_tokens={tuple(data_group.added_tokens)}: remove it, or change these'
        )
    mark_sentinels(vocabulary, data_group.sentinels)
    if vocabulary.size > max_size:
        enough = -(-vocabulary.size // 128) * 128
        raise Refused(
            f'model.vocab_size={max_size}: the vocabulary has {vocabulary.size}: use {enough}'
        )
    return vocabulary


def train_vocabulary(texts: Iterable[str], num_pieces: int) -> bytes:
    """Return a SentencePiece unigram model of at most `num_pieces` pieces, the same every time."""
    model = io.BytesIO()
    lines = list(sample_lines(texts))  # here: a reading error is not SentencePiece's
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type='unigram',
            vocab_size=num_pieces,
            hard_vocab_limit=False,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            # Sums depend on the number of threads, which must not depend on the machine.
            num_threads=8,
            minloglevel=2,
        )
    except RuntimeError as error:
        sizes = re.search(r'smaller than required_chars\. \d+ vs (\d+)', str(error))
        least = int(sizes[1]) if sizes else 4
        if num_pieces >= least:
            raise Refused(
                'no text is left to train a vocabulary from: add text, lower data.validation_fraction or '
                'set data.vocabulary'
            ) from error
        raise Refused(
            f'data.num_pieces={num_pieces} does not fit the text: use {least} or more, or more text'
        ) from error
    return model.getvalue()


def sample_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the first SAMPLE_CHARACTERS of `texts` in lines of at most SAMPLE_LINE_CHARACTERS."""
    remaining = SAMPLE_CHARACTERS
    for text in texts:
        text = text[:SAMPLE_CHARACTERS]
        for start in range(0, len(text), SAMPLE_LINE_CHARACTERS):
            yield text[start : start + SAMPLE_LINE_CHARACTERS]
        remaining -= len(text)
        if remaining <= 0:
            return


def training_texts(mixture: OpenMixture) -> Iterator[str]:
    """Yield texts from all over the corpus, from each task in turn, to train a vocabulary on."""
    share = Share(seed=0, epoch=0, lane=0, num_lanes=1)
    readers = []
    for task in mixture.tasks:
        if task.source.is_tokenized:
            raise Refused("data.vocabulary='': name the vocabulary of the task cache")
        records = (document.record for document in task.source.documents('train', share))
        readers.append(itertools.chain.from_iterable(map(task.texts_of, records)))
    for examples in itertools.zip_longest(*readers, fillvalue={}):
        for example in examples:
            for feature in ('inputs', 'targets'):
                if example.get(feature):
                    yield example[feature]
