"""Our stream of batches against seqio + t5, from the same files and on the same two cores.

    pip install -e '.[peers,tf]' tensorflow-text
    pip install gin-config babel sacrebleu scikit-learn rouge-score
    pip install --no-deps t5==0.9.4
    python benchmarks/data.py [--megabytes=300] [--rounds=3]

Writes a corpus, trains a vocabulary of up to 32,000 pieces on it, and writes ten task caches in SeqIO's
layout. Then the contenders take turns, each in a new process on two cores:

    raw text        span corruption, 512/114, batches of 128, shuffled, packed
        sentencepiece   only encodes the documents in batches with two threads: the limit
        seqio           c4_v220_span_corruption on TextLineDataSource, as T5X reads it
        ours            prefetch.batches of a Stream, in a thread or in worker processes; a full
                        epoch, because lanes read much at first
    cached mixture  ten tasks, packed, shuffled, its state saved every 50 batches
        seqio           use_cached, examples-proportional, a tf.train.Checkpoint of the iterator
        ours            the same mixture; the position of the stream

Prints a row per contender: millions of corpus tokens per second, the median of the rounds and the
range; the speedup over seqio; and the padding left by packing, as a share of the inputs and of the
targets. Corpus tokens are ids other than padding, EOS and sentinels, counted in the numpy batches. Files
are opened before the clock starts. It starts at the request for the first batch, which includes the start
of workers and all that a stream reads ahead, and stops at the last batch. Rivals that are not installed
are left out.

The goal: at least 3.5 times seqio and 70 % of sentencepiece from raw text, at least 10 times seqio from
caches. The limit is SentencePiece from raw text, and the interpreter from cached ids.
"""

import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Before the folder of this file, so that `import data` imports the measured module.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import turns
from absl import app, flags

import sources.pydoc
import tasks
import tasks.open
import vocabulary
from configs import base
from modes import cache
from run import prefetch
from run.train_vocabulary import train_vocabulary
from stream import Stream

FLAGS = flags.FLAGS
flags.DEFINE_integer('megabytes', 300, 'Size of the corpus.', lower_bound=1)
flags.DEFINE_integer('rounds', 3, 'How often each contender is measured.', lower_bound=1)

NUM_CORES = 2
BATCH_SIZE = 128
LENGTHS = {'inputs': 512, 'targets': 114}
NUM_SHARDS = 16  # files of the corpus and of each cache
NUM_TASKS = 10
STEPS_PER_SAVE = 50
NUM_WORKERS = (0, 2)
MIXTURE = f"""
from tasks import Mixture, proportional
TASKS = [Mixture('mixture', {{f'task_{{i}}': proportional() for i in range({NUM_TASKS})}})]
"""
Batch = Mapping[str, np.ndarray]


class Measurement(NamedTuple):
    """The figures of a contender in one round."""

    num_tokens: int  # in the corpus
    seconds: float
    padding: list[float] = []  # shares of the inputs' and the targets' positions


def main(argv: list[str]) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    has_seqio = not turns.print_conditions('numpy', 'sentencepiece', 'seqio-nightly', 't5')
    text: dict[str, Callable] = {'sentencepiece': measure_encoder}
    mixture: dict[str, Callable] = {}
    if has_seqio:
        text['seqio'] = functools.partial(measure_stream, seqio_text, 300)
        mixture['seqio'] = functools.partial(measure_stream, seqio_mixture, 60)
    for num_workers in NUM_WORKERS:
        name = f'ours, {num_workers} workers'
        open_text = functools.partial(our_text, num_workers)
        open_mixture = functools.partial(our_mixture, num_workers)
        text[name] = functools.partial(measure_stream, open_text, None)
        mixture[name] = functools.partial(measure_stream, open_mixture, 384)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        turns.in_new_process(write_inputs, folder, FLAGS.megabytes)
        turns.print_header('', 'M tokens/s', 'x seqio', 'padding')
        print_rows('raw text', turns.take_turns(text, FLAGS.rounds, folder))
        print_rows('cached mixture', turns.take_turns(mixture, FLAGS.rounds, folder))


def print_rows(part: str, measurements: Mapping[str, Sequence[Measurement]]) -> None:
    """Print a row per contender."""
    rates = {}
    for name, rounds in measurements.items():
        rates[name] = [x.num_tokens / x.seconds / 1e6 for x in rounds]
    for name, rounds in measurements.items():
        ratio = ''
        if 'seqio' in measurements:
            ratio = f'{statistics.median(rates[name]) / statistics.median(rates["seqio"]):.2f}'
        padding = ', '.join(f'{share:.1%}' for share in rounds[0].padding)
        turns.print_row(f'{part}, {name}', turns.spread(rates[name]), ratio, padding)


# Measuring.


def measure_stream(
    open_stream: Callable[[Path], Iterator[Batch]], num_batches: int | None, folder: Path
) -> Measurement:
    """Count the corpus tokens in the first batches of a stream, and its seconds."""
    first_sentinel = read_vocabulary(folder).sentinel_ids.min()  # sentinels follow the pieces
    batches = open_stream(folder)
    num_tokens = 0
    num_padding = np.zeros(2)
    num_positions = np.zeros(2)
    start = time.perf_counter()
    for batch in itertools.islice(batches, num_batches):
        for i, name in enumerate(('encoder_input_tokens', 'decoder_target_tokens')):
            ids = batch[name]
            ids = ids[ids.any(axis=1)]  # without the rows of lanes that have ended
            is_token = (ids > vocabulary.EOS_ID) & (ids < first_sentinel)
            num_tokens += int(np.count_nonzero(is_token))
            num_padding[i] += np.count_nonzero(ids == vocabulary.PAD_ID)
            num_positions[i] += ids.size
    seconds = time.perf_counter() - start
    return Measurement(num_tokens, seconds, (num_padding / num_positions).tolist())


def measure_encoder(folder: Path) -> Measurement:
    """Encode the documents of the corpus as fast as SentencePiece can."""
    documents = []
    for file in corpus_files(folder):
        documents += file.read_text().splitlines()
    # Sentinels are neither in the model's file nor in the text.
    processor = read_vocabulary(folder)._processor
    num_tokens = 0
    start = time.perf_counter()
    for first in range(0, len(documents), 1000):
        ids = processor.encode(documents[first : first + 1000], num_threads=NUM_CORES)
        num_tokens += sum(map(len, ids))
    return Measurement(num_tokens, time.perf_counter() - start)


# Ours.


def our_text(num_workers: int, folder: Path) -> Iterator[Batch]:
    """Return the batches of one epoch of the corpus."""
    config = our_config()
    config.files = str(folder / 'corpus-*.txt')
    stream = open_our_stream(folder, config, num_epochs=1)
    batches = prefetch.batches(stream, num_workers)
    epoch = itertools.takewhile(lambda batch: not batch.is_padding, batches)
    return (batch.features for batch in epoch)


def our_mixture(num_workers: int, folder: Path) -> Iterator[Batch]:
    """Return the batches of the cached mixture, saving the position."""
    config = our_config()
    config.cache_dirs = str(folder / 'caches')
    config.module = str(folder / 'mixture.py')
    config.task = 'mixture'
    stream = open_our_stream(folder, config, num_epochs=None)
    batches = prefetch.batches(stream, num_workers)
    batches = saving(batches, lambda batch: np.save(folder / 'position.npy', batch.after))
    return (batch.features for batch in batches)


def our_config() -> Any:
    """Return config.data."""
    config = base.get_config().data
    config.lengths.update(LENGTHS)
    config.validation_fraction = 0.0
    return config


def open_our_stream(folder: Path, config: Any, num_epochs: int | None) -> Stream:
    """Return the stream of all rows."""
    return Stream(
        tasks.open.open_mixture(config),
        'train',
        read_vocabulary(folder),
        config,
        batch_size=BATCH_SIZE,
        seed=0,
        num_epochs=num_epochs,
    )


def saving(batches: Iterator, save: Callable[[Any], object]) -> Iterator:
    """Yield batches, and save the state of their iterator every STEPS_PER_SAVE."""
    for step, batch in enumerate(batches, start=1):
        if step % STEPS_PER_SAVE == 0:
            save(batch)
        yield batch


# SeqIO's, as T5X's runs configure it (t5x/configs/runs/pretrain.gin and finetune.gin).


def seqio_text(folder: Path) -> Iterator[Batch]:
    """Return the batches of one epoch of the corpus."""
    import seqio
    import t5.data.preprocessors

    source = seqio.TextLineDataSource({'train': str(folder / 'corpus-*.txt')})
    seqio.TaskRegistry.add(
        'span_corruption',
        source=source,
        preprocessors=[
            text_as_dict,
            functools.partial(
                seqio.preprocessors.rekey, key_map={'inputs': None, 'targets': 'text'}
            ),
            seqio.preprocessors.tokenize,
            t5.data.preprocessors.span_corruption,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=seqio_features(folder),
    )
    return seqio_batches('span_corruption', num_epochs=1).as_numpy_iterator()


def text_as_dict(lines: Any) -> Any:
    """Return a tf.data set of {'text': line}."""
    return lines.map(lambda line: {'text': line}, num_parallel_calls=-1)  # -1: autotuned


def seqio_mixture(folder: Path) -> Iterator[Batch]:
    """Return the batches of the cached mixture, saving the state of their iterator."""
    import seqio
    import tensorflow as tf

    seqio.add_global_cache_dirs([str(folder / 'caches')])
    names = [task.name for task in (folder / 'caches').iterdir()]
    for name in names:
        seqio.TaskRegistry.add(
            name,
            source=seqio.FunctionDataSource(no_dataset, splits=('train',)),
            preprocessors=[
                seqio.CacheDatasetPlaceholder(required=True),
                seqio.preprocessors.append_eos_after_trim,
            ],
            output_features=seqio_features(folder),
        )
    seqio.MixtureRegistry.add('mixture', sorted(names), default_rate=seqio.mixing_rate_num_examples)
    iterator = iter(seqio_batches('mixture', num_epochs=None, use_cached=True))
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    batches = saving(iterator, lambda batch: checkpoint.write(str(folder / 'iterator')))
    return ({name: x.numpy() for name, x in batch.items()} for batch in batches)


def no_dataset(split: str, shuffle_files: bool) -> Any:
    """Replace the source of a task that is read from its cache."""
    raise NotImplementedError


def seqio_features(folder: Path) -> dict[str, Any]:
    import seqio

    pieces = seqio.SentencePieceVocabulary(str(folder / 'vocabulary.model'), extra_ids=100)
    return {
        'inputs': seqio.Feature(pieces, add_eos=True, required=False),
        'targets': seqio.Feature(pieces, add_eos=True),
    }


def seqio_batches(name: str, num_epochs: int | None, use_cached: bool = False) -> Any:
    """Return the packed batches of a task or mixture as a tf.data set."""
    import seqio
    import tensorflow as tf

    examples = seqio.get_dataset(
        name,
        task_feature_lengths=LENGTHS,
        dataset_split='train',
        shuffle=True,
        num_epochs=num_epochs,
        feature_converter=seqio.EncDecFeatureConverter(pack=True),
        use_cached=use_cached,
        seed=0,
    )
    return examples.batch(BATCH_SIZE, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


# The files that the contenders read.


def write_inputs(folder: Path, megabytes: int) -> None:
    """Write a corpus, its vocabulary, and the task caches."""
    sentences = []
    for _, text in sources.pydoc.documents():
        sentences += text.split('. ')
    rng = np.random.default_rng(0)
    size = 0
    documents: list[str] = []
    while size < megabytes * 1_000_000:
        # About as many tokens as in C4's documents, from a few to thousands.
        document = make_text(sentences, num_sentences=rng.lognormal(mean=3, sigma=1), rng=rng)
        size += len(document) + 1
        documents.append(document)
    for shard, file in enumerate(corpus_files(folder)):
        file.write_text('\n'.join(documents[shard::NUM_SHARDS]) + '\n')
    model = train_vocabulary(documents, num_pieces=32_000)
    (folder / 'vocabulary.model').write_bytes(model)
    for task in range(NUM_TASKS):
        write_cache(folder, task, sentences, rng)
    (folder / 'mixture.py').write_text(MIXTURE)


def make_text(sentences: Sequence[str], num_sentences: float, rng: np.random.Generator) -> str:
    """Return a text of random sentences, at least one."""
    indices = rng.integers(len(sentences), size=int(num_sentences) + 1)
    return '. '.join([sentences[i] for i in indices])


def corpus_files(folder: Path) -> list[Path]:
    return [folder / f'corpus-{shard:02}.txt' for shard in range(NUM_SHARDS)]


def read_vocabulary(folder: Path) -> vocabulary.SentencePieceVocabulary:
    return vocabulary.SentencePieceVocabulary((folder / 'vocabulary.model').read_bytes())


def write_cache(
    folder: Path, task: int, sentences: Sequence[str], rng: np.random.Generator
) -> None:
    """Cache a task, for SeqIO and for us. Tasks differ in their sizes and lengths."""
    num_examples = 40_000 // (task + 1)
    lines = []
    for _ in range(num_examples):
        inputs = make_text(sentences, rng.lognormal(mean=task / 4), rng)
        words = make_text(sentences, 1, rng).split()
        targets = ' '.join(words[: 2 + task % 4 * 4])
        lines.append(json.dumps({'inputs': inputs, 'targets': targets}))
    file = folder / f'task_{task}.jsonl'
    file.write_text('\n'.join(lines))
    config = our_config()
    config.pack = 'no'
    config.task = f'task_{task}'
    config.files = str(file)
    config.inputs = '{inputs}'
    config.targets = '{targets}'
    config.vocabulary = str(folder / 'vocabulary.model')
    config.cache_dirs = str(folder / 'caches')
    cache.BYTES_PER_SHARD = file.stat().st_size // NUM_SHARDS
    cache.cache(config)


if __name__ == '__main__':
    app.run(main)
