"""benchmarks/plans.py: what it reads of a plan, the table that it rewrites, and the rows of docs/scaling.md."""

import importlib
import re

import pytest
from benchmark_scripts import run
from runs import ROOT

from modes import topology

SCRIPT = 'plans.py'
TABLE = ROOT / 'benchmarks' / 'plans.csv'
ON_TPUS = """\
T5 with 11,135,332,352 parameters in bfloat16 on 256 devices (TPU v5 lite), mesh {'data': 1, 'fsdp': 256, 'model': 1}
Batch: 2,048 rows of 512 + 114 tokens
Compiled in 310 s
Fits: yes, in 2 microbatch(es): 4.92 of 14.18 GiB of each device
Memory of a device: 4.90 GiB at the peak: parameters 0.16, optimizer 0.01, activations, gradients and the batch 4.73
Collectives of a step on each device, in MB of whole arrays:
  kind               axes          arrays          MB       least  asynchronous
  all-gather         fsdp             530   30,000.00   22,300.00  75%
  all-reduce         data, fsdp       300   10,000.00   10,000.00  0%
Estimate: 1.85 s a step, MFU 0.46. It assumes 1.83 s of computing, XLA's own count of cycles at 1.5 GHz; 0.024 s of \
collectives that nothing hides and 1.2 s of asynchronous ones hidden as far as computing lasts, at 100 GB/s along a ring
Decoding 32 inputs of 512 tokens, 1 answer(s) of 114 tokens each, does NOT fit: 41.72 of 14.18 GiB; on a device
Collectives of a step of decoding on each device: none
"""


def test_figures(benchmark):
    assert benchmark.figures_of(ON_TPUS) == {
        'microbatches': '2',
        'gib': '4.92',
        'of_gib': '14.18',
        'step_seconds': '1.85',
        'mfu': '0.46',
        'exposed_seconds': '0.024',
        'decoding_gib': '41.72',
        'exchanged_gb': '40',
        'asynchronous_share': '0.56',  # 22.5 of 40
    }
    on_gpus = '\n'.join(line for line in ON_TPUS.splitlines() if 'Estimate' not in line)
    figures = benchmark.figures_of(on_gpus)
    assert figures['step_seconds'] == figures['mfu'] == figures['exposed_seconds'] == ''
    assert figures['decoding_gib'] == '41.72'


def test_what_is_planned(benchmark):
    """Each row names another plan, of a config, its settings and a topology that exist."""
    planned = set()
    sizes = {}
    for row in benchmark.read(TABLE):
        key = [row[name] for name in ('config', 'topology', 'settings', 'asynchronous_gradients')]
        assert tuple(key) not in planned, f'twice: {key}'
        planned.add(tuple(key))
        config, _, size = row['config'].partition(':')
        if row['config'] not in sizes:
            module = importlib.import_module(f'configs.{config.removesuffix(".py")}')
            sizes[row['config']] = module.get_config(*filter(None, [size])).to_dict()
        for setting in row['settings'].split():
            values = sizes[row['config']]
            *groups, last = setting.partition('=')[0].split('.')
            for group in groups:
                values = values[group]
            assert last in values or groups == ['model', 'options'], setting
        kind = row['topology'].partition(':')[0]
        assert kind in topology.TPUS or kind in topology.GPUS
        assert row['asynchronous_gradients'] in ('yes', 'no')


def test_a_file_is_written_as_it_is_read(benchmark, tmp_path):
    benchmark.write(tmp_path / 'plans.csv', benchmark.read(TABLE))
    assert (tmp_path / 'plans.csv').read_text() == TABLE.read_text()


def test_the_page_has_rows_of_the_table(benchmark):
    """The table of docs/scaling.md, whose columns are some of these."""
    planned = set()
    for row in benchmark.read(TABLE):
        planned.add((f'{row["gib"]} of {row["of_gib"]}', *(row[name] or '–' for name in (
            'exchanged_gb', 'step_seconds', 'mfu'))))  # fmt: skip
    page = (ROOT / 'docs' / 'scaling.md').read_text()
    rows = re.findall(r'\| ([\d.]+ of [\d.]+) \| (\S+) \| (\S+) \| (\S+) \|', page)
    assert len(rows) >= 8
    assert set(rows) <= planned


@pytest.mark.long
@pytest.mark.slow
def test_one_row_is_planned(benchmark, tmp_path):
    file = tmp_path / 'plans.csv'
    columns = benchmark.read(TABLE)[0]
    settings = 'mesh.data=-1 mesh.fsdp=2 model.scan_layers=True'
    rows = []
    for config in ('tiny.py', 'small_c4.py'):
        row = dict.fromkeys(columns, '') | {'config': config, 'topology': 'cpu:8'}
        rows.append(row | {'settings': settings, 'asynchronous_gradients': 'no', 'mfu': '0.5'})
    benchmark.write(file, rows)
    done = run(SCRIPT, '--only=^tiny', f'--file={file}')
    assert done.returncode == 0, done.stdout + done.stderr
    planned, other = benchmark.read(file)
    assert other == rows[1]
    assert planned['mfu'] == ''  # a CPU has no estimate
    assert 0 < float(planned['gib']) < float(planned['of_gib'])
    assert float(planned['cpu_seconds']) > 1
    assert float(planned['peak_gb']) > 0.1

    rows[0]['settings'] = 'mesh.data=3'
    benchmark.write(file, rows)
    done = run(SCRIPT, '--only=^tiny', f'--file={file}')
    assert done.returncode == 1
    assert 'mesh.data=3' in done.stdout
    assert benchmark.read(file) == rows
