"""What `prepare` refuses before anything is compiled, in one line that names the setting or the file."""

import shutil

import pytest
from report_runs import DAMAGED_LINES, damage_line, write_results
from runs import ROOT, small_config

from formats import best
from prepare import prepare

LOSS = 'training_eval/span_corruption/loss'
T5X = str(ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6')  # 2 layers, after six steps
BEST = {'save.best_metric': LOSS, 'save.best_is': 'lower'}
OF_T5X = {
    'model.vocab_size': 384,
    'model.emb_dim': 32,
    'model.num_heads': 4,
    'model.mlp_dim': 64,
    'model.num_encoder_layers': 2,
    'model.num_decoder_layers': 2,
    'data.vocabulary': 'bytes',
    'restore.path': T5X,
    'train.steps': 8,
}
# {name: (settings of a new run, what the message names)}
NEW = {
    'patience without a metric': ({'train.early_stopping': 2}, 'train.early_stopping=2'),
    'no direction': ({'save.best_metric': LOSS}, 'save.best_is=higher or'),
    'periods': (BEST | {'eval.every_steps': 2}, 'save.every_steps=3 and eval.every_steps=2'),
    'no task metrics': (
        BEST | {'save.best_metric': 'inference_eval/qa/f1'},
        'infer_eval.every_steps=0',
    ),
    'unknown metric': (BEST | {'save.best_metric': LOSS[:-1]}, f'{LOSS}, '),
    '3 microbatches': ({'train.num_microbatches': 3}, "use 'auto' or one of 1, 2, 4"),
    '0 microbatches': ({'train.num_microbatches': 0}, "use 'auto' or one of 1, 2, 4"),
    '8 microbatches': ({'train.num_microbatches': 8}, "use 'auto' or one of 1, 2, 4"),
    'no expression': ({'optimizer.trainable': '('}, "optimizer.trainable='('"),
    'nothing trained': ({'optimizer.trainable': 'encode/.*'}, "optimizer.trainable='encode/.*'"),
    'part of a path': ({'optimizer.trainable': 'decoder'}, "optimizer.trainable='decoder'"),
    'no checkpoint': (OF_T5X | {'restore.path': 'nowhere'}, 'restore.path=nowhere'),
    'no pattern': (OF_T5X | {'restore.only': '('}, "restore.only='('"),
    'nothing restored': (OF_T5X | {'restore.only': 'encoder/.*'}, "'encoder/.*' matches no"),
    'unknown dtype': (OF_T5X | {'restore.dtype': 'float8'}, "restore.dtype='float8'"),
    'no step is left': (OF_T5X | {'train.steps': 6}, 'train.relative_steps, or restore.only='),
    'no vocabulary': (OF_T5X | {'data.vocabulary': ''}, 'data.vocabulary'),
    'fewer layers': (OF_T5X | {'model.num_decoder_layers': 1}, 'not there'),
    'more layers': (OF_T5X | {'model.num_decoder_layers': 3}, 'is missing, not'),
}


def refused(config, folder):
    """Return the message with which a run is refused."""
    with pytest.raises(ValueError) as error:
        prepare(config, folder)
    assert '\n' not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize('changes, words', NEW.values(), ids=NEW)
def test_a_new_run_is_refused(corpus, tmp_path, changes, words):
    config = small_config(corpus)
    config.update_from_flattened_dict(changes)
    assert words in refused(config, tmp_path / 'run')
    if (tmp_path / 'run').exists():
        names = {file.name for file in (tmp_path / 'run').iterdir()}
        assert names <= {'lock', 'vocabulary.model'}


@pytest.mark.parametrize('save_every, eval_every', [(3, 3), (3, 1), (2, 6)])
def test_periods_that_fit_together(corpus, save_every, eval_every):
    config = small_config(corpus)
    config.update_from_flattened_dict(BEST)
    config.save.every_steps = save_every
    config.eval.every_steps = eval_every
    best.check_settings(config)


# {name: (settings with which a run should resume, what the message names)}
GOING_ON = {
    'model and seed': (
        {'seed': 5, 'model.mlp_dim': 64, 'log.every_steps': 3},
        '(model/mlp_dim: 32 -> 64; seed: 0 -> 5)',
    ),
    'kind of files': ({'data.kind': 'text'}, "data/kind: '' -> 'text'"),
    'relative steps': ({'train.relative_steps': 2}, 'train.relative_steps=2'),
}


def snapshot(workdir):
    files = (path for path in workdir.rglob('*') if path.name != 'lock')
    return sorted((path, path.stat().st_mtime_ns) for path in files)


@pytest.mark.parametrize('changes, words', GOING_ON.values(), ids=GOING_ON)
def test_a_run_does_not_go_on_with_other_settings(corpus, uninterrupted, changes, words):
    before = snapshot(uninterrupted)
    config = small_config(corpus)
    config.update_from_flattened_dict(changes)
    assert words in refused(config, uninterrupted)
    assert before == snapshot(uninterrupted)


LINES = [(name, texts[i]) for name, texts in DAMAGED_LINES.items() for i in (0, 1, 3)]
SETTINGS = [('config.json', text) for text in ('{"model": ', '', '[1]')]


@pytest.mark.parametrize('name, text', LINES + SETTINGS, ids=lambda text: text[:30])
def test_a_damaged_file_of_a_run_is_named(corpus, uninterrupted, tmp_path, name, text):
    shutil.copytree(uninterrupted, tmp_path / 'run')
    file = tmp_path / 'run' / name
    if name == 'config.json':
        file.write_text(text)
    else:
        for step in (1, 2, 3):
            write_results(tmp_path / 'run', 'qa', step, [], f1=5.0)
        damage_line(file, 2, text)
    before = (tmp_path / 'run/metrics.jsonl').read_bytes()
    assert str(file) in refused(small_config(corpus, steps=9), tmp_path / 'run')
    assert (tmp_path / 'run/metrics.jsonl').read_bytes() == before


def test_a_checkpoint_of_another_program_in_the_workdir(corpus, tmp_path):
    shutil.copytree(T5X, tmp_path / 'checkpoint_6')
    assert 'checkpoint_6 is in it' in refused(small_config(corpus), tmp_path)
