"""Wrong input on the command line: a row for each input, with its exit status and its message.

Every row runs main.py in a process and a folder of its own. A refused input prints one line and
writes nothing.
"""

import json
import pathlib
import re
from typing import NamedTuple

import pytest
from command_line import ROOT
from permissions import another_user

import main
import settings
from configs import base

TINY = f'--config={ROOT}/configs/tiny.py'


class Row(NamedTuple):
    """An input and the message about it.

    `{dir}` stands for the row's folder, `{root}` for the checkout.
    """

    arguments: list[str]
    message: str  # a part of the one line on stderr
    files: dict[str, str] = {}  # name in the folder -> content; a name that ends with / is a folder
    status: int = 2


def write(folder: pathlib.Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        if name.endswith('/'):
            path.mkdir(parents=True, exist_ok=True)
        elif content.startswith('-> '):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(content.removeprefix('-> '))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, errors='surrogateescape')


def contents(folder: pathlib.Path) -> dict[str, bytes | None]:
    """Return every file with its content and every folder, without caches and a run's lock."""
    found = {}
    for path in sorted(folder.rglob('*')):
        content = path.read_bytes() if path.is_file() else None
        is_own_lock = path.name == 'lock' and content is not None and b'process' in content
        if '__pycache__' not in path.parts and not is_own_lock:
            found[str(path.relative_to(folder))] = content
    return found


def check(row: Row, command_line, folder: pathlib.Path) -> None:
    """Run the row. Assert its status and message, and that it changes no file."""
    write(folder, row.files)
    before = contents(folder)
    arguments = [
        argument.replace('{dir}', str(folder)).replace('{root}', str(ROOT))
        for argument in row.arguments
    ]
    result = command_line(*arguments, cwd=folder)
    assert result.status == row.status, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith('main.py: '), result.stderr
    message = row.message.replace('{dir}', str(folder)).replace('{root}', str(ROOT))
    assert message in lines[0], lines[0]
    after = contents(folder)
    after = {name: after[name] for name in after if after[name] is not None or name in before}
    assert after == before


def rows(table: dict[str, Row]):
    return pytest.mark.parametrize('row', table.values(), ids=table.keys())


# Numbers and names of settings.


def out_of_range() -> list[tuple[str, str]]:
    """Return (setting, value) just outside of every range, and values that are no finite number."""
    found = []
    for key, limits in settings.RANGES.items():
        default = dict(settings.leaves(base.get_config()))[key]
        values: list = [limits.low - 1, *limits.without]
        if limits.high != settings.LARGEST_FLOAT:
            values.append(limits.high + 1)
        if isinstance(default, float):
            values += ['nan', 'inf', '-inf']
        else:
            values += [10**30, -(10**30)]
        found += [(key, str(value)) for value in values]
    return found


@pytest.mark.parametrize('key, value', out_of_range())
def test_a_number_out_of_its_range(command_line, tmp_path, key, value):
    row = Row([TINY, f'--config.{key}={value}'], message=f'{key}=')
    check(row, command_line, tmp_path)


def test_the_tables_name_settings():
    """Every table of settings.py names settings that exist, and their defaults are valid."""
    found = dict(settings.leaves(base.get_config()))
    numbers = {key for key, x in found.items() if type(x) in (int, float)}
    assert set(settings.RANGES) <= numbers
    assert set(settings.CHOICES) <= set(found)
    assert set(settings.INTEGER_OR_AUTO) <= set(found)
    for key, default in found.items():
        settings.check_value(key, default, default)


def test_help_lists_every_setting(command_line, tmp_path):
    result = command_line('--help', cwd=tmp_path)
    assert result.status == 0
    for key, _ in settings.leaves(base.get_config()):
        [line] = re.findall(rf'^  --config\.{re.escape(key)}=.+\n      (.+)$', result.stdout, re.M)
        assert line.strip()
    for words in ('--config=configs/NAME.py', '--workdir', '--mode'):
        assert words in result.stdout


CONFIG = 'from configs import base\n\ndef get_config():\n    config = base.get_config()\n'
CONFIGS = {
    'missing': Row(['--config=mine.py'], 'mine.py: no such file; try --config=configs/tiny.py'),
    'no suffix': Row(['--config=mine'], 'try --config=mine.py', {'mine.py': CONFIG}),
    'empty name': Row(['--config='], 'no Python file'),
    'long name': Row([f'--config={"x" * 300}.py'], 'File name too long: correct its name'),
    'NUL in a path': Row(
        ['--config=mine.py'],
        'is no path: name a file or a folder',
        {'mine.py': CONFIG + '    config.data.files = "a\\0b.txt"\n    return config\n'},
    ),
    'not UTF-8': Row(['--config=mine.py'], 'mine.py, line 1: ', {'mine.py': '\udcff\udcfe'}),
    'no config': Row(['--workdir=x'], '--config is missing'),
    'folder': Row(['--config={dir}'], 'no Python file'),
    'readme': Row(['--config={root}/README.md'], 'no Python file'),
    'home': Row(['--config=~/nothing.py'], 'nothing.py: no such file'),
    'typo': Row(
        ['--config=mine.py'],
        'mine.py, line 5: AttributeError: Key "stepz" does not exist',
        {'mine.py': CONFIG + '    config.train.stepz = 3\n    return config\n'},
    ),
    'wrong type': Row(
        ['--config=mine.py'],
        'mine.py, line 5: TypeError: Could not override',
        {'mine.py': CONFIG + '    config.train.steps = "many"\n    return config\n'},
    ),
    'syntax': Row(
        ['--config=mine.py'],
        'mine.py, line 2: ',
        {'mine.py': 'import os\ndef get_config(:\n'},
    ),
    'indentation': Row(
        ['--config=mine.py'],
        'mine.py, line 2: ',
        {'mine.py': 'def get_config():\nreturn 1\n'},
    ),
    'import': Row(
        ['--config=mine.py'],
        'mine.py, line 1: ModuleNotFoundError: No module named',
        {'mine.py': 'import not_there\n'},
    ),
    'own error': Row(
        ['--config=mine.py'],
        'mine.py, line 2: ZeroDivisionError',
        {'mine.py': 'def get_config():\n    return 1 / 0\n'},
    ),
    'error in another file': Row(
        ['--config=mine.py'],
        'helper.py, line 1: NameError',
        {
            'mine.py': 'import sys\nsys.path.insert(0, "{dir}")\nimport helper\n',
            'helper.py': 'undefined\n',
        },
    ),
    'no get_config': Row(['--config=mine.py'], 'no function get_config', {'mine.py': 'x = 1\n'}),
    'empty file': Row(['--config=mine.py'], 'no function get_config', {'mine.py': ''}),
    'null bytes': Row(['--config=mine.py'], 'mine.py, line 1: ', {'mine.py': '\0\0'}),
    'dict': Row(
        ['--config=mine.py'],
        'is a dict, not a ConfigDict',
        {'mine.py': 'def get_config():\n    return {"a": 1}\n'},
    ),
    'number': Row(
        ['--config=mine.py'],
        'is a int, not a ConfigDict',
        {'mine.py': 'def get_config():\n    return 3\n'},
    ),
    'another config': Row(
        ['--config=mine.py'],
        'lr is no setting: remove it',
        {
            'mine.py': 'from ml_collections import ConfigDict\n\ndef get_config():\n'
            '    return ConfigDict({"lr": 1})\n'
        },
    ),
    'half a config': Row(
        ['--config=mine.py'],
        ' is missing from the config: start from get_config() of configs/base.py',
        {
            'mine.py': 'from ml_collections import ConfigDict\n\ndef get_config():\n'
            '    return ConfigDict({"seed": 1})\n'
        },
    ),
    'key added': Row(
        ['--config=mine.py'],
        'train.momentum is no setting',
        {
            'mine.py': CONFIG
            + '    with config.unlocked():\n        config.train.momentum = 1\n    return config\n'
        },
    ),
    'size': Row(['--config={root}/configs/t5.py:huge'], 'configs/t5.py:huge: use one of small, base'),
    'argument': Row([f'{TINY}:foo'], 'takes 0 positional arguments but 1 was given: write --config='),
    'typo of a setting': Row([TINY, '--config.train.stepz=3'], 'Did you mean "steps"'),
    'typo of a group': Row([TINY, '--config.trian.steps=3'], 'Did you mean "train"'),
    'group': Row([TINY, '--config.train=3'], '--config.train=3: train is a group of settings'),
    'group in a group': Row([TINY, '--config.data.lengths=3'], 'set one of them, --config.data.lengths.NAME=VALUE'),
    'no value': Row([TINY, '--config.train.steps'], 'Missing value'),
    'setting below a setting': Row([TINY, '--config.train.steps.x=3'], 'no such setting: train.steps.x: --help'),
    'setting without a config': Row(['--config.x=1'], '--config.x needs --config=FILE'),
    'setting without a config, after a flag': Row(['--workdir=x', '--config.train.steps', '3'], 'steps needs --config=FILE'),
    'setting of a mode without': Row(
        ['--mode=convert', '--from=x', '--to=y', '--config.train.steps=1'], '--config.train.steps is not for --mode=convert'
    ),
    'text for a number': Row([TINY, '--config.train.steps=many'], '--config.train.steps=many: must be a whole number, such as'),
    'fraction for a count': Row([TINY, '--config.train.steps=1.5'], '--config.train.steps=1.5: must be a whole number'),
    'power of ten': Row([TINY, '--config.train.steps=1e3'], '--config.train.steps=1e3: must be a whole number'),
    'nothing for a number': Row([TINY, '--config.train.steps='], '--config.train.steps=: must be a whole number'),
    'colons for a number': Row([TINY, '--config.seed=1: 2:'], '--config.seed=1: 2:: must be a whole number'),
    'lines for a number': Row([TINY, '--config.seed=1\n2'], '--config.seed=1 2: must be a whole number'),
    'comma in a number': Row([TINY, '--config.model.dropout_rate=0,1'], '--config.model.dropout_rate=0,1: must be a number, such'),
    'text for a bool': Row([TINY, '--config.restore.strict=maybe'], '--config.restore.strict=maybe: must be true or false'),
    'yes for a bool': Row([TINY, '--config.optimizer.factored=yes'], '--config.optimizer.factored=yes: must be true or false'),
    'text for a flag': Row(['--mode=evaluate', '--checkpoint=x', '--watch=perhaps'], '--watch=perhaps: must be true or false'),
    'setting of evaluate': Row(
        ['--mode=infer', '--checkpoint=x', '--config.decode.beam_size=two'], '--config.decode.beam_size=two: must be a whole'
    ),
    'type in a config': Row(
        ['--config=mine.py'],
        "data.vocabulary=None: must be text, such as ''",
        {'mine.py': CONFIG + '    config.data.vocabulary = None\n    return config\n'},
    ),
    'best_is alone': Row([TINY, '--config.save.best_is=lower'], "save.best_is='lower' has no effect without save.best_metric: "),
    'task of no metrics': Row([TINY, '--config.infer_eval.task=x'], "infer_eval.task='x' has no effect without infer_eval.every_"),
    'adamw of adafactor': Row([TINY, '--config.optimizer.adamw.weight_decay=0.1'], "without optimizer.name='adamw': set that, too"),
    'only of nothing': Row([TINY, '--config.restore.only=target/.*'], "restore.only='target/.*' has no effect without restore.path"),
    'dtype': Row([TINY, '--config.model.dtype=float64'], "model.dtype='float64': must be one of 'float32'"),
    'save dtype': Row([TINY, '--config.save.dtype=int8'], "save.dtype='int8': must be one of"),
    'restore dtype': Row([TINY, '--config.restore.dtype=int8'], "restore.dtype='int8': must be one of"),
    'on_bad_line': Row([TINY, '--config.data.on_bad_line=ignore'], "data.on_bad_line='ignore': must be one of"),
}  # fmt: skip
FLAGS = {
    'typo': Row(['--confg=x'], 'Did you mean: config'),
    'two configs': Row([TINY, TINY, '--config.seed=1'], '--config is given 2 times'),
    'word': Row([TINY, 'train'], "'train' is no flag"),
    'mode': Row([TINY, '--mode=trian'], '<train|evaluate|infer|cache|convert|report>'),
    'format': Row(['--mode=convert', '--from=x', '--to=y', '--format=bin'], '<t5x|hf>'),
    'from without convert': Row([TINY, '--from=x'], '--from is not for --mode=train'),
    'to without convert': Row([TINY, '--to=x'], '--to is not for --mode=train'),
    'workdir in convert': Row(['--mode=convert', '--from=x', '--to=y', '--workdir=z'], '--workdir is not for'),
    'convert without to': Row(['--mode=convert', '--from=x'], 'needs --from=CHECKPOINT and --to=FOLDER'),
    'convert without from': Row(['--mode=convert', '--to=x'], 'needs --from=CHECKPOINT and --to=FOLDER'),
}  # fmt: skip


@rows(CONFIGS)
def test_a_config_that_is_none(command_line, tmp_path, row):
    files = {name: text.replace('{dir}', str(tmp_path)) for name, text in row.files.items()}
    check(row._replace(files=files), command_line, tmp_path)


def test_a_config_that_may_not_be_read(open_path):
    """It is no file without get_config, and no setting is missing."""
    file = open_path / 'mine.py'
    file.write_text(CONFIG)
    file.chmod(0)
    with another_user(), pytest.raises(OSError) as refused:
        main.parse(['main.py', f'--config={file}'])
    assert main.one_line(refused.value) == f'{file}: Permission denied: {main.NAME_REMEDY}'


@rows(FLAGS)
def test_a_flag(command_line, tmp_path, row):
    check(row, command_line, tmp_path)


TRAINER = {
    'optimizer': Row([TINY, '--config.optimizer.name=sgd'], "='sgd': must be one of adafactor, a"),
    'factors': Row([TINY, '--config.learning_rate.factors=constnt'], "'constnt' is none of"),
    'no factors': Row([TINY, '--config.learning_rate.factors='], "'' is none of"),
    'normalizing factor': Row([TINY, '--config.loss.loss_normalizing_factor=SUM'], 'a positive, finite number'),
    'infinite factor': Row([TINY, '--config.loss.loss_normalizing_factor=inf'], 'a positive, finite number'),
    'factor that is nan': Row([TINY, '--config.loss.loss_normalizing_factor=nan'], 'a positive, finite number'),
    'negative factor': Row([TINY, '--config.loss.loss_normalizing_factor=-1'], 'a positive, finite number'),
    'activations': Row([TINY, "--config.model.mlp_activations=('tanh',)"], 'mlp_activations'),
    'no activations': Row([TINY, '--config.model.mlp_activations=()'], 'mlp_activations'),
    'no own model': Row(
        [TINY, '--config.model.module=mine'], "model.module='mine': {dir}/mine.py is no file: name a"
    ),
    'heads': Row(
        [TINY, '--config.model.num_heads=5', '--config.mesh.model=2'],
        'XLA_FLAGS=--xla_force_host_platform_device_count=2',
    ),
    'mesh': Row(
        [TINY, '--config.mesh.data=4', '--config.mesh.model=2'],
        'the product must be at most the 1 devices; on a CPU, the environment variable '
        'XLA_FLAGS=--xla_force_host_platform_device_count=8 makes as many',
    ),
    'mesh of nothing': Row([TINY, '--config.mesh.data=-1', '--config.mesh.model=-1'], 'at most one may be -1'),
    'microbatches': Row([TINY, '--config.train.num_microbatches=3'], "use 'auto' or one of 1, 2, 4, 8, 16"),
    'microbatches 0': Row([TINY, '--config.train.num_microbatches=0'], "use 'auto' or one of 1, 2, 4, 8, 16"),
    'microbatches as a word': Row(
        [TINY, '--config.train.num_microbatches=few'],
        "train.num_microbatches='few': must be a whole number or 'auto'",
    ),
    'microbatches as a fraction': Row(
        [TINY, '--config.train.num_microbatches=1.5'],
        "train.num_microbatches=1.5: must be a whole number or 'auto'",
    ),
}  # fmt: skip


@rows(TRAINER)
def test_settings_that_do_not_fit_together(command_line, tmp_path, row):
    check(row, command_line, tmp_path)


# The workdir.

OURS = json.dumps({'data_fingerprint': 'x', 'model': {}, 'train': {'steps': 1}})
FEW = '--config.data.vocabulary=bytes'
NOT_A_RUN = '{dir}/run is not a run of this program; name another --workdir'
HUGGING_FACE = json.dumps({'model_type': 't5', 'd_model': 8})
WORKDIRS = {
    'config.json': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/config.json': '{"a": 1}'}),
    'config.json of nothing': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/config.json': ''}),
    'config.json that is a list': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/config.json': '[1]'}),
    'config.json that is a folder': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/config.json/': ''}),
    'hugging face': Row(
        [TINY, '--workdir=run'],
        NOT_A_RUN,
        {'run/config.json': HUGGING_FACE, 'run/model.safetensors': 'x'},
    ),
    'hugging face weights': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/model.safetensors': 'x'}),
    'mesh tensorflow': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/model.ckpt-5.index': 'x'}),
    'a t5x checkpoint': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/checkpoint': 'x'}),
    'metrics': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/metrics.jsonl': '{"mine": 1}\n'}),
    'model-info': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/model-info.txt': 'mine'}),
    'lock': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/lock': 'mine'}),
    'lock folder': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/lock/': ''}),
    'vocabulary': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/vocabulary.model': 'mine'}),
    'train': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/train/data.txt': 'mine'}),
    'backup of a checkpoint': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/checkpoint_5.tmp-backup/x': 'y'}),
    'a checkpoint': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/checkpoint_5/config.json': '{}'}),
    'an empty checkpoint': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/checkpoint_5/': ''}),
    'link': Row(
        [TINY, '--workdir=link'],
        '{dir}/link is not a run of this program; name another --workdir',
        {'run/config.json': HUGGING_FACE, 'link': '-> run'},
    ),
    'file': Row([TINY, '--workdir=run'], '{dir}/run is a file, not a folder', {'run': 'mine'}),
    'below a file': Row([TINY, '--workdir=run/x'], '{dir}/run is a file, not a folder', {'run': 'mine'}),
    'root': Row([TINY, '--workdir=/'], '/ is not a run of this program'),
    'checkout': Row([TINY, '--workdir={root}'], '{root} is not a run of this program'),
    'empty': Row([TINY, '--workdir='], "'' is no path"),
    'loop': Row([TINY, '--workdir=a/x'], 'links', {'a': '-> b', 'b': '-> a'}),
    'bucket': Row([TINY, '--workdir=gs://bucket/x'], '--workdir=gs://bucket/x: name a folder on a disk'),
    'address': Row([TINY, '--workdir=http://host/x'], '--workdir=http://host/x: name a folder on a disk'),
    'nobody': Row([TINY, '--workdir=~nobody-here/x'], 'no such home folder'),
    'long name': Row([TINY, f'--workdir={"x" * 300}'], 'too long'),
    'long name in a folder': Row([TINY, f'--workdir=new/{"x" * 300}'], 'too long'),
    'no permission': Row([TINY, '--workdir=/proc/run', FEW], '/proc/run: No such file or directory: correct its'),
    'folder in place of its lock': Row([TINY, '--workdir=run', FEW], '{dir}/run/lock: Is a directory: ', {'run/config.json': OURS, 'run/lock/': ''}),
}  # fmt: skip


@rows(WORKDIRS)
def test_a_workdir_that_is_not_ours(command_line, tmp_path, row):
    check(row, command_line, tmp_path)


# Text, vocabularies and tasks.

LINES = ''.join(
    f'the {word} of the lake and the {word} of the hill\n' for word in 'abcdefghij' * 20
)
JSON_LINES = ''.join(json.dumps({'text': line}) + '\n' for line in LINES.splitlines())
LFS = 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n'


def of_text(*flags: str, message: str, **files: str) -> Row:
    """A run on text.txt, unless a flag names another file."""
    named = {name.replace('__', '.').replace('_in_', '/'): text for name, text in files.items()}
    defaults = [TINY, '--config.data.files=text.txt', '--config.data.vocabulary=bytes']
    return Row([*defaults, *flags], message, {'text.txt': LINES, **named})


FILES = '--config.data.files'
VALIDATION = '--config.data.validation_files'
VOCABULARY = '--config.data.vocabulary'
QUESTIONS = 'question,answer\n' + 'what is it?,it is this\n' * 50
QA = ['--config.data.inputs={question}', '--config.data.targets={answer}']
INFER = [
    '--mode=infer',
    '--checkpoint={root}/tests/golden/t5x_t5_1_1_tiny/checkpoint_6',
    f'{VOCABULARY}=bytes',
]
TEXTS = {
    'commas': of_text(f'{FILES}=,,', message='data.files'),
    'blank': of_text(f'{FILES}= , ', message='data.files'),
    'nothing': of_text(f'{FILES}=nowhere/*.txt', message="'nowhere/*.txt' matches no file"),
    'one of two': of_text(f'{FILES}=text.txt,nowhere.txt', message="'nowhere.txt' matches no file"),
    'folder': of_text(f'{FILES}=sub', message='sub', sub_in_x__txt=LINES),
    'address': of_text(f'{FILES}=http://host/x.txt', message='http://host/x.txt'),
    'home': of_text(f'{FILES}=~nobody-here/x.txt', message='~nobody-here'),
    'empty': of_text(f'{FILES}=none.txt', message='matches empty files only', none__txt=''),
    'blank lines': of_text(f'{FILES}=blank.txt', message='no document is in', blank__txt='\n \n\n'),
    'pointer': of_text(f'{FILES}=x.txt', message='git lfs pull', x__txt=LFS),
    'loop': of_text(f'{FILES}=a.txt', message='a.txt', a__txt='-> b.txt', b__txt='-> a.txt'),
    'dangling': of_text(f'{FILES}=a.txt', message='a.txt', a__txt='-> nothing.txt'),
    'half gzipped': of_text(f'{FILES}=*', message='a.gz', a__gz='x'),
    'no gzip': of_text(f'{FILES}=a.gz', message='a.gz is not gzipped', a__gz=LINES),
    'no json': of_text(f'{FILES}=a.jsonl', message='a.jsonl: no JSON', a__jsonl='the lake\n' * 50),
    'JSONL': of_text(f'{FILES}=a.JSONL', message='a.JSONL: no JSON', a__JSONL='the lake\n' * 50),
    'ndjson': of_text(f'{FILES}=a.ndjson', message='a.ndjson: no JSON', a__ndjson='the lake\n' * 50),
    'table as text': of_text(f'{FILES}=a.csv.txt', *QA, message='data.kind', a__csv__txt=QUESTIONS),
    'table as text in a cache': of_text(
        f'{FILES}=a.data', *QA, '--mode=cache', '--config.data.cache_dirs=out', message='data.kind', a__data=QUESTIONS
    ),
    'table as text in inference': Row(
        [*INFER, *QA, '--input=a.data'], 'a.data is read as lines of text', {'a.data': QUESTIONS}
    ),
    'kind': of_text('--config.data.kind=xls', message="data.kind='xls': must be one of"),
    'kind of nothing': of_text(f'{FILES}=', '--config.data.kind=csv', message="data.kind='csv' is of files"),
    'columns of one name': of_text(
        f'{FILES}=a.csv', *QA, message="a.csv has more than one column 'answer'", a__csv='question,answer,answer\n'
    ),
    'columns of one name in inference': Row(
        [*INFER, *QA, '--input=a.csv'], "a.csv has more than one column 'answer'", {'a.csv': 'question,answer,answer\n'}
    ),
    'only a header': of_text(f'{FILES}=a.csv', *QA, message='no document is in {dir}/a.csv', a__csv='question,answer\n'),
    'indented JSON': of_text(f'{FILES}=a.json', message='a.json is JSON over many lines', a__json='{\n "text": "x"\n}\n'),
    'no field': of_text(f'{FILES}=a.json', message="no field 'text'", a__json='{"body": "x"}\n' * 9),
    'no text field': of_text('--config.data.text_field=', message="data.text_field=''"),
    'validation alone': of_text(f'{FILES}=', f'{VALIDATION}=text.txt', message='needs data.files'),
    'validation again': of_text(f'{VALIDATION}=text.txt', message='text.txt'),
    'validation by dot': of_text(f'{VALIDATION}=./text.txt', message='text.txt'),
    'validation by link': of_text(f'{VALIDATION}=link.txt', message='text.txt', link__txt='-> text.txt'),
    'validation copied': of_text(f'{VALIDATION}=copy.txt', message='copy.txt', copy__txt=LINES),
    'validation empty': of_text(f'{VALIDATION}=none.txt', message='data.validation_files', none__txt=''),
    'validation blank': of_text(f'{VALIDATION}=none.txt', message='data.validation_files', none__txt='\n \n'),
    'fraction of nothing': of_text('--config.data.validation_fraction=0', message='data.validation_fraction=0'),
    'inputs of 1': of_text('--config.data.lengths.inputs=1', message='data.lengths.inputs=1'),
    'inputs of 2': of_text('--config.data.lengths.inputs=2', message='data.lengths.inputs=2'),
    'targets of 1': of_text('--config.data.lengths.targets=1', message='data.lengths.targets=1'),
    'sentinels': of_text(
        f'{VOCABULARY}=', '--config.data.num_pieces=40', '--config.data.extra_ids=0', message='extra_ids=0'
    ),
    'few sentinels': of_text(
        f'{VOCABULARY}=', '--config.data.num_pieces=40', '--config.data.extra_ids=2', message='sentinels'
    ),
    'pieces': of_text(f'{VOCABULARY}=', '--config.data.num_pieces=5', message='data.num_pieces=5'),
    'task': of_text('--config.data.task=glue', message="data.task='glue' is unknown: the nearest names are "),
    'objective': of_text('--config.data.task=ul2', message='data.lengths.targets=29: too short for the inputs; use 1'),
    'modes': of_text('--config.data.task=ul2', '--config.data.lengths.inputs=4', message='data.lengths.inputs=4 is too '),
    'concatenate': of_text('--config.data.concatenate=maybe', message="data.concatenate='maybe': must be one of"),
    'task for evaluation': of_text(
        '--config.data.task=glue_ax_v002', message="data.files='text.txt' are for training, and data.task='glue_ax_v002' is"
    ),
    'records of a mixture': of_text(
        '--config.data.task=t0_train', message="data.files='text.txt' are the records of one task, and data.task='t0_train'"
    ),
    'no data set': Row(
        [TINY, '--config.data.task=glue_sst2_v002', '--config.data.tfds_dir={dir}', '--workdir=run'],
        "data.task='glue_sst2_v002': data.tfds='glue/sst2:1.0.0': {dir} holds no such data set, its data sets are: none: ",
    ),
    'no caches': of_text('--config.data.cache_dirs=nowhere', message="data.cache_dirs='nowhere': {dir}/nowhere is no folder"),
    'caches in a file': of_text('--config.data.cache_dirs=text.txt', message='{dir}/text.txt is no folder'),
    'no vocabulary': of_text(f'{VOCABULARY}=nowhere', message="data.vocabulary='nowhere'"),
    'vocabulary of text': of_text(f'{VOCABULARY}=text.txt', message='no SentencePiece model'),
    'folder without': of_text(f'{VOCABULARY}=sub', message="data.vocabulary='sub'", sub_in_x__txt='x'),
    'vocabulary address': of_text(f'{VOCABULARY}=http://host/x', message='http://host/x'),
    'vocabulary pointer': of_text(f'{VOCABULARY}=spiece.model', message='git lfs pull', spiece__model=LFS),
    'vocabulary too large': of_text('--config.model.vocab_size=128', message='too small for 359 pieces; use 384'),
    'step offset': of_text('--config.optimizer.step_offset=5', message='step_offset=5 lies after step 0, where the run starts: use 0'),
    'larger than memory': of_text(
        '--config.model.mlp_dim=1048576', '--config.model.emb_dim=65536', message='free space, a checkpoint takes'
    ),
    'restore nothing': of_text('--config.restore.path=nowhere', message='nowhere'),
    'restore text': of_text('--config.restore.path=text.txt', message='text.txt'),
    'restore address': of_text('--config.restore.path=http://host/x', message='http://host/x'),
}  # fmt: skip


@rows(TEXTS)
def test_text_and_vocabulary(command_line, tmp_path, row):
    check(row, command_line, tmp_path)


# Caches.


def of_cache(folder: str, message: str) -> Row:
    flags = ['--mode=cache', TINY, f'{FILES}=text.txt', f'{VOCABULARY}=bytes']
    return Row([*flags, f'--config.data.cache_dirs={folder}'], message, {'text.txt': LINES})


CACHES = {
    'nowhere': of_cache('', 'name it with data.cache_dirs'),
    'no permission': of_cache('/proc/x', '/proc/x: No such file or directory: correct its name or permissions'),
    'file': of_cache('text.txt', '{dir}/text.txt/'),
    'long name': of_cache('x' * 300, 'data.cache_dirs: xxx'),
}  # fmt: skip


@rows(CACHES)
def test_a_cache(command_line, tmp_path, row):
    check(row, command_line, tmp_path)


# Checkpoints.


def of_conversion(source: str, message: str, target: str = 'out', **files: str) -> Row:
    named = {name.replace('__', '.').replace('_in_', '/'): text for name, text in files.items()}
    return Row(['--mode=convert', f'--from={source}', f'--to={target}'], message, named)


GOLDEN = str(ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6')
T5 = json.dumps({'model_type': 't5'})
CONVERSIONS = {
    'missing': of_conversion('nowhere', 'nowhere'),
    'empty folder': Row(['--mode=convert', '--from=sub', '--to=out'], 'sub', {'sub/': ''}),
    'text': of_conversion('a.txt', 'a.txt', a__txt='hello'),
    'address': of_conversion('http://host/x', 'http://host/x'),
    'root': of_conversion('/', '/'),
    'loop': of_conversion('a', 'a cannot be opened', a='-> b', b='-> a'),
    'no weights': of_conversion('hf', 'hf', hf_in_config__json=T5),
    'weights of flax': of_conversion('hf', 'flax_model.msgpack', hf_in_config__json=T5, **{'hf_in_flax_model__msgpack': 'x'}),
    'weights of torch': of_conversion('hf', 'pytorch_model.bin', hf_in_config__json=T5, **{'hf_in_pytorch_model__bin': 'x'}),
    'pointer': of_conversion('hf', 'git lfs pull', hf_in_config__json=T5, **{'hf_in_model__safetensors': LFS}),
    'bert': of_conversion('hf', 'bert', hf_in_config__json='{"model_type": "bert"}', **{'hf_in_model__safetensors': 'x'}),
    'to a file': of_conversion(GOLDEN, 'a.txt', target='a.txt', a__txt='mine'),
    'to below a file': of_conversion(GOLDEN, 'a.txt', target='a.txt/x', a__txt='mine'),
    'to a bucket': of_conversion(GOLDEN, 'gs://bucket/x: write to a disk', target='gs://bucket/x'),
    'to a full folder': of_conversion(GOLDEN, 'sub', target='sub', sub_in_x__txt='mine'),
    'to where nobody may write': of_conversion(GOLDEN, '/proc/x: No such file or directory: ', target='/proc/x'),
    'to a long name': of_conversion(GOLDEN, 'File name too long: ', target=f'new/{"x" * 300}'),
    'to itself': of_conversion(GOLDEN, 'checkpoint_6', target=GOLDEN),
}  # fmt: skip


@rows(CONVERSIONS)
def test_a_conversion(command_line, tmp_path, row):
    check(row, command_line, tmp_path)


NAMES = ['mine.py', './mine.py', '../{here}/mine.py', '~/mine.py', 'my configs/ü.py', 'link.py']


@pytest.mark.parametrize('name', NAMES)
def test_a_config_by_every_name(command_line, tmp_path, name):
    """The file is found and read: the message is about its own number of steps."""
    text = CONFIG + '    config.train.steps = 0\n    return config\n'
    (tmp_path / 'my configs').mkdir()
    for file in ('mine.py', 'my configs/ü.py'):
        (tmp_path / file).write_text(text)
    (tmp_path / 'link.py').symlink_to('mine.py')
    name = name.replace('{here}', tmp_path.name)
    result = command_line(f'--config={name}', cwd=tmp_path, HOME=str(tmp_path))
    assert result.status == 2 and result.stderr.startswith('main.py: train.steps=0: must be')
