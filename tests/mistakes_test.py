"""A forker's own mistakes: each ends with Python's traceback at the wrong line, and status 1."""

import re
from typing import NamedTuple

import command_line as command_lines
import pytest
from command_line import ROOT
from forms import slow

CONFIG = """
from configs import base

def get_config():
    config = base.get_config()
    config.model.update(vocab_size=384, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)
    config.model.update(num_encoder_layers=1, num_decoder_layers=1)
    config.data.update(files={folder!r} + '/text.txt', vocabulary='bytes')
    config.data.lengths.update(inputs=32, targets=10)
    config.data.validation_fraction = 0.1
    config.train.update(steps=1, batch_size=4)
    return config
"""
LIBRARIES = 'haiku jax optax ml_collections.config_flags tensorstore sentencepiece'
GOLDEN = ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6'


class Mistake(NamedTuple):
    """`file` with `new` instead of `old`, or with `new` alone. `!` marks the wrong line in `new`."""

    file: str
    old: str
    new: str
    words: str  # in the last lines of the traceback
    flags: tuple[str, ...] = ()


MLP = "        return checkpoint_name(y_bTD, 'sum'), {}\n"
PSUM = "        y_bTD = partition.psum(partial_bTD, 'model')  # the sum over the split width\n"
OWN_MODEL = """
import dataclasses
import haiku as hk
import jax.numpy as jnp
import model

class {part}(model.{part}):
    def {method}:
        {body}

def modules(family):
    parts = dataclasses.replace(family.parts, {field}={part})
    return dataclasses.replace(family, parts=parts{more})
"""


def own_model(part, method, body, words, more=''):
    """An own model that overrides a method of a part."""
    text = OWN_MODEL.format(part=part, field=part.lower(), method=method, body=body, more=more)
    return Mistake('own.py', '', text, words, ('--config.model.module=own.py',))


def own_task(body, words, flags=()):
    """An own task. Its records are the lines of text.txt."""
    text = f'from tasks import Task\nimport data\n\n{body}\n'
    return Mistake(
        'own.py', '', text, words, ('--config.data.module=own.py', '--config.data.task=x', *flags)
    )


MISTAKES = {
    'model: a shape': Mistake('model.py', MLP, f'        y_bTD = y_bTD + jnp.ones((3, 7))  # !\n{MLP}', 'TypeError'),
    'model: a dtype': Mistake('model.py', MLP, MLP.replace('y_bTD,', 'y_bTD.astype(jnp.float32),'), 'encoder/layers_0/mlp', ('--config.model.dtype=bfloat16',)),
    'model: a name of a parameter': Mistake('model.py', "name='wo')", "name='wout')", 'encoder/layers_0/mlp/wout/kernel'),
    'model: a missing row of specs': Mistake('model.py', r"    r'.+/mlp/wo/kernel': P('model', 'fsdp'),  # [mlp, embed]" + '\n', '', 'mlp/wo/kernel'),
    'model: a forgotten sum': Mistake('model.py', PSUM, '        y_bTD = partial_bTD\n', 'encoder/layers_0/mlp'),
    'train': Mistake('train.py', "    metrics['finite'] = jnp", "    metrics['grads'] = grads['nothing']  # !\n    metrics['finite'] = jnp", 'KeyError'),
    'own model: a module in an overridden method': own_model(
        'Attention', 'queries(self, x_bTD, positions)', "return super().queries(self.config.parts.norm(self.config, name='q_norm')(x_bTD), positions)", 'name_like'
    ),
    'own model: an error': own_model('Mlp', '__call__(self, x_bTD, rows_b, mask)', 'return x_bTD.reshape(3, -1), {}  # !', 'TypeError'),
    'own model: a loss term': own_model(
        'Mlp', 'other(self)', 'pass', 'KeyError', ", losses=lambda config: {}['x'],  # !\n    "
    ),
    'own model: an aux of rows where an encoder has layers': own_model(
        'Encoder', '__call__(self, *args)', "return (y := super().__call__(*args))[0], {'x': y[0][:, 0, 0]}", "aux 'x'"
    ),
    'own objective': own_task(
        "class Own(data.TextToText):\n    def examples(self, names, records, *key):\n        return records[7]  # !\n\n"
        "TASKS = [Task('x', inputs='{text}', targets='{text}', objective=Own)]", 'text.txt', ('--config.data.num_workers=0',)
    ),
    'own task': own_task(
        "def texts(fields):\n    assert len(fields['text']) != 15  # !\n    yield {'targets': fields['text']}\n\nTASKS = [Task('x', preprocess_fn=texts)]", 'line 15 of '
    ),
    'own task in a worker': own_task(
        "def texts(fields):\n    assert len(fields['text']) != 15  # !\n    yield {'targets': fields['text']}\n\nTASKS = [Task('x', preprocess_fn=texts)]", 'line 15 of ', ('--config.data.num_workers=2',)
    ),
    'own task in a cache': own_task(
        "def texts(fields):\n    assert len(fields['text']) != 15  # !\n    yield {'targets': fields['text']}\n\nTASKS = [Task('x', preprocess_fn=texts)]", 'line 15 of ', ('--mode=cache', '--config.data.cache_dirs=cache')
    ),
    'own metric': own_task(
        "def metric(targets, predictions):\n    return {'a': targets[999]}  # !\n\nTASKS = [Task('x', inputs='{text}', targets='{text}', metric_fns=[metric])]", 'task x',
        ('--mode=evaluate', f'--checkpoint={GOLDEN}', '--split=train', '--config.decode.max_length=2', '--output_dir=out', '--config.data.vocabulary=bytes', '--config.data.files=text.txt')
    ),
    'own filter': Mistake(
        'own.py', '', 'def filters(vocabulary):\n    return [lambda logits_rv, tokens_rT, ids_v: logits_rv.missing]  # !\n', 'AttributeError',
        ('--mode=infer', '--text=a', '--config.decode.module=own.py', f'--checkpoint={GOLDEN}', '--config.data.vocabulary=bytes'),
    ),
    'a config with a typo': Mistake('mine.py', '    return config', '    config.train.stepz = 3  # !\n    return config', 'stepz'),
    'a config with an exception': Mistake('mine.py', '    return config', '    raise ValueError(3)  # !\n    return config', 'ValueError: 3'),
    'a config with wrong syntax': Mistake('mine.py', '    return config', '    return config)  # !', 'SyntaxError'),
}  # fmt: skip


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('mistakes')
    # Line 15 alone has 15 characters.
    lines = ['the lake of the hills'] * 14 + ['x' * 15] + ['the hills of the lake'] * 200
    (folder / 'text.txt').write_text('\n'.join(lines) + '\n')
    return folder


@pytest.fixture(scope='module')
def command_line(folder):
    """A command of the program in `folder`, of which no file is imported yet."""
    program = folder / 'program'
    program.mkdir()
    for path in ROOT.iterdir():
        (program / path.name).symlink_to(path)
    command = command_lines.CommandLine(folder, program=program, imported=LIBRARIES)
    yield command
    command.close()


QUICK = (
    'model: a shape', 'model: a missing row of specs', 'model: a forgotten sum', 'own model: an error', 'own task',
    'own filter', 'a config with a typo', 'a config with an exception',
)  # fmt: skip


@pytest.mark.parametrize('name', [*QUICK, *slow([x for x in MISTAKES if x not in QUICK])])
def test_a_mistake_has_its_traceback(command_line, folder, name):
    mistake = MISTAKES[name]
    (folder / 'mine.py').write_text(CONFIG.format(folder=str(folder)))
    path = folder / mistake.file
    text = mistake.new
    if mistake.old:
        original = path if path.exists() else ROOT / mistake.file
        path = path if path.exists() else folder / 'program' / mistake.file
        text = original.read_text()
        assert text.count(mistake.old) == 1
        text = text.replace(mistake.old, mistake.new)
    path.unlink(missing_ok=True)
    path.write_text(text)
    is_of_checkpoint = {'--mode=infer', '--mode=evaluate'} & {*mistake.flags}
    flags = [] if is_of_checkpoint else [f'--config={folder}/mine.py']
    if not any(flag.startswith('--mode') for flag in mistake.flags):
        flags.append(f'--workdir={folder}/run {name}')
    try:
        done = command_line(*flags, *mistake.flags, cwd=folder)
    finally:
        if path.parent.name == 'program':
            path.unlink()
            path.symlink_to(ROOT / mistake.file)
    print(done.stderr[-2500:])
    assert done.status == 1
    assert 'Traceback (most recent call last):' in done.stderr and mistake.words in done.stderr
    if '# !' in text:
        [wrong] = [i for i, line in enumerate(text.splitlines(), start=1) if '# !' in line]
        frames = re.findall(r'File "(.+?)", line (\d+)', done.stderr)
        ours = [
            frame
            for frame in frames
            if 'site-packages' not in frame[0] and 'frozen' not in frame[0]
        ]
        assert ours[-1] == (str(path), str(wrong)), done.stderr
