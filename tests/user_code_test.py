"""A user's own tasks and models that fail: one line names their line, below it alone of the traceback."""

import contextlib
import functools
import json
import math
import pickle
import re
import shutil

import jax
import numpy as np
import pytest
from command_line import ROOT
from corpora import make_config
from forms import first_in_ci, first_quick
from runs import Program

import tasks
import tasks.open
import user_code
import vocabulary as vocabularies
from run import task_metrics
from run.examples import Example
from stream import Stream
from tasks import mixtures
from tasks.names import own_tasks

START = """
import sys
from tasks import Mixture, Task, proportional


class Stop(BaseException):
    pass


def fail(value):
    return 1 / value


def metric(targets, predictions):
    return {'exact': 1.0}


"""
CLASS = 'import data\n\n\nclass X(data.TextToText):\n'
# The lines after START, in which `!` marks the line that is named, and words of the message.
LOADING = {
    'number as name': ("TASKS = [Task(3, files='x')]  # !", 'name=3'),
    'empty name': ("TASKS = [Task('', files='x')]  # !", "name=''"),
    'name above': ("TASKS = [\n    Task('../x', files='x'),  # !\n]", "name='../x'"),
    'name below': ("TASKS = [Task('x/y', files='x')]  # !", "name='x/y'"),
    'hidden part': ("TASKS = [Task('x:..', files='x')]  # !", "name='x:..'"),
    'two names': ("TASKS = [Task('x,y', files='x')]  # !", "name='x,y'"),
    'lines in a name': ("TASKS = [Task('x\\ny', files='x')]  # !", "name='x\\ny'"),
    'long name': ("TASKS = [Task('x' * 201, files='x')]  # !", "name='xxx"),
    'name of a mixture': ("TASKS = [Mixture('x/y', {'a': 1})]  # !", "name='x/y'"),
    'files': ("TASKS = [Task('x', files=['x'])]  # !", "task 'x': data.files=['x']: must be text"),
    'objective': ("TASKS = [Mixture('m', {Task('x', objective='y'): 1})]  # !", "objective='y'"),
    'metrics': ("TASKS = [Task('x', metric_fns='bleu')]  # !", "metric_fns='b'"),
    'metric': ("TASKS = [Task('x', metric_fns=[metric, 'bleu'])]  # !", "metric_fns='bleu'"),
    'arguments of a metric': ("TASKS = [Task('x', metric_fns=[lambda x: {}])]  # !", 'metric_fns'),
    'preprocess_fn': ("TASKS = [Task('x', preprocess_fn={})]  # !", 'preprocess_fn={}'),
    'arguments of preprocess': ("TASKS = [Task('x', preprocess_fn=lambda: [])]  # !", '(record)'),
    'arguments of postprocess': ("TASKS = [Task('x', postprocess_fn=str.strip)]  # !", 'example'),
    'text as rate': ("TASKS = [Mixture('m', {'x': 'much'})]  # !", "the rate of 'x' is 'much'"),
    'negative rate': ("TASKS = [Mixture('m', {'x': -1})]  # !", "the rate of 'x' is -1"),
    'no member': ("TASKS = [Mixture('m', {})]  # !", "mixture 'm' has members={}"),
    'text as maximum': ("TASKS = [Mixture('m', {'x': proportional('y')})]  # !", "maximum='y'"),
    'half a template': ("TASKS = [Task('x', files='x', inputs='{q', targets='{a}')]  # !", '{q'),
    'template and function': ("TASKS = [Task('x', preprocess_fn=fail, inputs='{q}', targets='{a}')]  # !", 'templates'),
    'members of one name': ("TASKS = [Mixture('m', {Task('x', files='a'): 1, 'x': 2})]  # !", "one name (['x', 'x'])"),
    'list of members': ("TASKS = [Mixture('m', ['x'])]  # !", "members=['x']"),
    'number as member': ("TASKS = [Mixture('m', {3: 1.0})]  # !", 'members={3: 1.0}'),
    'maximum': ("TASKS = [Mixture('m', {'x': proportional(maximum=-1)})]  # !", 'maximum=-1'),
    'exit': ('sys.exit()  # !', 'SystemExit'),
    'exit with a message': ("raise SystemExit('no\\nway')  # !", 'SystemExit: no way'),
    'base exception': ('raise Stop  # !', 'Stop'),
    'in a loop': ('for i in [2, 1, 0]:\n    1 / i  # !', 'ZeroDivisionError'),
    'syntax': ('TASKS = [  # !', "'[' was never closed"),
    'syntax of a text': ("x = eval('1 +')  # !", 'SyntaxError'),
    'indentation': ('if 1:\nTASKS = []  # !', 'expected an indented block'),
    'no class': ("TASKS = [Task('x', objective=fail)]  # !", 'objective=<function fail'),
    'no protocol': ("TASKS = [Task('x', objective=Stop)]  # !", "objective=Stop of task 'x'"),
    'features': (f"{CLASS}    features = 'targets'\nTASKS = [Task('x', objective=X)]  # !", "features='targets'"),
    'features of another name': (f"{CLASS}    features = ('text',)\nTASKS = [Task('x', objective=X)]  # !", "('text',)"),
    'no records': (f"{CLASS}    records_per_group = 0\nTASKS = [Task('x', objective=X)]  # !", 'records_per_group=0'),
    'sentinels': (f"{CLASS}    num_sentinels = 'a'\nTASKS = [Task('x', objective=X)]  # !", "num_sentinels='a'"),
    'object': (f"{CLASS}    __init__ = object.__init__\nTASKS = [Task('x', objective=X())]  # !", 'use one of'),
    'name that is none': ('TASKS = [task]  # !', 'NameError'),
}  # fmt: skip


def write(folder, text, start=START):
    """Write START and `text`. Return the file, and the number of the line that `!` marks."""
    file = folder / 'own.py'
    file.write_text(start + text + '\n')
    [line] = [i for i, text in enumerate(file.read_text().splitlines(), start=1) if '# !' in text]
    return file, line


def check_frames(frames, file):
    """Assert that a traceback has lines of the user's file alone."""
    assert set(re.findall('File "(.+)", line', frames)) <= {str(file)}


@contextlib.contextmanager
def user_error(file, line, words):
    """Assert that the error of a block is one line, which names the user's line and has `words`."""
    with pytest.raises(user_code.UserError) as found:
        yield found
    text = str(found.value)
    assert f'{file}, line {line}: ' in text and words in text and '\n' not in text
    check_frames(found.value.frames, file)


@pytest.mark.parametrize('text, words', LOADING.values(), ids=LOADING)
def test_loading(tmp_path, text, words):
    file, line = write(tmp_path, text)
    with user_error(file, line, words) as error:
        tasks.get('x', module=str(file))
    assert f'"{file}", line {line}' in error.value.frames


def test_dataclasses_with_annotations_as_text(tmp_path):
    file = tmp_path / 'own.py'
    lines = ['from __future__ import annotations', 'import dataclasses', '@dataclasses.dataclass']
    file.write_text(
        '\n'.join([*lines, 'class Prompt:', '    text: str', "NAME = Prompt('x').text"])
    )
    assert user_code.load_module(file, file.read_bytes()).NAME == 'x'


def test_every_frame_of_the_user(tmp_path):
    """Also of a file that is imported, and none of the library between two of them."""
    (tmp_path / 'helper_of_a_user.py').write_text('def fail():\n    return 1 / 0\n')
    text = f'sys.path.append({str(tmp_path)!r})\nimport helper_of_a_user, functools\n'
    text += 'functools.reduce(lambda x, y: helper_of_a_user.fail(), [1, 2])  # !\n'
    file, line = write(tmp_path, text)
    with pytest.raises(user_code.UserError) as error:
        tasks.get('x', module=str(file))
    helper = tmp_path / 'helper_of_a_user.py'
    assert f'{helper}, line 2: ZeroDivisionError: division by zero' == str(error.value)
    found = re.findall('File "(.+)", line ([0-9]+)', error.value.frames)
    assert found == [(str(file), str(line)), (str(file), str(line)), (str(helper), '2')]
    sent = pickle.loads(pickle.dumps(error.value))
    assert (str(sent), sent.frames) == (str(error.value), error.value.frames)


def test_a_file_beside_ours(tmp_path, monkeypatch):
    """A user may keep it in the checkout."""
    monkeypatch.setattr(user_code, 'PROGRAM', tmp_path)
    file, line = write(tmp_path, 'x = fail(0)  # !')
    with pytest.raises(user_code.UserError) as error:
        tasks.get('x', module=str(file))
    assert f'{file}, line 11: ZeroDivisionError' in str(error.value)
    assert len(re.findall('File "', error.value.frames)) == 2 and line != 11


# Functions of tasks, called.


def preprocess(task):
    return list(task.preprocess([{'n': n} for n in (3, 2, 1, 0)]))


def evaluate(task):
    targets = [task.postprocess('a', {}, is_target=True)]
    return task.metric(task.metric_fns[0], targets, targets)


BOTH = 'self, targets, predictions'
# The function `f` of a task.
CALLING = {
    'no list': (preprocess, 'def f(fields):  # !\n    pass', 'preprocess_fn gave None'),
    'a number': (preprocess, 'def f(fields): return 3  # !', 'preprocess_fn gave 3'),
    'a dict': (preprocess, "def f(fields): return {'targets': 'a'}  # !", 'give a list'),
    'no mappings': (preprocess, 'def f(fields):  # !\n    yield 3', 'preprocess_fn gave 3'),
    'record 4': (preprocess, "def f(x):\n    yield {'targets': str(1 / x['n'])}  # !", 'ZeroDiv'),
    'exit': (preprocess, 'def f(fields):\n    sys.exit(3)  # !', 'SystemExit: 3'),
    'postprocess': (evaluate, 'def f(text, example, is_target):\n    fail(int(text))  # !', 'int'),
    'metric': (evaluate, 'def f(targets, predictions):\n    return [][1]  # !', 'IndexError'),
    'one number': (evaluate, 'def f(targets, predictions): return 1.0  # !', 'gave 1.0'),
    'nothing': (evaluate, 'def f(targets, predictions): pass  # !', 'gave None'),
    'lists': (evaluate, "def f(targets, predictions): return {'a': [1]}  # !", "'a' as [1]"),
    'texts': (evaluate, "def f(targets, predictions): return {'a': '1'}  # !", "'a' as '1'"),
    'none': (evaluate, "def f(targets, predictions): return {'a': None}  # !", "'a' as None"),
    'name': (evaluate, 'def f(targets, predictions): return {1: 2.0}  # !', '1 as 2.0'),
    'generator': (evaluate, 'def f(targets, predictions):  # !\n    yield 1', 'gave <generator'),
    'object': (evaluate, f'class F:\n    def __call__({BOTH}):  # !\n        pass\nf = F()', 'gave None'),
}  # fmt: skip


@pytest.mark.parametrize('call, text, words', CALLING.values(), ids=CALLING)
def test_calling(tmp_path, call, text, words):
    fields = 'preprocess_fn=f' if call is preprocess else 'metric_fns=[f]'
    if 'example' in text:
        fields = 'postprocess_fn=f, metric_fns=[metric]'
    file, line = write(tmp_path, f"{text}\nTASKS = [Task('x', files='x', {fields})]")
    task = tasks.get('x', module=str(file))
    with user_error(file, line, words) as error:
        call(task)
    assert str(error.value).startswith("task 'x': ")


TEXT = """
class Own(TextToText):
    def examples(self, names, records, *key):
        {}


TASKS = [Task('x', files='x.txt', inputs='{{text}}', targets='{{text}}', objective=Own)]
"""
# Which line is named, and words of the message.
FAILING_OBJECTIVES = {
    'an error': ('return records[7]', 'return rec', 'IndexError'),
    'exit': ('sys.exit(3)', 'sys.exit', 'SystemExit: 3'),
    'nothing': ('pass', 'class Own', 'examples gave None'),
    'no examples': ('return [3]', 'class Own', 'examples gave 3'),
    'a late error': ('yield fail(0)', 'return 1 / value', 'ZeroDivisionError'),
    'lists': ('return [Example([1], np.ones(1), [])]', 'class Own', 'gave [1] as inputs'),
    'floats': ('return [Example(np.ones(1), np.ones(1), [])]', 'class Own', 'as inputs: give'),
    'nothing in it': ('return [Example(EOS[:0], EOS, [])]', 'class Own', 'array of 1 to data'),
    'long': ('return [Example(EOS, EOS.repeat(15), [])]', 'class Own', 'data.lengths.targets=14'),
    'negative': ('return [Example(EOS, EOS - 2, [])]', 'class Own', 'from 0 to '),
    'unknown ids': ('return [Example(EOS + 999, EOS, [])]', 'class Own', '[1000]'),
}


@pytest.mark.parametrize('body, named, words', FAILING_OBJECTIVES.values(), ids=FAILING_OBJECTIVES)
def test_an_objective_that_fails(tmp_path, body, named, words):
    text = f'import numpy as np\nfrom data import EOS, Example, TextToText\n{TEXT.format(body)}'
    check_objective(tmp_path, text, named, words)


DENOISING = """
class Own(Denoising):
    {}


TASKS = [Task('x', files='x.txt', objective=Own)]
"""


@pytest.mark.parametrize(
    'body, named, words',
    [
        ('pass', 'class Own', 'NotImplementedError'),
        ('def corrupt(self, raw_ids, *key): return raw_ids', 'class Own', 'ValueError'),
        ('def corrupt(self, raw_ids): return raw_ids', 'class Own', 'TypeError'),
        ('def set_lengths(self, config, vocabulary): fail(0)', 'return 1', 'ZeroDivisionError'),
        ('def set_lengths(self, *_): self.check_targets(99)', 'def set', 'data.lengths.targets=14'),
        ('def set_lengths(self, *_): self.records_per_group = 0', 'class Own', 'records_per_gr'),
    ],
)
def test_an_own_denoising_that_fails(tmp_path, body, named, words):
    check_objective(tmp_path, f'from data import Denoising\n{DENOISING.format(body)}', named, words)


def test_settings_that_an_own_denoising_does_not_fit(tmp_path):
    (tmp_path / 'x.txt').write_text('a text\n' * 9)
    text = DENOISING.format('pass  # !')
    file, _ = write(
        tmp_path, f'from data import Denoising\n{text.replace("x.txt", f"{tmp_path}/x.txt")}'
    )
    config = make_config(module=str(file), task='x', **{'lengths.inputs': 2})
    with pytest.raises(ValueError, match='data.lengths.inputs=2 is too short'):
        open_stream(config)


def check_objective(folder, text, named, words):
    """Assert that a stream of task x names the line of its objective that begins with `named`."""
    (folder / 'x.txt').write_text('a text\n' * 9)
    file = folder / 'own.py'
    file.write_text(START + text.replace('x.txt', f'{folder}/x.txt'))
    lines = [line.strip() for line in file.read_text().splitlines()]
    [line] = [i for i, text in enumerate(lines, start=1) if text.startswith(named)]
    config = make_config(module=str(file), task='x')
    with user_error(file, line, words):
        open_stream(config)


def open_stream(config):
    mixture = tasks.open.open_mixture(config)
    return Stream(mixture, 'train', vocabularies.ByteVocabulary(), config, batch_size=2, seed=0)


def test_a_metric_may_give_nan():
    """As those of T5 do, of targets that are all the same."""
    task = mixtures.Task('x', metric_fns=[lambda targets, predictions: {'a': math.nan, 'b': 1}])
    values = evaluate(task)
    assert math.isnan(values['a']) and values['b'] == 1.0


def test_a_rate_by_size_that_fails(tmp_path):
    file, line = write(tmp_path, "TASKS = [Mixture('m', {'x': lambda n: n / 0})]  # !")
    with user_error(file, line, 'ZeroDivisionError'):
        own_tasks(str(file))['m'].rates({'x': 3})


# Errors that nobody expects where they are raised.


@pytest.mark.parametrize('error, is_named', [
    ('RuntimeError("odd")', True),
    ('OSError(5, "odd")', True),
    ('FloatingPointError("odd")', True),
    ('KeyboardInterrupt()', False),
    ('SystemExit(3)', False),
])  # fmt: skip
def test_whatever_runs(tmp_path, error, is_named):
    """An error through a user's lines names the last of them; an interrupt, and one of ours, stay."""
    file = tmp_path / 'own.py'
    file.write_text(f'def fail(x):\n    raise {error}\n')
    module = user_code.load_module(file, file.read_bytes())
    with pytest.raises(BaseException) as found, user_code.running():
        functools.reduce(lambda x, y: jax.jit(module.fail)(x), [1, 2])
    if is_named:
        assert isinstance(found.value, user_code.UserError)
        assert str(found.value).startswith(f'{file}, line 2: {error.partition("(")[0]}: ')
        assert 'odd' in str(found.value) and str(file) in found.value.frames
    else:
        assert type(found.value).__name__ == error.partition('(')[0]


def test_an_error_of_the_program_keeps_its_traceback():
    """It leads through no line of a user's."""
    with pytest.raises(ZeroDivisionError), user_code.running():
        functools.reduce(lambda x, y: x / 0, [1, 2])
    error = user_code.UserError('own.py, line 3: odd')
    with pytest.raises(user_code.UserError) as found, user_code.running():
        raise error
    assert found.value is error


# On the command line.

# Files of an own model, words of the message, and flags.
MODELS = {
    'error of JAX': (
        """
import dataclasses

import jax.numpy as jnp

import model


class Mlp(model.Mlp):
    def __call__(self, x_bTD, rows_b=None):
        return x_bTD @ jnp.ones((3, 5)), {}  # !


def modules(default):
    return dataclasses.replace(default, mlp=Mlp)
""",
        ', line {}: TypeError: dot_general requires',
        (),
    ),
    # A line of model.py fails below.
    'shape of a layer': (
        """
import dataclasses

import model


class Mlp(model.Mlp):
    def __call__(self, x_bTD, rows_b=None):  # !
        return x_bTD[:, :1, :3], {}


def modules(default):
    return dataclasses.replace(default, mlp=Mlp)
""",
        ': TypeError',
        (),
    ),
    'shape of an activation': (
        """
import dataclasses


def first(x):  # !
    return x[:1]


def modules(default):
    return dataclasses.replace(default, activations=(('first', first),))
""",
        ': AssertionError',
        ("--config.model.mlp_activations=('first',)",),
    ),
}
BAD = 'TASKS = [Task(3)]  # !'
TINY = f'--config={ROOT}/configs/tiny.py'
GOLDEN = f'--checkpoint={ROOT}/tests/golden/t5x_t5_1_1_tiny/checkpoint_6'
MODES = {
    'train': [TINY],
    'cache': [TINY, '--mode=cache', '--config.data.cache_dirs=c'],
    'infer': ['--mode=infer', GOLDEN, '--output_dir=out'],
    'evaluate': ['--mode=evaluate', GOLDEN, '--output_dir=out'],
    'tasks': ['--mode=tasks'],
}


def check_result(result, status, file, line, words):
    assert result.status == status, result
    *frames, last = result.stderr.splitlines()
    assert last.startswith('main.py: ') and f'{file}, line {line}: ' in last and words in last
    assert frames and not any(frame.startswith('Traceback') for frame in frames), result
    check_frames('\n'.join(frames), file)


@pytest.mark.parametrize('mode', MODES)
def test_a_file_of_tasks_that_does_not_load(command_line, tmp_path, mode):
    file, line = write(tmp_path, BAD)
    flags = [f'--config.data.{x}' for x in ('task=x', 'module=own.py', 'vocabulary=bytes')]
    result = command_line(*MODES[mode], *flags, cwd=tmp_path)
    check_result(result, 2, file, line, 'name=3')
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ['own.py']
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('text, message, flags', first_quick(MODELS.values()), ids=MODELS)
def test_an_own_model_that_does_not_fit(command_line, tmp_path, text, message, flags):
    """One line names the user's code, and nothing is written."""
    file, line = write(tmp_path, text, start='')
    result = command_line(TINY, '--config.model.module=own.py', *flags, cwd=tmp_path)
    assert result.status == 2, result
    assert f'main.py: {file}{message.format(line)}' in result.stderr, result
    if '{}' in message:  # the traceback leads through the file
        check_frames(result.stderr, file)
    assert not list(tmp_path.glob('runs/*/config.json'))


def test_the_list_of_tasks(command_line, tmp_path):
    text = "def f(x):\n    return [{'targets': x['text'] + 1}]  # !\n"
    text += "TASKS = [Task('x', files='x.jsonl', preprocess_fn=f, metric_fns=[metric])]"
    file, line = write(tmp_path, text)
    (tmp_path / 'x.jsonl').write_text(json.dumps({'text': 'a'}))
    flags = ['--config.data.module=own.py', '--examples=1']
    result = command_line('--mode=tasks', 'x', *flags, cwd=tmp_path)
    check_result(result, 1, file, line, "task 'x'")


RUN = """
import os


def question(record):
    if os.environ.get('FAILS') == 'preprocess_fn' and record['q'] == 'is 7?':
        fail(0)
    return [{'inputs': record['q'], 'targets': record['a']}]


def answer(text, example, is_target):
    if os.environ.get('FAILS') == 'postprocess_fn' and not is_target:
        raise SystemExit(0)
    return text


def exact(targets, predictions):
    if os.environ.get('FAILS') == 'metric':
        fail(0)
    return {'exact': float('nan')}


TASKS = [
    Task('x', files='x.jsonl', preprocess_fn=question, postprocess_fn=answer, metric_fns=[exact]),
]
"""


@pytest.fixture(scope='module')
def finished(command_line, make_once):
    """The folder of a run of 2 steps with task metrics, which are nan."""

    def train_it(folder):
        (folder / 'own.py').write_text(START + RUN)
        rows = [json.dumps({'q': f'is {i}?', 'a': 'no'}) for i in range(60)]
        (folder / 'x.jsonl').write_text('\n'.join(rows))
        result = command_line(*training(folder), cwd=folder)
        assert result.status == 0, result

    return make_once('user_code', train_it)


def training(folder, **settings):
    """The arguments of a run in `folder`."""
    program = Program(folder, corpus='', steps=2, log=1, save=2, evaluate=2)
    data = {'data.module': 'own.py', 'data.task': 'x', 'data.vocabulary': 'bytes'}
    settings = data | {'infer_eval.every_steps': 2, 'decode.max_length': 4} | settings
    flags = [f'--config.{name}={value}' for name, value in settings.items()]
    return [*program.arguments('run'), *flags]


FAILURES = [
    ('metric', {}, 'ZeroDivisionError'),
    ('postprocess_fn', {}, 'SystemExit: 0'),
    ('preprocess_fn', {'train.steps': 40}, 'x.jsonl'),
    ('preprocess_fn', {'train.steps': 40, 'data.num_workers': 2}, 'x.jsonl'),
]


@pytest.mark.slow
@pytest.mark.parametrize('fails, settings, words', first_in_ci(FAILURES))
def test_a_failure_while_training(command_line, finished, tmp_path, fails, settings, words):
    for name in ('own.py', 'x.jsonl'):
        shutil.copy(finished / name, tmp_path / name)
    result = command_line(*training(tmp_path, **settings), cwd=tmp_path, FAILS=fails)
    check_result(result, 1, tmp_path / 'own.py', line_of(fails), words)


def line_of(fails):
    """The last line of the user's that is in the traceback."""
    failing = 'raise SystemExit' if fails == 'postprocess_fn' else 'return 1 / value'
    lines = (START + RUN).splitlines()
    return 1 + [failing in line for line in lines].index(True)


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['evaluate', 'infer', 'cache'])
def test_a_failure_in_another_mode(command_line, finished, tmp_path, mode):
    fails = 'metric' if mode == 'evaluate' else 'preprocess_fn'
    if mode == 'cache':
        arguments = [*training(tmp_path)[:1], f'--config.data.cache_dirs={tmp_path}/cache']
        for name in ('module=own.py', 'task=x', 'vocabulary=bytes', 'num_workers=1'):
            arguments.append(f'--config.data.{name}')
    else:
        arguments = [
            f'--checkpoint={finished}/run',
            f'--output_dir={tmp_path}/out',
            '--split=train',
        ]
    result = command_line(f'--mode={mode}', *arguments, cwd=finished, FAILS=fails)
    lines = result.stderr.splitlines()
    first = [line.startswith('  File') for line in lines].index(True)  # after the progress
    rest = result._replace(stderr='\n'.join(lines[first:]))
    check_result(
        rest,
        1 if mode == 'evaluate' else 2,
        finished / 'own.py',
        line_of(fails),
        'ZeroDivisionError',
    )


def evaluated(metric_fns):
    """The metrics of a task of three examples, whose answers are their targets."""
    one = np.ones(1)
    fields = [{'inputs': 'x', 'targets': text} for text in 'cab']
    examples = [Example(x, one, one, is_trimmed=False) for x in fields]
    task = tasks.Task('own', files='x', metric_fns=metric_fns)
    evaluated_task = task_metrics.EvaluatedTask(
        task, 'own', 'test', examples, None, None, settings=''
    )
    return task_metrics.compute_metrics(evaluated_task, answers=list('cab'), scores=None)


def test_a_metric_may_change_its_lists():
    """Neither the next metric nor the examples that are written notice it."""

    def sort_and_clear(targets, predictions):
        targets.sort()
        predictions.clear()
        return {'a': 1}

    def exact(targets, predictions):
        return {'b': sum(x == y for x, y in zip(targets, predictions, strict=True))}

    found = evaluated([sort_and_clear, exact])
    assert found.values == {'a': 1, 'b': 3}
    assert [line['target'] for line in found.lines] == list('cab')


def test_two_metrics_of_one_name_are_refused():
    with pytest.raises(ValueError, match="task 'own': two metrics give 'a'"):
        evaluated([lambda targets, predictions: {'a': 1}] * 2)


FAULTY = """
import dataclasses
import os

import haiku as hk

import model


def fail(place):
    if os.environ.get('FAILS') == place:
        raise RuntimeError('odd')  # !


@dataclasses.dataclass(frozen=True)
class Options:
    num: int = 2

    def __post_init__(self):
        fail('options')


class Mlp(model.Mlp):
    def __call__(self, x_bTD, rows_b=None):
        fail('init')
        if rows_b is not None:
            fail('training')
        if x_bTD.shape[1] == 1 and not hk.running_init():
            fail('decoding')
        return super().__call__(x_bTD, rows_b)


def losses(config):
    fail('losses')
    return {}


def modules(default):
    fail('modules')
    return dataclasses.replace(default, mlp=Mlp, losses=losses)
"""


@pytest.mark.slow
def test_where_an_own_model_may_fail(command_line, tmp_path):
    """Status 2 before the run begins, else 1; one line below those of the user's code."""
    file = tmp_path / 'own_model.py'
    file.write_text(FAULTY)
    line = 1 + FAULTY.splitlines().index("        raise RuntimeError('odd')  # !")
    (tmp_path / 'own.py').write_text(START + RUN)
    rows = [json.dumps({'q': f'is {i}?', 'a': 'no'}) for i in range(60)]
    (tmp_path / 'x.jsonl').write_text('\n'.join(rows))
    train = training(tmp_path, **{'model.module': 'own_model.py'})
    for place in ('modules', 'options', 'init', 'losses', 'training'):
        result = command_line(*train, cwd=tmp_path, FAILS=place)
        check_result(result, 2, file, line, 'RuntimeError: odd')
        assert not (tmp_path / 'run/config.json').exists()
    check_result(command_line(*train, cwd=tmp_path, FAILS='decoding'), 1, file, line, 'odd')
    assert (tmp_path / 'run/config.json').exists()
    assert command_line(*train, cwd=tmp_path).status == 0
    answer = ['--mode=infer', '--checkpoint=run', '--text=is 7?']
    evaluate = ['--mode=evaluate', '--checkpoint=run', '--output_dir=out', '--split=validation']
    for mode in (answer, evaluate):
        for place, status in (('modules', 2), ('init', 2), ('decoding', 1)):
            if mode is evaluate:
                status = 1  # its model is opened with the first checkpoint
            result = command_line(*mode, cwd=tmp_path, FAILS=place)
            assert result.status == status, result
            last = result.stderr.splitlines()[-1]
            assert f'{file}, line {line}: RuntimeError: odd' in last, result
            assert 'Traceback' not in result.stderr
