"""T5's table and the files of results, against parse_tb and SeqIO's loggers.

tests/golden/seqio_t5/results_* and eval_logs/ were made by running t5's parse_tb and SeqIO's
JSONLogger; shared/testdata/seqio_t5/README.md says how.
"""

import json
import math
import pathlib
from concurrent import futures

import pytest

import paths
from run import results

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'seqio_t5'


def golden_scores():
    scores = json.loads((GOLDEN / 'results_scores.json').read_text())
    return {tag: dict(pairs) for tag, pairs in scores.items()}


def test_the_table_is_that_of_parse_tb():
    assert results.table(golden_scores()) == (GOLDEN / 'results_table.csv').read_text()


def test_the_stored_results_give_the_same_table(tmp_path):
    """Written task by task, in any order of steps, and again as a run that resumes does."""
    kept = results.Results(tmp_path)
    by_task = {}
    for tag, values in golden_scores().items():
        task, _, metric = tag.partition('/')
        for step, value in values.items():
            by_task.setdefault((step, task), {})[metric] = value
    for (step, task), values in sorted(by_task.items(), reverse=True):
        kept.write(task, step, {'old': 1.0}, [], 'a')
        kept.write(task, step, values, [], 'a')
    kept.write_table()
    table = (tmp_path / 'results.csv').read_text()
    assert table == (GOLDEN / 'results_table.csv').read_text() + '\n'


def test_columns_of_other_tasks_come_last_by_name_and_averages_need_all_columns():
    scores = {
        'b/f1': {10: 1.0, 20: math.nan},
        'a/accuracy': {20: 50.0, 30: 50.0},
        'glue_sst2_v002/accuracy': {10: 90.0},
        'constant/pearson_corrcoef': {10: math.nan},
    }
    assert results.table(scores).splitlines() == [
        'step,SST-2,a/accuracy,b/f1,constant/pearson_corrcoef',
        '10,90.000,,1.000,nan',
        '20,,50.000,nan,',
        '30,,50.000,,',
        'max,90.000,50.000,1.000,nan',
        'step,10,20,10,10',
    ]


@pytest.mark.parametrize('step', [1000, 2000])
def test_the_files_are_those_of_seqio(step, tmp_path):
    name = f'demo_task-{step:06}.jsonl'
    expected = [json.loads(line) for line in (GOLDEN / 'eval_logs' / name).open()]
    values = {'accuracy': 50.0, 'f1': 61.904761}
    kept = results.Results(tmp_path)
    kept.write('demo_task', step, values, expected, 'hash')
    folder = tmp_path / 'inference_eval'
    assert (folder / name).read_text() == (GOLDEN / 'eval_logs' / name).read_text()
    expected = (GOLDEN / 'eval_logs' / 'demo_task-metrics.jsonl').read_text().splitlines()
    assert (folder / 'demo_task-metrics.jsonl').read_text() == f'{expected[step // 1000 - 1]}\n'


def test_results_of_other_settings_stay(tmp_path):
    kept = results.Results(tmp_path)
    assert kept.settings_of('a/b', 3) is None
    assert kept.write('a/b', 3, {'f1': 1.0}, [{'target': [(0, 1), True]}], 'x')
    assert kept.settings_of('a/b', 3) == 'x'
    assert kept.settings_of('a/b', 4) is None
    files = {file: file.read_bytes() for file in kept.folder.iterdir()}
    assert not kept.write('a/b', 3, {'f1': 2.0}, [], 'y')
    assert {file: file.read_bytes() for file in kept.folder.iterdir()} == files
    assert kept.write('a/b', 3, {'f1': 2.0}, [], 'x')
    assert kept.scores() == {'a_b/f1': {3: 2.0}}


def test_results_of_a_killed_process_are_not_there(tmp_path, monkeypatch):
    kept = results.Results(tmp_path)
    replace_file = paths.replace_file

    def replace_or_die(file, content):
        if file.name.endswith(results.METRICS_SUFFIX):
            raise KeyboardInterrupt
        replace_file(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(paths, 'replace_file', replace_or_die)
        with pytest.raises(KeyboardInterrupt):
            kept.write('a', 3, {'f1': 1.0}, [], 'x')
    assert kept.settings_of('a', 3) is None
    kept.write('a', 3, {'f1': 2.0}, [], 'y')
    assert kept.settings_of('a', 3) == 'y' and kept.scores() == {'a/f1': {3: 2.0}}


def test_two_evaluations_write_at_the_same_time(tmp_path):
    """Each adds its lines to the same files."""
    kept = results.Results(tmp_path)

    def write(step):
        kept.write('task', step, {'accuracy': step}, [{'input': step}], settings='')

    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(60)))
    assert [line['step'] for line in kept.lines('task')] == list(range(60))
    assert all(kept.settings_of('task', step) == '' for step in range(60))
