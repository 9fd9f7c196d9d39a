"""benchmarks/train.py on a tiny model: its table, what it counts, and batches that do not fit."""

import os
import re
import shutil
import sys

import jax
import pytest
from benchmark_scripts import assert_refuses, run

from modes import process

SCRIPT = 'train.py'
# T5's formula by hand for SCRIPT's tiny size: 512 inputs, 114 targets, width 64, two heads of 32, two
# layers each, MLPs of three matrices 64 x 128, 32,128 ids. A product of n x m and m x k has 2nmk.
ENCODER_LAYER = 2 * 512 * (4 * 64 * 64 + 3 * 64 * 128) + 4 * 512 * 512 * 64
DECODER_LAYER = (
    2 * 114 * (4 * 64 * 64 + 3 * 64 * 128)  # its own projections and MLP
    + 4 * 114 * 114 * 64  # its own attention
    + 4 * 114 * 64 * 64  # queries and output of the other attention
    + 4 * 512 * 64 * 64  # keys and values of it
    + 4 * 114 * 512 * 64
)
FLOPS = 3 * (
    2 * ENCODER_LAYER + 2 * DECODER_LAYER + 2 * 114 * 64 * 32128
)  # backward is twice forward
# Two embeddings; per layer of the encoder 4 + 3 matrices and 2 norms, of the decoder 8 + 3 and 3; two
# last norms and two tables of relative positions.
NUM_PARAMETERS = (
    2 * 32128 * 64
    + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    + 2 * (8 * 64 * 64 + 3 * 64 * 128 + 3 * 64)
    + 2 * 64
    + 2 * 32 * 2
)


def table_of(corpus, dtype, *arguments):
    """Return the lines of the table, {contender: {column: text}}, and the whole output."""
    short = ['--sizes=tiny', '--batch_size=2', '--steps=1', '--rounds=1']
    done = run(SCRIPT, *short, f'--dtypes={dtype}', f'--files={corpus}', *arguments)
    assert done.returncode == 0, done.stderr
    _, header, *lines = [x for x in done.stdout.splitlines() if 'not installed' not in x]
    columns = re.split(' {2,}', header)
    table = {}
    for line in lines:
        if line.startswith('tiny  '):
            row = dict(zip(columns, re.split(' {2,}', line), strict=True))
            table[row['contender']] = row
    return table, done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_table(corpus):
    table, output = table_of(corpus, 'float32', '--rivals=none')
    [row] = table.values()
    assert list(row) == [
        *('size', 'dtype', 'contender', 'parameters', 'batch', 'sequences/s', 'min..max'),
        *('tokens/s', 'MFU', 'GB', 'data wait', 'ours is'),
    ]
    assert (row['size'], row['dtype'], row['contender']) == ('tiny', 'float32', 'ours')
    assert row['parameters'] == f'{NUM_PARAMETERS:,}'
    assert row['batch'] == '2'
    rate = float(row['sequences/s'])
    assert rate > 0
    assert number(row['tokens/s']) == pytest.approx(rate * (512 + 114), rel=1e-3)
    [[gigaflop, peak, limit, share]] = re.findall(
        r'^tiny, float32: .* are (\S+) GFLOP; at the (\S+) GFLOP/s .* is (\S+) sequences/s, .* (\d+)% of it$',
        output,
        flags=re.MULTILINE,
    )
    assert float(gigaflop) == pytest.approx(FLOPS / 1e9, rel=1e-3)
    assert number(limit) == pytest.approx(number(peak) * 1e9 / FLOPS, rel=2e-3)
    mfu = 100 * FLOPS * rate / (number(peak) * 1e9)
    for percent in (row['MFU'].rstrip('%'), share):
        assert float(percent) == pytest.approx(mfu, abs=0.6)


def number(text):
    return float(text.replace(',', ''))


@pytest.mark.peers
@pytest.mark.parametrize(
    'dtype, rivals',
    [
        ('float32', ['transformers']),
        pytest.param(
            'bfloat16',
            ['transformers', 'transformers, bfloat16 weights'],
            marks=pytest.mark.slow,  # many CPUs have no bfloat16
        ),
    ],
)
def test_transformers_trains_the_same_model(corpus, dtype, rivals, monkeypatch):
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    monkeypatch.delenv(process.VARIABLE, raising=False)
    table, _ = table_of(corpus, dtype)
    if process.is_supported():
        rivals = [f'{name}{pages}' for name in rivals for pages in ('', ', huge pages')]
    assert list(table) == ['ours', *rivals]
    ours = table.pop('ours')
    for row in table.values():
        assert row['parameters'] == ours['parameters'] == f'{NUM_PARAMETERS:,}'
        assert row['batch'] == ours['batch']
        ratio = float(ours['sequences/s']) / float(row['sequences/s'])
        assert float(row['ours is'].removesuffix(' x')) == pytest.approx(ratio, abs=0.01, rel=1e-3)


@pytest.mark.skipif(
    'T5X_CHECKOUT' not in os.environ, reason='T5X_CHECKOUT names no checkout of T5X'
)
def test_t5x_trains_the_same_model(corpus):
    python = os.environ.get('T5X_PYTHON', sys.executable)
    options = [f'--t5x={os.environ["T5X_CHECKOUT"]}', f'--t5x_python={python}', '--rivals=^T5X$']
    table, _ = table_of(corpus, 'float32', *options)
    assert list(table) == ['ours', 'T5X']
    assert table['T5X']['parameters'] == table['ours']['parameters'] == f'{NUM_PARAMETERS:,}'
    assert table['T5X']['batch'] == '2'
    ratio = float(table['ours']['sequences/s']) / float(table['T5X']['sequences/s'])
    assert float(table['T5X']['ours is'].removesuffix(' x')) == pytest.approx(ratio, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    'argument, flag',
    [
        ('--sizes=small,medium', '--sizes'),
        ('--t5x=configs', '--t5x'),
        ('--dtypes=float16', '--dtypes'),
        pytest.param(
            '--device=gpu',
            '--device=gpu',
            marks=pytest.mark.skipif(bool(shutil.which('nvidia-smi')), reason='has a GPU'),
        ),
    ],
)
def test_refuses(argument, flag):
    assert_refuses(SCRIPT, argument, flag)


@pytest.fixture
def benchmark(benchmark, monkeypatch):
    """The script as a module that starts no processes."""
    monkeypatch.setattr(
        benchmark, 'in_new_process', lambda function, *arguments: function(*arguments)
    )
    monkeypatch.setattr(benchmark.os, 'dup2', lambda *_: None)
    return benchmark


def test_halves_a_batch_that_does_not_fit(benchmark):
    """From the second round on, rival is short of memory at 4 rows; nothing fits for huge."""
    calls = []

    def measure(name, largest):
        def measured(job):
            calls.append((name, job.batch_size))
            if job.batch_size > largest[min(calls.count((name, 4)), len(largest)) - 1]:
                raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')
            return benchmark.Measurement(job.batch_size, 1.0, 1, 1)

        return measured

    job = benchmark.Job('gpu', 'tiny', 'bfloat16', 8, 1, '', '')
    found = benchmark.take_turns(
        {
            'ours': measure('ours', [8]),
            'rival': measure('rival', [4, 2]),
            'huge': measure('huge', [0]),
        },
        job,
        num_rounds=3,
    )
    assert [x.batch_size for x in found['ours']] == [8, 8, 8]
    assert [x.batch_size for x in found['rival']] == [2, 2]
    assert found['huge'] == []
    assert [size for name, size in calls if name == 'rival'] == [8, 4, 4, 2, 2]
    assert [size for name, size in calls if name == 'huge'] == [8, 4, 2, 1]


def test_another_error_is_raised(benchmark):
    def fail(job):
        raise jax.errors.JaxRuntimeError('INTERNAL: a bug')

    with pytest.raises(jax.errors.JaxRuntimeError, match='a bug'):
        benchmark.measure_or_none(fail, None)
