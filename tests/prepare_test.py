"""What `prepare` refuses of the files of a run, before anything is compiled, and what it leaves as it was."""

import shutil

import pytest
from runs import ROOT, damage_line, small_config

from formats import best
from messages import Refused
from prepare import prepare
from run import results

T5X = ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6'


def test_a_new_run_that_is_refused_leaves_no_run(corpus, tmp_path):
    config = small_config(corpus)
    config.restore.path = 'nowhere'
    with pytest.raises(Refused, match='restore.path=nowhere'):
        prepare(config, tmp_path / 'run')
    assert [file.name for file in (tmp_path / 'run').iterdir()] == ['lock']


def test_periods_that_fit_together(corpus):
    config = small_config(corpus)
    config.save.update(best_metric='training_eval/span_corruption/loss', best_is='lower')
    for config.save.every_steps, config.eval.every_steps in ((3, 3), (3, 1), (2, 6)):
        periods = {'eval': config.eval.every_steps, 'infer_eval': 0}
        best.check_settings(config.save, early_stopping=0, periods=periods)


def test_a_run_does_not_go_on_with_other_settings(corpus, uninterrupted):
    def snapshot():
        files = (path for path in uninterrupted.rglob('*') if path.name != 'lock')
        return sorted((path, path.stat().st_mtime_ns) for path in files)

    before = snapshot()
    for changes, names in (
        ({'seed': 5, 'model.mlp_dim': 64, 'log.every_steps': 3}, ['model/mlp_dim', 'seed']),
        ({'train.relative_steps': 2}, ['train.relative_steps=2']),
    ):
        config = small_config(corpus)
        config.update_from_flattened_dict(changes)
        with pytest.raises(Refused) as error:
            prepare(config, uninterrupted)
        assert all(name in str(error.value) for name in names)
        assert 'log' not in str(error.value)
    assert before == snapshot()


TASKS = """
from tasks import Task, metrics

TASKS = [
    Task('row', files={file!r}, inputs='q: {{q}}', targets='{{a}}', metric_fns=[metrics.accuracy]),
]
"""


def test_metrics_that_are_not_computed_are_said(tmp_path, capsys):
    rows = [f'question {i},answer {i}' for i in range(40)]
    (tmp_path / 'x.csv').write_text('\n'.join(['q,a', *rows]))
    (tmp_path / 'mine.py').write_text(TASKS.format(file=str(tmp_path / 'x.csv')))
    config = small_config('')
    own = {'module': f'{tmp_path}/mine.py', 'vocabulary': 'bytes', 'validation_fraction': 0.5}
    config.data.update(files='', task='row', **own)
    prepare(config, tmp_path / 'run').workdir.lock.close()
    assert 'infer_eval.every_steps=0: no metrics of row' in capsys.readouterr().out


def test_a_damaged_file_of_a_run_is_named(corpus, uninterrupted, tmp_path):
    folder = tmp_path / 'run'
    shutil.copytree(uninterrupted, folder)
    for step in (1, 2, 3):
        results.Results(folder).write('qa', step, {'f1': 5.0}, [], settings='hash')
    for name in ('config.json', 'metrics.jsonl', 'inference_eval/qa-metrics.jsonl'):
        valid = (folder / name).read_bytes()
        if name == 'config.json':
            (folder / name).write_text('{"model": ')
        else:
            damage_line(folder / name, 2, '{"step": 2, "ru')
        before = (folder / 'metrics.jsonl').read_bytes()
        with pytest.raises(Refused) as error:
            prepare(small_config(corpus, steps=9), folder)
        assert str(folder / name) in str(error.value)
        assert (folder / 'metrics.jsonl').read_bytes() == before
        (folder / name).write_bytes(valid)


def test_a_checkpoint_of_another_program_in_the_workdir(corpus, tmp_path):
    shutil.copytree(T5X, tmp_path / 'checkpoint_6')
    with pytest.raises(Refused, match='checkpoint_6'):
        prepare(small_config(corpus), tmp_path)
