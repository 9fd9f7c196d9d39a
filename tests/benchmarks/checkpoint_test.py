"""benchmarks/checkpoint.py on a tiny model: what its tables say, and that it sees wrong arrays."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from benchmark_scripts import assert_refuses, run
from forms import first_quick

SCRIPT = 'checkpoint.py'


@pytest.mark.long
@pytest.mark.slow
def test_tables(benchmark, tmp_path):
    done = run(SCRIPT, '--sizes=tiny', '--rounds=2', f'--folder={tmp_path}')
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    rows = {'saving': {}, 'restoring': {}}
    for line in done.stdout.splitlines():
        cells = re.split(' {2,}', line)
        if cells[0] in rows:
            columns = cells
        elif len(cells) > 2:
            rows[columns[0]][cells[0]] = dict(zip(columns[1:], cells[1:], strict=True))
    names = ['ours', 'orbax', 'plain']
    if importlib.util.find_spec('orbax') is None:
        names.remove('orbax')
    assert list(rows['saving']) == names
    assert list(rows['restoring']) == ['ours', 'ours, with checksums', *names[1:]]
    gigabytes = benchmark.num_bytes('tiny') / 1e9
    assert f'{gigabytes:.3f} GB' in done.stdout
    for row in rows['saving'].values():
        low, high = map(float, row['min..max'].split('..'))
        assert low <= float(row['finished']) <= high
        assert float(row['call']) <= high + 0.01
    assert re.search(r'^tiny: the disk writes \S+ GB/s and reads \S+; ours has', done.stdout, re.M)
    assert re.search(r'^tiny: training is blocked for one copy and -?\d+ ms$', done.stdout, re.M)


@pytest.mark.slow
def test_refuses():
    assert_refuses(SCRIPT, '--sizes=2GB', '--sizes')


@pytest.mark.slow
@pytest.mark.parametrize('name', first_quick(['Ours', 'OursVerified', 'Plain']))
def test_sees_wrong_arrays(benchmark, tmp_path, name):
    """What is restored is compared, also with a state that was donated right after the call."""

    contender = getattr(benchmark, name)

    class Wrong(contender):
        def restore(self, step):
            state = super().restore(step)
            path = max(state.params)
            x = np.array(state.params[path])
            x.flat[-1] += 1
            return state._replace(params=state.params | {path: jax.numpy.asarray(x)})

    benchmark.measure_save(contender, 'tiny', str(tmp_path))
    assert benchmark.measure_restore(contender, 'tiny', str(tmp_path)) > 0
    with pytest.raises(AssertionError, match='differ'):
        benchmark.measure_restore(Wrong, 'tiny', str(tmp_path))
