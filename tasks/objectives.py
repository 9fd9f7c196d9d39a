"""Objectives: from raw ids to examples. Denoising, language modelling, UL2's mixture, text to text.

An objective is a class and its row in OBJECTIVES; denoising.py has the parts. All randomness is a
function of a key: the seed and a position in the data. Imports no jax.
"""

import functools
import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import regex
from ml_collections import ConfigDict
from numpy.lib.stride_tricks import sliding_window_view

from data import (
    DROPPED,
    MIN_LENGTH,
    Denoising,
    Example,
    Objective,
    Pair,
    Records,
    SpanCorruption,
    TextToText,
    drop_noise_tokens,
    join_documents,
    mark_spans,
    num_noise_tokens_and_spans,
    random_spans_helper,
    random_spans_noise_mask,
    split_tokens,
)
from messages import Refused, first_ten, noting
from randomness import random_fractions, random_integers
from sources import FEATURES
from tasks.denoising import (
    iid_noise_mask,
    noise_token_to_random_token_or_sentinel,
    permute_tokens,
    random_prefix_noise_mask,
    without_spans_after,
)
from vocabulary import Vocabulary

# Independent noise on each token, at data.noise_density.


class IidDenoising(Denoising):
    """Replaces each run of noise by a sentinel. The targets are the noise, and sentinels for the rest.

    Differs from T5, which continues with ordinary ids when it runs out of sentinels: here the noise of a row
    ends then. Source: t5/data/preprocessors.py `iid_denoising`; t5/models/gin/objectives/iid_15_u_u.gin.
    """

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        most_spans = self.raw_length // 2 + 1  # noise or not
        self.num_sentinels = min(most_spans, vocabulary.num_sentinels)
        mean_noise = self.raw_length * self.noise_density
        mean_spans = (1 - self.noise_density) * (1 + (self.raw_length - 1) * self.noise_density)
        self.check_sentinels(max(math.ceil(mean_spans), 2), vocabulary)
        self.check_targets(max(math.ceil(mean_noise + mean_spans) + 1, MIN_LENGTH))

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        mask = iid_noise_mask(raw_ids.shape, self.noise_density, *key)
        # There may be one more span that is not noise.
        mask = without_spans_after(mask, self.num_sentinels - 1)
        return mark_spans(raw_ids, mask, self.sentinel_ids)


class DropCorruptedTokens(Denoising):
    """Drops the noise. The targets are the noise.

    Source: T5 §3.3.2; t5/models/gin/objectives/iid_15_d_d.gin.
    """

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        self.check_targets(math.ceil(self.raw_length * self.noise_density) + 1)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        mask = iid_noise_mask(raw_ids.shape, self.noise_density, *key)
        return drop_noise_tokens(raw_ids, mask), drop_noise_tokens(raw_ids, ~mask)


class MassStyle(Denoising):
    """Replaces each token of noise by the same sentinel. The targets are the full text.

    Source: T5 §3.3.2; t5/models/gin/objectives/iid_15_m_f.gin.
    """

    num_sentinels = 1

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        self.check_targets(self.raw_length + 1)
        self.check_sentinels(self.num_sentinels, vocabulary)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        mask = iid_noise_mask(raw_ids.shape, self.noise_density, *key)
        return np.where(mask, self.sentinel_ids[0], raw_ids), raw_ids


class BertStyle(MassStyle):
    """Replaces nine of ten tokens of noise by a sentinel, one by a random id, as BERT does.

    Source: T5 §3.3.1; t5/models/gin/objectives/iid_15_r10s90_f.gin.
    """

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        mask = iid_noise_mask(raw_ids.shape, self.noise_density, *key)
        inputs = noise_token_to_random_token_or_sentinel(
            raw_ids, mask, self.vocabulary_size, self.sentinel_ids, *key
        )
        return inputs, raw_ids


class Deshuffling(Denoising):
    """Permutes the tokens of a text. The targets are the text.

    Source: T5 §3.3.1; t5/models/gin/objectives/all_permute.gin.
    """

    concatenates = False

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        self.check_targets(self.raw_length + 1)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        return permute_tokens(raw_ids, *key), raw_ids


class PrincipleSentences(Denoising):
    """Replaces the sentences that share the most words with the rest of their text, each by the same sentinel.

    The targets are these sentences, in order, cut to a row and counted. A sentence ends at . ! or ?
    before a blank; its score is ROUGE-1's F1 with the rest, times 1 + `noise` * N(0, 1). A share of the
    sentences also stays in the inputs. A text of one sentence is all targets. Differs from PEGASUS, which
    reads only the beginning of a document: here each row of it is a text. Source: Zhang et al. 2020
    (PEGASUS) §3.1; pegasus/ops/sentence_selection.cc, with LongT5's settings.
    """

    concatenates = False
    num_sentinels = 1

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        self.check_targets(2)
        self.check_sentinels(self.num_sentinels, vocabulary)
        self.settings = data_group.sentences
        self.vocabulary = vocabulary
        texts = []
        for piece in vocabulary.pieces:
            byte = re.fullmatch('<0x([0-9A-F]{2})>', piece)
            texts.append(chr(int(byte[1], base=16)) if byte else piece.replace('▁', ' '))
        self.begins_word = np.array([text[:1].isspace() for text in texts])
        self.ends_sentence = np.array([text.endswith(('.', '!', '?')) for text in texts])

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        num_rows, length = raw_ids.shape
        least = self.settings.min_ratio
        shares = least + (1 - least) * random_fractions((num_rows,), 'share', length, *key)
        radii, angles = random_fractions((2, *raw_ids.shape), 'noise', length, *key)
        normal = np.sqrt(-2 * np.log1p(-radii)) * np.cos(2 * np.pi * angles)  # Box and Muller
        factors = 1 + self.settings.noise * normal
        stays = random_fractions(raw_ids.shape, 'stays', length, *key) < self.settings.kept
        inputs = raw_ids.copy()
        targets = np.full_like(raw_ids, DROPPED)
        for row, ids in enumerate(raw_ids):
            is_first = self.ends_sentence[ids[:-1]] & self.begins_word[ids[1:]]
            ends = [*(np.flatnonzero(is_first) + 1).tolist(), length]
            sentences = list(itertools.pairwise([0, *ends]))
            scores = self.scores([ids[begin:end] for begin, end in sentences])
            scores *= factors[row, : len(sentences)]
            num_chosen = max(int(len(sentences) * self.settings.ratio * shares[row]), 1)
            for i in np.argsort(-scores, kind='stable')[:num_chosen]:
                begin, end = sentences[i]
                targets[row, begin:end] = ids[begin:end]
                if not stays[row, i]:
                    inputs[row, begin:end] = DROPPED
                    inputs[row, begin] = self.sentinel_ids[0]
        return inputs, targets

    def scores(self, sentences: Sequence[np.ndarray]) -> np.ndarray:
        """Return ROUGE-1's F1 of each sentence of ids with all others: float64 [sentences]."""
        words = [unicode_tokens(self.vocabulary.decode(ids)) for ids in sentences]
        text_counts = Counter(itertools.chain.from_iterable(words))
        num_common = []
        for counts in map(Counter, words):
            common = (min(n, text_counts[word] - n) for word, n in counts.items())
            num_common.append(sum(common))
        # Both sides together have the words of the text.
        return 2 * np.array(num_common) / max(text_counts.total(), 1)


# Scripts without spaces between words.
UNSPACED = r'[\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]'
WORD_CHARACTERS = r'[\p{L}\p{M}\p{N}]'
UNSPACED_LETTER = rf'[{UNSPACED}&&{WORD_CHARACTERS}]\p{{M}}*'
UNICODE_TOKEN = regex.compile(rf'{UNSPACED_LETTER}|[{WORD_CHARACTERS}--{UNSPACED}]+', regex.V1)


def unicode_tokens(text: str) -> list[str]:
    """Return the runs of letters, marks and digits of any script, in lower case and NFKC.

    A letter of a script without spaces between words, such as Chinese and Thai, is a token of its own.
    """
    return UNICODE_TOKEN.findall(unicodedata.normalize('NFKC', text).lower())


# Language modelling.


class PrefixLm(Denoising):
    """Splits a text at a random place: the inputs come before it, the targets after it.

    Targets that are longer than a row are cut, as in T5, and counted. Source: t5/data/preprocessors.py
    `prefix_lm`.
    """

    concatenates = False

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        self.check_targets(2)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        return split_prefix(raw_ids, 0.5, *key)


def split_prefix(raw_ids: np.ndarray, density: float, *key: int | str) -> Pair:
    """Return inputs and targets of prefix language modelling."""
    mask = random_prefix_noise_mask(raw_ids.shape, density, *key)
    return drop_noise_tokens(raw_ids, ~mask), drop_noise_tokens(raw_ids, mask)


class Lm(Denoising):
    """Targets only: each row is a text that ends with EOS. The inputs are EOS.

    Source: t5/models/gin/objectives/lm.gin.
    """

    min_inputs_length = 1

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        self.check_targets(2)
        self.raw_length = self.lengths.targets - 1

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        return np.zeros((len(raw_ids), 0), np.int32), raw_ids


class FullLm(Denoising):
    """Targets only: full rows, with EOS where a document ends. The inputs are EOS.

    Source: t5/data/preprocessors.py `full_lm`.
    """

    min_inputs_length = 1

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        self.raw_length = self.lengths.targets
        self.empty_inputs = np.concatenate([self.bos, self.end])

    def examples(self, names: Sequence[str], records: Records, *key: int | str) -> list[Example]:
        documents = join_documents(names, records, *key, eos=self.eos)
        rows = split_tokens(self.text_ends(documents), itertools.repeat(self.raw_length))
        splits = self.splits(rows, *key)
        examples = []
        for row, split, row_names in zip(rows, splits, documents.names_of(rows), strict=True):
            ids = documents.ids[row[0] : row[1]]
            inputs = np.concatenate([self.bos, ids[:split]]) if split else self.empty_inputs
            examples.append(Example(inputs, ids[split:], names=row_names))
        return examples

    def splits(self, rows: np.ndarray, *key: int | str) -> np.ndarray:
        """Return how many ids of each row are inputs, int [rows]."""
        return np.zeros(len(rows), np.int64)


class PackPrefixLm(FullLm):
    """Splits full rows of n ids in pairs: if one has p inputs, the other has n - p.

    Differs from T5, which packs the two into one row: here the packer may pair others. Source:
    t5/data/preprocessors.py `targets_for_prefix_lm_objective`, `pack_prefix_lm_encoder_decoder`.
    """

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        inputs = self.lengths.inputs
        if self.lengths.targets != inputs or inputs % 2:
            both = f'data.lengths.inputs={inputs}, data.lengths.targets={self.lengths.targets}'
            raise Refused(f'{both}: two examples fill a row: use {inputs + inputs % 2} for both')
        super().set_lengths(data_group, vocabulary)
        self.raw_length -= 2 * len(self.bos)  # both inputs have them

    def splits(self, rows: np.ndarray, *key: int | str) -> np.ndarray:
        lengths = rows[:, 1] - rows[:, 0]
        shortest = np.minimum(1, lengths - 1)  # a single token is a target
        splits = shortest + random_integers(lengths.shape, 0, lengths - shortest, 'split', *key)
        num_pairs = np.count_nonzero(lengths == self.raw_length) // 2
        full = np.flatnonzero(lengths == self.raw_length)[: 2 * num_pairs]
        splits[full[1::2]] = self.raw_length - splits[full[::2]]
        return splits


# UL2's mixture of denoisers.


class Denoiser(NamedTuple):
    """Span corruption, or prefix language modelling if `mean_span_length` is None."""

    mode: str  # the text at the beginning of the inputs
    rate: float  # the share of the examples
    noise_density: float
    mean_span_length: float | None

    def lengths(self, inputs_length: int, num_sentinels: int) -> tuple[int, int, int]:
        """Return the number of raw ids that fill inputs of `inputs_length`, the targets' length and the number of spans."""
        if self.mean_span_length is None:
            return inputs_length - 1, inputs_length, 0
        density = self.noise_density
        mean_length = self.mean_span_length
        raw_length, _ = random_spans_helper(inputs_length, density, mean_length)
        num_noise, num_spans = num_noise_tokens_and_spans(raw_length, density, mean_length)
        while num_spans > num_sentinels:
            raw_length -= 1
            num_noise, num_spans = num_noise_tokens_and_spans(raw_length, density, mean_length)
        return raw_length, num_noise + num_spans + 1, num_spans

    def corrupt(self, raw_ids: np.ndarray, sentinel_ids: np.ndarray, *key: int | str) -> Pair:
        """Return inputs, without the mode, and targets."""
        if self.mean_span_length is None:
            return split_prefix(raw_ids, self.noise_density, *key)
        mask = random_spans_noise_mask(
            raw_ids.shape, self.noise_density, self.mean_span_length, *key
        )
        return mark_spans(raw_ids, mask, sentinel_ids)


# UL2 (Tay et al. 2022) §3.1.2 and table 1: R-denoisers, X-denoisers, and the S-denoiser.
DENOISERS = (
    Denoiser('[NLU]', rate=0.2, noise_density=0.15, mean_span_length=3),
    Denoiser('[NLU]', rate=0.2, noise_density=0.15, mean_span_length=8),
    Denoiser('[NLG]', rate=0.1, noise_density=0.5, mean_span_length=3),
    Denoiser('[NLG]', rate=0.1, noise_density=0.5, mean_span_length=8),
    Denoiser('[NLG]', rate=0.1, noise_density=0.15, mean_span_length=64),
    Denoiser('[NLG]', rate=0.1, noise_density=0.5, mean_span_length=64),
    Denoiser('[S2S]', rate=0.2, noise_density=0.5, mean_span_length=None),
)


class Ul2(Denoising):
    """Draws one of DENOISERS for each example, and puts its mode before the inputs.

    Each takes as many ids as it needs from the documents, one after another. Differs from UL2, which continues
    with ordinary ids when it runs out of sentinels: here texts are shorter then. Source: UL2 §3.1 and appendix
    9.2, where the modes are text that the vocabulary encodes.
    """

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        self.check_sentinels(1, vocabulary)
        self.modes = []
        self.raw_lengths = []
        longest_targets = 0
        for denoiser in DENOISERS:
            [mode] = vocabulary.encode_as_arrays([denoiser.mode])
            if vocabulary.unk_id in mode:
                raise Refused(f'data.vocabulary lacks characters of {denoiser.mode!r}')
            least = len(mode) + MIN_LENGTH  # a token, a sentinel and EOS
            least += self.lengths.inputs - self.num_inputs
            if self.lengths.inputs < least:
                raise Refused(f'data.lengths.inputs={self.lengths.inputs}: use {least} or more')
            self.modes.append(mode)
            raw_length, targets_length, num_spans = denoiser.lengths(
                self.num_inputs - len(mode), vocabulary.num_sentinels
            )
            self.raw_lengths.append(raw_length)
            self.num_sentinels = max(self.num_sentinels, num_spans)
            longest_targets = max(longest_targets, targets_length)
        self.check_targets(longest_targets)

    def examples(self, names: Sequence[str], records: Records, *key: int | str) -> list[Example]:
        documents = join_documents(names, records, *key)
        text_ends = self.text_ends(documents)
        most_rows = len(documents.ids) // min(self.raw_lengths) + len(text_ends)
        rates = np.array([denoiser.rate for denoiser in DENOISERS])
        ends = np.cumsum(rates / rates.sum())[:-1]  # each denoiser has a part of [0, 1)
        fractions = random_fractions((most_rows,), 'denoiser', *key)
        draws = np.searchsorted(ends, fractions, side='right')
        rows = split_tokens(text_ends, [self.raw_lengths[i] for i in draws])
        draws = draws[: len(rows)]
        examples = []
        for i in range(len(DENOISERS)):
            corrupt = functools.partial(self.corrupt_as, i)
            examples += self.corrupt_rows(documents, rows[draws == i], corrupt, *key)
        return examples

    def corrupt_as(self, i: int, raw_ids: np.ndarray, *key: int | str) -> Pair:
        """Return the inputs and targets of denoiser `i`, as `corrupt` does."""
        inputs, targets = DENOISERS[i].corrupt(raw_ids, self.sentinel_ids, i, *key)
        mode = np.tile(self.modes[i], (len(raw_ids), 1))
        return np.concatenate([mode, inputs], axis=1), targets


# Text to text.


class PromptedTextToText(TextToText):
    """Text to text as in T0: nothing ends the inputs, and cut targets lose their EOS.

    Source: t-zero, t0/seqio_tasks/tasks.py.
    """

    def with_ends(self, record: Mapping[str, np.ndarray]) -> Pair:
        inputs = np.concatenate([self.bos, record['inputs']])
        if not len(inputs):
            inputs = self.eos
        return inputs, np.concatenate([self.begin, record['targets'], self.eos])

    def cut(self, ids: np.ndarray, length: int, end: np.ndarray) -> np.ndarray:
        return ids[:length]


class TextToTextWithSentinel(PromptedTextToText):
    """A sentinel ends the inputs and begins the targets, as if a span of noise ended the text.

    As in T5, cut inputs and targets keep their last id. Source: seqio/experimental.py
    `add_task_with_sentinels`.
    """

    num_sentinels = 1

    def __init__(self, data_group: ConfigDict, vocabulary: Vocabulary):
        super().__init__(data_group, vocabulary)
        self.sentinel = vocabulary.sentinel_ids[:1]
        if vocabulary.num_sentinels == 0:
            raise Refused(
                'data.extra_ids=0: the inputs of this task end with a sentinel: use 1, or data.sentinels'
            )
        for name in FEATURES:
            if self.lengths[name] < MIN_LENGTH:
                raise Refused(f'data.lengths.{name}={self.lengths[name]}: use {MIN_LENGTH} or more')

    def with_ends(self, record: Mapping[str, np.ndarray]) -> Pair:
        inputs = np.concatenate([self.bos, record['inputs'], self.sentinel, self.end])
        targets = [self.begin, self.sentinel, record['targets'], self.eos]
        return inputs, np.concatenate(targets)

    def cut(self, ids: np.ndarray, length: int, end: np.ndarray) -> np.ndarray:
        return TextToText.cut(self, ids, length, ids[-1 - len(end) :])


class TriviaQaTruncateInputs(TextToText):
    """Cuts long inputs to a random part with the first occurrence of the targets; drops them if there is none.

    Source: t5/data/preprocessors.py `trivia_qa_truncate_inputs`. As there, the part fills the row, so
    that EOS replaces its last id.
    """

    def examples(self, names: Sequence[str], records: Records, *key: int | str) -> list[Example]:
        length = self.lengths.inputs
        new_names = []
        new_records = []
        for i, record in enumerate(records):
            inputs = record['inputs']
            targets = record['targets']
            if len(inputs) > length:
                if not 0 < len(targets) <= length:
                    continue
                windows = sliding_window_view(inputs, len(targets))
                starts = np.flatnonzero((windows == targets[None]).all(axis=1))
                if not len(starts):
                    continue
                low = max(int(starts[0]) + len(targets) - length, 0)
                high = min(int(starts[0]), len(inputs) - length) + 1
                start = int(random_integers((), low, high, 'part', i, *key))
                inputs = inputs[start : start + length]
            new_names.append(names[i])
            new_records.append({**record, 'inputs': inputs, 'targets': targets})
        return super().examples(new_names, new_records, *key)


# Every value of Task.objective. Objectives of documents are also values of data.task.
OBJECTIVES: dict[str, type[Objective]] = {
    'span_corruption': SpanCorruption,
    'text_to_text': TextToText,
    'prompted_text_to_text': PromptedTextToText,
    'text_to_text_1_sentinel': TextToTextWithSentinel,
    'trivia_qa_truncate_inputs': TriviaQaTruncateInputs,
    'iid_denoising': IidDenoising,
    'drop_corrupted_tokens': DropCorruptedTokens,
    'mass_style': MassStyle,
    'bert_style': BertStyle,
    'deshuffling': Deshuffling,
    'principle_sentences': PrincipleSentences,
    'prefix_lm': PrefixLm,
    'lm': Lm,
    'full_lm': FullLm,
    'pack_prefix_lm_encoder_decoder': PackPrefixLm,
    'ul2': Ul2,
}


# A user's own.


class OwnObjective:
    """An objective of a user's class, with checks of its ids: wrong ones would train a model silently."""

    def __init__(self, objective: type[Objective], data_group: ConfigDict, vocabulary: Vocabulary):
        self.objective = objective(data_group, vocabulary)
        self.features = self.objective.features
        self.records_per_group = self.objective.records_per_group
        self.num_sentinels = self.objective.num_sentinels
        self.batch_features = own_features([objective])
        self.lengths = data_group.lengths
        self.vocabulary_size = vocabulary.size

    def examples(self, names: Sequence[str], records: Records, *key: int | str) -> Sequence:
        with noting(f'{type(self.objective).__name__}.examples of {first_ten(list(names))}'):
            items = list(self.objective.examples(names, records, *key))
            for item in items:
                examples = [item] if isinstance(item, Example) else item
                assert len(examples) == 1 or self.batch_features.shares_rows, (
                    'set shares_rows = True in the class'
                )
                for feature in FEATURES:
                    length = self.lengths[feature]
                    for example in examples:
                        self.check(example, feature, length)
                    total = sum(len(getattr(x, feature)) for x in examples)
                    assert total <= length, f'{feature}: {total} ids share a row of {length}'
        return items

    def check(self, example: Example, feature: str, length: int) -> None:
        ids = getattr(example, feature)
        fits = ids.dtype.kind in 'iu' and 1 <= len(ids) <= length
        fits = fits and 0 <= ids.min() <= ids.max() < self.vocabulary_size
        rule = f'1 to {length} ids, int32, from 0 to {self.vocabulary_size - 1}'
        assert fits, f'{feature} of an example is {ids!r:.60}: give {rule}'
        numbers = tuple(sorted(example.numbers))
        assert numbers == self.batch_features.numbers, (
            f'numbers of the class: write numbers = {numbers}'
        )


class OwnFeatures(NamedTuple):
    """The features of a batch that users' objectives add, under the names of Stream's fields."""

    numbers: tuple[str, ...]
    shares_rows: bool


def own_features(objectives: Iterable[type[Objective]]) -> OwnFeatures:
    """Return the features of a batch that the examples of some objectives need."""
    numbers: set[str] = set()
    shares_rows = False
    for objective in objectives:
        numbers |= set(getattr(objective, 'numbers', ()))
        shares_rows |= getattr(objective, 'shares_rows', False)
    return OwnFeatures(tuple(sorted(numbers)), shares_rows)
