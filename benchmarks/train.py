"""Our train step against transformers' and T5X's, with data and metrics, on two cores or on one GPU.

    pip install -e '.[peers]'
    python benchmarks/train.py [--device=gpu] [--sizes=small,base,large,xl] [--dtypes=bfloat16]
        [--batch_size=N] [--steps=10] [--rounds=3] [--files=GLOB] [--rivals=REGEX]
        [--t5x=FOLDER [--t5x_python=PYTHON]]

Trains T5 1.1 with dropout 0.1 on sequences of 512 inputs and 114 targets. The contenders take turns,
each in a new process: two steps that are not counted (programs are compiled), then `steps` that are.
On a CPU a batch has 4 sequences. On a GPU the batch of each contender begins with many and is halved
until it fits into memory; where the first one fits, name a larger --batch_size.

    ours          what main.py does between two lines of metrics: documents, here of pydoc, become
                  packed rows while the device computes; the step with its metrics; all of them are
                  fetched. Adafactor, parameters in float32.
    transformers  T5ForConditionalGeneration with SDPA, which that of transformers 4 has not, compiled
                  on a GPU, and its Adafactor with a constant rate. It is given one batch of random ids
                  that lies on the device, full rows without a mask, and its loss is fetched once.
                  `bfloat16` is autocast over parameters in float32, as ours; `bfloat16 weights`
                  keeps no others, so small updates are lost.
    T5X           its Trainer with its Adafactor and metrics, on a CPU, where --t5x names a checkout.
                  It is given one packed batch of random ids. --t5x_python is a Python that has the
                  packages which T5X's setup.py names; AirIO may be missing.

The sizes long_local and long_global are LongT5 as wide and deep as small, with 4,096 inputs and 910
targets, beside transformers' LongT5; give them --batch_size=1 on a CPU.

Where main.py restarts itself with huge pages (modes/process.py), so does this program, and rivals are
measured without and with them. Without transformers and torch they are left out. A GPU needs torch
with CUDA and pip install -e '.[cuda]'; JAX is given 95 % of its memory, unless
XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.

Prints a line per contender: sequences per second, the median of the rounds and the range; tokens per
second, padding included; MFU, the FLOPs of T5's formula (modes/plan.py) over the peak of the GPU, or
of other devices over the speed of a large matrix product in the same run; the largest memory of the
process, on a GPU of its arrays; the share of the time in which ours waits for data; and how many
times as fast ours is. Then two limits: a step of products as fast as a large one, and on a CPU the
products of the step itself, each timed alone with the shapes that it has there.

The goal: on a CPU 1.4 times both rivals, 1.2 times with huge pages; on a GPU 1.2 times transformers.
On an H200 in bfloat16: base 1,300 sequences per second, large 395, xl 108.
"""

import functools
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

# Before the folder of this file, so that `import train` is what is measured.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import train_t5x
from absl import app, flags
from jax import lax

import partition
import tasks.open
import train
import vocabulary
from configs import t5_1_1
from formats import hugging_face
from modes import compilation_cache, plan, process
from prepare import make_spec
from run import memory
from run.agreement import Batches
from run.interval import Clock, Interval
from run.train_vocabulary import train_vocabulary, training_texts
from stream import Stream

# Sequences that are tried first. Those of base fit into an H200 by its plan (0.45 GiB a sequence), the others
# by its ratio: a step that does not fit has been compiled for minutes.
GPU_BATCH_SIZES = {'tiny': 64, 'small': 512, 'base': 256, 'large': 64, 'xl': 32, 'xxl': 8}
GPU_BATCH_SIZES |= {'long_local': 64, 'long_global': 64}
# {size: the attention of LongT5's encoder}
LONG = {'long_local': 'local', 'long_global': 'transient_global'}
CPU_BATCH_SIZE = 4
# A size for tests.
TINY = dict(
    emb_dim=64, num_heads=2, head_dim=32, mlp_dim=128, num_encoder_layers=2, num_decoder_layers=2
)
DROPOUT_RATE = 0.1
WARM_UP_STEPS = 2
GPU_WORKERS = 4  # processes that make our batches
# {JAX's kind of device: FLOPs per second in bfloat16, without sparsity}, as NVIDIA publishes them.
PEAKS = {'NVIDIA H100 80GB HBM3': 989e12, 'NVIDIA H200': 989e12}
T5X_NETWORK = 't5x/examples/t5/network.py'
PRODUCT_SIZES = {'cpu': 2048, 'gpu': 8192}  # the square matrices to multiply

FLAGS = flags.FLAGS
flags.DEFINE_enum('device', 'cpu', ['cpu', 'gpu'], 'Where to train.')
flags.DEFINE_list('sizes', None, 'Sizes of T5 1.1; of a CPU small, of a GPU also base, large, xl.')
flags.DEFINE_list('dtypes', None, 'Dtypes; of a CPU float32 and bfloat16, of a GPU bfloat16.')
flags.DEFINE_integer('batch_size', None, 'Sequences that are tried first.', lower_bound=1)
flags.DEFINE_integer('steps', 10, 'Steps per round that are measured.', lower_bound=1)
flags.DEFINE_integer('rounds', 3, 'How often each contender is measured.', lower_bound=1)
flags.DEFINE_string('files', '', 'Globs of text files, as data.files; pydoc if not given.')
flags.DEFINE_string('rivals', '.*', 'Regular expression of the rivals that are measured.')
flags.DEFINE_string('t5x', '', 'Folder of a checkout of T5X.')
flags.DEFINE_string('t5x_python', sys.executable, "The Python that has T5X's packages.")
DTYPES = ('float32', 'bfloat16')
flags.register_validator(
    'sizes',
    lambda sizes: set(sizes or []) <= GPU_BATCH_SIZES.keys(),
    f'use some of {", ".join(GPU_BATCH_SIZES)}',
)
flags.register_validator(
    't5x',
    lambda folder: not folder or (Path(folder) / T5X_NETWORK).is_file(),
    f'name a folder that has {T5X_NETWORK}',
)
flags.register_validator(
    'dtypes', lambda dtypes: set(dtypes or []) <= set(DTYPES), f'use some of {", ".join(DTYPES)}'
)


class Job(NamedTuple):
    """What a contender does in a round."""

    device: str  # cpu or gpu
    size: str
    dtype: str
    batch_size: int
    num_steps: int
    files: str
    vocabulary: str  # a file


class Measurement(NamedTuple):
    """What one contender did in one round."""

    batch_size: int
    seconds: float  # per step
    num_parameters: int
    peak_bytes: int
    device_kind: str = ''  # JAX's name; this and the fields below are measured beside ours alone
    data_wait: float = 0.0  # share of the time
    product_flops: float = 0.0  # per second, of a large matrix product
    own_products_seconds: float = 0.0  # a step's products, each alone; 0 on a GPU


Measure = Callable[[Job], Measurement]


def main(argv: list[str]) -> None:
    # This process prepares and reports, and leaves the GPU to the contenders.
    jax.config.update('jax_platforms', 'cpu')
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.95')
    is_gpu = FLAGS.device == 'gpu'
    if is_gpu and FLAGS.t5x:
        sys.exit(f'--t5x={FLAGS.t5x}: T5X is measured on CPUs: leave it out, or --device=cpu')
    if is_gpu and not in_new_process(has_gpu):
        sys.exit("--device=gpu: JAX finds none here: pip install -e '.[cuda]', or --device=cpu")
    sizes = FLAGS.sizes or (['small', 'base', 'large', 'xl'] if is_gpu else ['small'])
    dtypes = FLAGS.dtypes or (['bfloat16'] if is_gpu else DTYPES)
    names = ['jax']
    missing = [x for x in ('torch', 'transformers') if importlib.util.find_spec(x) is None]
    if missing:
        print(
            f"{', '.join(missing)} not installed: no transformers without pip install -e '.[peers]'"
        )
    else:
        names += ['torch', 'transformers']
    print(', '.join(f'{name} {version(name)}' for name in names), end='; ')
    print(f'{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}')
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            device=FLAGS.device,
            size=sizes[0],
            dtype=dtypes[0],
            batch_size=0,
            num_steps=FLAGS.steps,
            files=FLAGS.files,
            vocabulary=f'{folder}/vocabulary.model',
        )
        write_vocabulary(job)
        limits = []
        print_cells(COLUMNS)
        for size in sizes:
            for dtype in dtypes:
                first = GPU_BATCH_SIZES[size] if is_gpu else CPU_BATCH_SIZE
                job = job._replace(size=size, dtype=dtype, batch_size=FLAGS.batch_size or first)
                contenders = {'ours': measure_ours} | rivals(dtype, not missing)
                found = take_turns(contenders, job, FLAGS.rounds)
                limits.append(print_lines(found, job))
        print('\n'.join(limits))


def rivals(dtype: str, has_transformers: bool) -> dict[str, Measure]:
    """Return the rivals in a dtype that --rivals names."""
    measures: dict[str, Callable[[bool, Job], Measurement]] = {}
    if has_transformers:
        measures['transformers'] = functools.partial(measure_transformers, 'float32')
        if dtype == 'bfloat16':
            weights = functools.partial(measure_transformers, 'bfloat16')
            measures['transformers, bfloat16 weights'] = weights
    if FLAGS.t5x:
        measures['T5X'] = functools.partial(measure_t5x, FLAGS.t5x_python, FLAGS.t5x)
    named: dict[str, Measure] = {}
    for name, measure in measures.items():
        named[name] = functools.partial(measure, False)
        if os.environ.get(process.VARIABLE) == process.SETTING:
            named[f'{name}, huge pages'] = functools.partial(measure, True)
    return {name: named[name] for name in named if re.search(FLAGS.rivals, name)}


def take_turns(
    contenders: Mapping[str, Measure], job: Job, num_rounds: int
) -> dict[str, list[Measurement]]:
    """Return the rounds of each contender, all with one batch size.

    It is halved where memory does not suffice, and the contender starts again. One that cannot
    train on a single sequence has no rounds.
    """
    found: dict[str, list[Measurement]] = {name: [] for name in contenders}
    batch_sizes = dict.fromkeys(contenders, job.batch_size)
    for _ in range(num_rounds):
        for name, measure in contenders.items():
            measured = None
            while measured is None and batch_sizes[name]:
                measured = in_new_process(
                    measure_or_none, measure, job._replace(batch_size=batch_sizes[name])
                )
                if measured is None:
                    batch_sizes[name] //= 2
                    found[name].clear()
                else:
                    found[name].append(measured)
    return found


def measure_or_none(measure: Measure, job: Job) -> Measurement | None:
    """Return the measurement, or None where memory does not suffice."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep what libraries print out of the table
    try:
        return measure(job)
    except MemoryError:
        return None
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        return None


def in_new_process(function: Callable, *arguments: Any) -> Any:
    with futures.ProcessPoolExecutor(1, get_context('spawn')) as pool:
        return pool.submit(function, *arguments).result()


def has_gpu() -> bool:
    jax.config.update('jax_platforms', None)
    return jax.devices()[0].platform == 'gpu'


# The table.

COLUMNS = {  # {title: width}
    'size': 11,
    'dtype': 8,
    'contender': 30,
    'parameters': 14,
    'batch': 5,
    'sequences/s': 11,
    'min..max': 14,
    'tokens/s': 9,
    'MFU': 4,
    'GB': 5,
    'data wait': 9,
    'ours is': 7,
}


def print_cells(cells: Iterable[str]) -> None:
    """Print a line of the table, words to the left and numbers to the right."""
    padded = []
    for i, (cell, width) in enumerate(zip(cells, COLUMNS.values(), strict=True)):
        padded.append(cell.ljust(width) if i < 3 else cell.rjust(width))
    print('  '.join(padded).rstrip(), flush=True)


def print_lines(found: Mapping[str, Sequence[Measurement]], job: Job) -> str:
    """Print the lines of a size and dtype. Return one that says what limits ours."""
    spec = make_spec(config_of(job), devices=jax.devices()[:1])
    flops = plan.flops_of_step(spec) / spec.batch_size  # per sequence
    num_tokens = sum(config_of(job).data.lengths.values())
    product_flops = max((x.product_flops for x in found['ours']), default=np.nan)
    peak = product_flops
    if found['ours'] and job.dtype == 'bfloat16':
        peak = PEAKS.get(found['ours'][0].device_kind, peak)
    ours = np.nan
    for name, rounds in found.items():
        if not rounds:
            print_cells([job.size, job.dtype, name, '-', 'none fits', *['-'] * 7])
            continue
        rates = rates_of(rounds)
        rate = float(np.median(rates))
        wait = '-'
        ratio = f'{ours / rate:.2f} x'
        if name == 'ours':
            ours = rate
            wait = f'{np.median([x.data_wait for x in rounds]):.1%}'
            ratio = '-'
        cells = [
            job.size,
            job.dtype,
            name,
            f'{rounds[0].num_parameters:,}',
            f'{rounds[0].batch_size}',
            f'{rate:.4g}',
            f'{min(rates):.4g}..{max(rates):.4g}',
            f'{rate * num_tokens:,.0f}',
            f'{flops * rate / peak:.0%}',
            f'{max(x.peak_bytes for x in rounds) / 1e9:.1f}',
            wait,
            ratio,
        ]
        print_cells(cells)
    limit = product_flops / flops
    lines = [
        f'{job.size}, {job.dtype}: the products of a sequence are {flops / 1e9:.4g} GFLOP; at the '
        f'{product_flops / 1e9:,.4g} GFLOP/s of a large one that is {limit:.4g} sequences/s, and ours has '
        f'{ours / limit:.0%} of it'
    ]
    own = [x.batch_size / x.own_products_seconds for x in found['ours'] if x.own_products_seconds]
    if own:
        own_limit = float(np.median(own))
        text = (
            f'{job.size}, {job.dtype}: with each product of a step timed alone that is {own_limit:.4g} sequences/s, '
            f'and ours has {ours / own_limit:.0%} of it'
        )
        if found.get('transformers') and own_limit < np.median(rates_of(found['transformers'])):
            text += '; transformers is faster than the products of XLA alone'
        lines.append(text)
    return '\n'.join(lines)


def rates_of(rounds: Sequence[Measurement]) -> list[float]:
    """Return the sequences per second of each round."""
    return [x.batch_size / x.seconds for x in rounds]


# The contenders.


def config_of(job: Job) -> Any:
    """Return the config of our run."""
    config = t5_1_1.get_config('small' if job.size in ('tiny', *LONG) else job.size)
    if job.size == 'tiny':
        config.model.update(TINY)
    if job.size in LONG:
        config.model.module = 'long_t5'
        config.model.options.update(encoder_attention=LONG[job.size])
        config.data.lengths.update(inputs=4096, targets=910)
        config.data.mean_noise_span_length = 10.0  # fewer spans than sentinels
    config.model.dtype = job.dtype
    config.model.dropout_rate = DROPOUT_RATE
    config.data.task = 'span_corruption'
    config.data.files = job.files
    config.data.num_workers = GPU_WORKERS if job.device == 'gpu' else 0
    config.train.batch_size = job.batch_size
    config.train.num_microbatches = 1
    return config


def write_vocabulary(job: Job) -> None:
    """Train a vocabulary on the text of the job."""
    config = config_of(job).data
    texts = training_texts(tasks.open.open_mixture(config))
    Path(job.vocabulary).write_bytes(train_vocabulary(texts, config.num_pieces))


def measure_ours(job: Job) -> Measurement:
    """Measure what train.take_steps does between two lines of metrics."""
    jax.config.update('jax_platforms', 'cuda' if job.device == 'gpu' else 'cpu')
    compilation_cache.use()
    config = config_of(job)
    device = jax.devices()[0]
    spec = make_spec(config, devices=[device])
    train_step = train.compile_step(spec)
    if memory.step_bytes(train_step, spec.mesh, 0) > memory.memory_limit(spec.mesh):
        raise MemoryError
    stream = Stream(
        tasks.open.open_mixture(config.data),
        'train',
        vocabulary.SentencePieceVocabulary(Path(job.vocabulary).read_bytes()),
        config.data,
        batch_size=job.batch_size,
        seed=config.seed,
    )
    batches = Batches(stream, config.data.num_workers, may_end=False)
    state = train.compile_init(spec)()
    interval = Interval()
    clock = Clock()
    for step in range(WARM_UP_STEPS + job.num_steps):
        if step == WARM_UP_STEPS:
            interval.wait(all_steps=True)
            interval = Interval()
            clock.restart()
        with clock.taking_step():
            with clock.waiting_for_data():
                batch = batches.next()
            on_device = partition.place_rows(spec.mesh, batch.features)
            state, metrics = train_step(state, on_device)
            interval.add(metrics, batch.features, batch.before)
            interval.wait(all_steps=clock.seconds_of_last_step > 1)
    interval.fetch()
    seconds = clock.seconds
    assert not interval.not_finite()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if job.device == 'gpu':
        peak_bytes = device.memory_stats()['peak_bytes_in_use']
    own_products_seconds = 0.0
    if job.device == 'cpu':
        program = train.jit_step(spec).trace(state, on_device).jaxpr
        for product, count in products_in(program.jaxpr).items():
            own_products_seconds += count * measure_product(product)
    n = PRODUCT_SIZES[job.device]
    large = Product((n, n), (n, n), ((1,), (0,)), ((), ()), job.dtype, job.dtype)
    return Measurement(
        batch_size=job.batch_size,
        seconds=seconds / job.num_steps,
        num_parameters=sum(x.size for x in state.params.values()),
        peak_bytes=peak_bytes,
        device_kind=device.device_kind,
        data_wait=clock.data_wait_seconds / seconds,
        product_flops=2 * n**3 / measure_product(large),
        own_products_seconds=own_products_seconds,
    )


def measure_transformers(weights: str, has_huge_pages: bool, job: Job) -> Measurement:
    """Measure the train step of transformers, with parameters of the dtype `weights`."""
    config = config_of(job)
    sizes = {theirs: config.model[ours] for theirs, ours in hugging_face.SIZES.items()}
    sizes |= {
        'feed_forward_proj': 'gated-gelu',
        'tie_word_embeddings': False,
        'dropout_rate': DROPOUT_RATE,
        'decoder_start_token_id': 0,
        'use_cache': False,
    }
    if job.size in LONG:
        attention, _ = hugging_face.LONG_T5_ATTENTIONS[LONG[job.size]]
        sizes['encoder_attention_type'] = attention
    return run_program(
        'train_transformers.py',
        sys.executable,
        has_huge_pages,
        job,
        sizes=sizes,
        weights=weights,
        dtype=job.dtype,
        device='cuda' if job.device == 'gpu' else 'cpu',
    )


def measure_t5x(python: str, checkout: str, has_huge_pages: bool, job: Job) -> Measurement:
    """Measure the train step of the T5X in `checkout`, in another Python."""
    config = config_of(job)
    sizes = {name: config.model[name] for name in train_t5x.SIZES}
    return run_program('train_t5x.py', python, has_huge_pages, job, sizes=sizes, checkout=checkout)


def run_program(
    file: str, python: str, has_huge_pages: bool, job: Job, **arguments: Any
) -> Measurement:
    """Run a program of this folder, which measures a rival, with a Python."""
    lengths = config_of(job).data.lengths
    arguments |= {
        'lengths': [lengths.inputs, lengths.targets],
        'batch_size': job.batch_size,
        'num_warm_up_steps': WARM_UP_STEPS,
        'num_steps': job.num_steps,
    }
    environment = os.environ | ({'JAX_PLATFORMS': 'cpu'} if job.device == 'cpu' else {})
    if not has_huge_pages:
        environment.pop(process.VARIABLE, None)
    done = subprocess.run(
        [python, Path(__file__).with_name(file), json.dumps(arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    if measured is None:
        raise MemoryError
    return Measurement(batch_size=job.batch_size, **measured)


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
    """Return the seconds of the fastest of five computations of a matrix product."""
    multiply = jax.jit(
        functools.partial(
            lax.dot_general,
            dimension_numbers=(product.contracted, product.batched),
            preferred_element_type=product.output_dtype,
        )
    )
    left = jnp.ones(product.left_shape, product.dtype)
    right = jnp.ones(product.right_shape, product.dtype)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        multiply(left, right).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


if __name__ == '__main__':
    process.restart()
    app.run(main)
