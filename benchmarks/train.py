"""Our train step against transformers' and T5X's, with data and metrics, on two cores or on one GPU.

    pip install -e '.[peers]'
    python benchmarks/train.py [--device=gpu] [--sizes=small,base] [--dtypes=bfloat16] [--batch_size=4]
        [--steps=10] [--rounds=3] [--t5x=FOLDER [--t5x_python=PYTHON]]

Trains T5 1.1 with dropout 0.1 on sequences of 512 inputs and 114 targets. The contenders take turns,
each in a new process: two steps that are not counted (programs are compiled), then `steps` that are.

    ours            the work of main.py between two lines of metrics: documents of pydoc become packed
                    rows while the device computes; the step with its metrics; all of them are
                    fetched. Adafactor, parameters in float32.
    transformers    T5ForConditionalGeneration with SDPA, compiled on a GPU, and its Adafactor with a
                    constant rate. It gets one batch of random ids on the device, full rows without a
                    mask, and its loss is fetched once. In bfloat16 it autocasts over parameters in
                    float32, as ours; `bfloat16 weights` has only those, so small updates are lost.
    T5X             its Trainer with its Adafactor and metrics, on a CPU, if --t5x names a checkout. It
                    gets one packed batch of random ids. --t5x_python is a Python with the packages
                    of T5X's setup.py; AirIO may be missing.
    products alone  the limit: each matrix product of our step, timed alone with its shapes

The size long_local is LongT5 as wide and deep as small, with 4,096 inputs and 910 targets, next to
transformers' LongT5; use --batch_size=1 on a CPU.

If main.py restarts itself with huge pages (modes/process.py), so does this program, and rivals are
measured without and with them. Rivals that are not installed are left out. A GPU needs torch with CUDA,
pip install -e '.[cuda]' and a larger --batch_size; JAX gets 95 % of its memory, unless
XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.

Prints a row per contender: sequences per second, the median of the rounds and the range; the peak memory
of the process, or on a GPU of its arrays; the share of the time in which ours waits for data; and how
many times as fast ours is.

The goal: 1.4 times both rivals on a CPU, 1.2 times with huge pages; 2 times transformers on a GPU.
On an H200 in bfloat16: base 920 sequences per second, large 255.
"""

import functools
import os
import resource
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Before the folder of this file, so that `import train` imports the measured module.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import train_t5x
import turns
from absl import app, flags
from jax import lax

import partition
import tasks.open
import train
import vocabulary
from configs import t5_1_1
from formats import hugging_face
from modes import compilation_cache, process
from prepare import make_spec
from run.agreement import Batches
from run.interval import Clock, Interval
from run.train_vocabulary import train_vocabulary, training_texts
from stream import Stream

TINY = dict(
    emb_dim=64, num_heads=2, head_dim=32, mlp_dim=128, num_encoder_layers=2, num_decoder_layers=2
)
DROPOUT_RATE = 0.1
WARM_UP_STEPS = 2
GPU_WORKERS = 4  # processes for our batches

FLAGS = flags.FLAGS
flags.DEFINE_enum('device', 'cpu', ['cpu', 'gpu'], 'Where to train.')
flags.DEFINE_list('sizes', 'small', 'Sizes of T5 1.1, long_local, or tiny for a first try.')
flags.DEFINE_list('dtypes', 'float32,bfloat16', 'Dtypes.')
flags.DEFINE_integer('batch_size', 4, 'Sequences of a step.', lower_bound=1)
flags.DEFINE_integer('steps', 10, 'Steps per round that are measured.', lower_bound=1)
flags.DEFINE_integer('rounds', 3, 'How often each contender is measured.', lower_bound=1)
flags.DEFINE_string('t5x', '', 'Folder of a checkout of T5X.')
flags.DEFINE_string('t5x_python', sys.executable, "The Python that has T5X's packages.")


class Trial(NamedTuple):
    """The work of a contender in a round."""

    device: str  # cpu or gpu
    size: str
    dtype: str
    batch_size: int
    num_steps: int
    vocabulary: str  # a file


class Measurement(NamedTuple):
    """The figures of a contender in one round."""

    seconds: float  # per step
    num_parameters: int
    peak_bytes: int
    data_wait: float = 0.0  # share of the time; only ours has this and the next field
    products_seconds: float = 0.0  # a step's products, each alone


def main(argv: list[str]) -> None:
    # This process prepares and reports, and leaves the GPU to the contenders.
    jax.config.update('jax_platforms', 'cpu')
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.95')
    missing = turns.print_conditions('jax', 'torch', 'transformers')
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(
            device=FLAGS.device,
            size=FLAGS.sizes[0],
            dtype=FLAGS.dtypes[0],
            batch_size=FLAGS.batch_size,
            num_steps=FLAGS.steps,
            vocabulary=f'{folder}/vocabulary.model',
        )
        write_vocabulary(trial)
        turns.print_header(
            'size', 'dtype', 'contender', 'parameters', 'sequences/s', 'GB', 'data wait', 'ours is'
        )
        for size in FLAGS.sizes:
            for dtype in FLAGS.dtypes:
                trial = trial._replace(size=size, dtype=dtype)
                contenders = {'ours': measure_ours} | rivals(dtype, not missing)
                print_rows(trial, turns.take_turns(contenders, FLAGS.rounds, trial))


def rivals(dtype: str, has_transformers: bool) -> dict[str, Callable]:
    """Return {name: measuring function} of the rivals in a dtype."""
    measures: dict[str, Callable] = {}
    if has_transformers:
        measures['transformers'] = functools.partial(measure_transformers, 'float32')
        if dtype == 'bfloat16':
            weights = functools.partial(measure_transformers, 'bfloat16')
            measures['transformers, bfloat16 weights'] = weights
    if FLAGS.t5x:
        measures['T5X'] = functools.partial(measure_t5x, FLAGS.t5x_python, FLAGS.t5x)
    contenders: dict[str, Callable] = {}
    for name, measure in measures.items():
        contenders[name] = functools.partial(measure, False)
        if os.environ.get(process.VARIABLE) == process.SETTING:
            contenders[f'{name}, huge pages'] = functools.partial(measure, True)
    return contenders


def print_rows(trial: Trial, measurements: Mapping[str, Sequence[Measurement]]) -> None:
    """Print the rows of a size and dtype."""
    rates = {}
    for name, rounds in measurements.items():
        rates[name] = [trial.batch_size / x.seconds for x in rounds]
    ours = statistics.median(rates['ours'])
    for name, rounds in measurements.items():
        num_parameters = f'{rounds[0].num_parameters:,}'
        gigabytes = f'{max(x.peak_bytes for x in rounds) / 1e9:.1f}'
        wait = f'{statistics.median(x.data_wait for x in rounds):.1%}' if name == 'ours' else ''
        ratio = f'{ours / statistics.median(rates[name]):.2f} x'
        cells = [num_parameters, turns.spread(rates[name]), gigabytes, wait, ratio]
        turns.print_row(trial.size, trial.dtype, name, *cells)
    limits = [trial.batch_size / x.products_seconds for x in measurements['ours']]
    ratio = f'{ours / statistics.median(limits):.2f} x'
    turns.print_row(
        trial.size, trial.dtype, 'products alone', '', turns.spread(limits), '', '', ratio
    )


# The contenders.


def config_of(trial: Trial) -> Any:
    """Return the config of our run."""
    config = t5_1_1.get_config('small' if trial.size in ('tiny', 'long_local') else trial.size)
    if trial.size == 'tiny':
        config.model.update(TINY)
    if trial.size == 'long_local':
        config.model.module = 'long_t5'
        config.model.options.update(encoder_attention='local')
        config.data.lengths.update(inputs=4096, targets=910)
        config.data.mean_noise_span_length = 10.0  # fewer spans than sentinels
    config.model.dtype = trial.dtype
    config.model.dropout_rate = DROPOUT_RATE
    config.data.task = 'span_corruption'
    config.data.files = ''
    config.data.num_workers = GPU_WORKERS if trial.device == 'gpu' else 0
    config.train.batch_size = trial.batch_size
    config.train.num_microbatches = 1
    return config


def write_vocabulary(trial: Trial) -> None:
    """Train a vocabulary on the text of the trial."""
    config = config_of(trial).data
    texts = training_texts(tasks.open.open_mixture(config))
    Path(trial.vocabulary).write_bytes(train_vocabulary(texts, config.num_pieces))


def measure_ours(trial: Trial) -> Measurement:
    """Measure the work of loop.take_steps between two lines of metrics."""
    jax.config.update('jax_platforms', 'cuda' if trial.device == 'gpu' else 'cpu')
    compilation_cache.use()
    config = config_of(trial)
    device = jax.devices()[0]
    spec = make_spec(config, devices=[device])
    train_step = train.compile_step(spec)
    stream = Stream(
        tasks.open.open_mixture(config.data),
        'train',
        vocabulary.SentencePieceVocabulary(Path(trial.vocabulary).read_bytes()),
        config.data,
        batch_size=trial.batch_size,
        seed=config.seed,
    )
    batches = Batches(stream, config.data.num_workers, may_end=False)
    state = train.compile_init(spec)()
    num_parameters = sum(x.size for x in state.params.values())
    interval = Interval()
    clock = Clock()
    for step in range(WARM_UP_STEPS + trial.num_steps):
        if step == WARM_UP_STEPS:
            interval.wait(all_steps=True)
            interval = Interval()
            clock.restart()
        with clock.doing('steps'), clock.taking_step():
            with clock.doing('waiting for data'):
                batch = batches.next()
            on_device = partition.place_rows(spec.mesh, batch.features)
            state, metrics = train_step(state, on_device)
            interval.add(metrics, batch.features, batch.before)
            interval.wait(all_steps=clock.seconds_of_last_step > 1)
    with clock.doing('steps'):
        interval.fetch()
    seconds = clock.seconds
    assert all(metrics['finite'] for metrics in interval.metrics)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if trial.device == 'gpu':
        peak_bytes = device.memory_stats()['peak_bytes_in_use']
    program = train.jit_step(spec).trace(state, on_device).jaxpr
    del state, on_device, metrics
    products_seconds = 0.0
    for product, count in products_in(program.jaxpr).items():
        products_seconds += count * measure_product(product)
    return Measurement(
        seconds=seconds / trial.num_steps,
        num_parameters=num_parameters,
        peak_bytes=peak_bytes,
        data_wait=clock.data_wait_seconds / seconds,
        products_seconds=products_seconds,
    )


def measure_transformers(weights: str, has_huge_pages: bool, trial: Trial) -> Measurement:
    """Measure the train step of transformers, with parameters of the dtype `weights`."""
    config = config_of(trial)
    sizes = {theirs: config.model[ours] for theirs, ours in hugging_face.SIZES.items()}
    sizes |= {
        'feed_forward_proj': 'gated-gelu',
        'tie_word_embeddings': False,
        'dropout_rate': DROPOUT_RATE,
        'decoder_start_token_id': 0,
        'use_cache': False,
    }
    if trial.size == 'long_local':
        sizes['encoder_attention_type'] = 'local'
    return run_program(
        'train_transformers.py',
        sys.executable,
        has_huge_pages,
        trial,
        sizes=sizes,
        weights=weights,
        dtype=trial.dtype,
        device='cuda' if trial.device == 'gpu' else 'cpu',
    )


def measure_t5x(python: str, checkout: str, has_huge_pages: bool, trial: Trial) -> Measurement:
    """Measure the train step of the T5X in `checkout`, in another Python."""
    config = config_of(trial)
    sizes = {name: config.model[name] for name in train_t5x.SIZES}
    return run_program(
        'train_t5x.py', python, has_huge_pages, trial, sizes=sizes, checkout=checkout
    )


def run_program(
    file: str, python: str, has_huge_pages: bool, trial: Trial, **arguments: Any
) -> Measurement:
    """Run a program of this folder, which measures a rival, with a Python."""
    lengths = config_of(trial).data.lengths
    arguments |= {
        'lengths': [lengths.inputs, lengths.targets],
        'batch_size': trial.batch_size,
        'num_warm_up_steps': WARM_UP_STEPS,
        'num_steps': trial.num_steps,
    }
    environment = os.environ | ({'JAX_PLATFORMS': 'cpu'} if trial.device == 'cpu' else {})
    if not has_huge_pages:
        environment.pop(process.VARIABLE, None)
    return Measurement(**turns.output_of(python, file, arguments, environment))


class Product(NamedTuple):
    """A matrix product of a program, as lax.dot_general has it."""

    left_shape: tuple[int, ...]
    right_shape: tuple[int, ...]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    batched: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: str
    output_dtype: str


def products_in(program: Any) -> Counter[Product]:
    """Return {product: how often the program, a jaxpr, computes it}, loops included."""
    products: Counter[Product] = Counter()
    for equation in program.eqns:
        if equation.primitive is lax.dot_general_p:
            left, right = (x.aval for x in equation.invars)
            contracted, batched = equation.params['dimension_numbers']
            output_dtype = str(equation.outvars[0].aval.dtype)
            dtype = str(left.dtype)
            products[
                Product(left.shape, right.shape, contracted, batched, dtype, output_dtype)
            ] += 1
        times = 1
        if equation.primitive.name == 'scan':
            times = equation.params['length']
        for value in equation.params.values():
            inner = getattr(value, 'jaxpr', value)
            if hasattr(inner, 'eqns'):
                for product, count in products_in(inner).items():
                    products[product] += times * count
    return products


def measure_product(product: Product) -> float:
    """Return the seconds of a matrix product."""
    multiply = jax.jit(
        functools.partial(
            lax.dot_general,
            dimension_numbers=(product.contracted, product.batched),
            preferred_element_type=product.output_dtype,
        )
    )
    left = jnp.ones(product.left_shape, product.dtype)
    right = jnp.ones(product.right_shape, product.dtype)
    return turns.fastest_seconds(lambda: multiply(left, right).block_until_ready())


if __name__ == '__main__':
    process.restart()
    process.begin()  # the variables of main.py, for the processes of the contenders
    app.run(main)
