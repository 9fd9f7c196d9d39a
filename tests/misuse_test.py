"""Wrong input on the command line: a row for each input and its message.

Every row runs main.py in a process and a folder of its own, which prints one line, writes nothing
and exits with status 2.
"""

import json
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
from command_line import ROOT
from forms import every_third_quick
from permissions import another_user

from configs import base
from configs import check as settings
from modes import command_line, errors

TINY = f'--config={ROOT}/configs/tiny.py'


class Row(NamedTuple):
    """An input and the message about it.

    `{dir}` stands for the row's folder, `{root}` for the checkout.
    """

    arguments: list[str]
    message: str  # a part of the one line on stderr
    files: dict[str, str] = {}  # name in the folder -> content; a name that ends with / is a folder


def write(folder: pathlib.Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith('/'):
            path.mkdir()
        elif content.startswith('-> '):
            path.symlink_to(content.removeprefix('-> '))
        else:
            path.write_text(content.replace('{dir}', str(folder)), errors='surrogateescape')


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
    *arguments, message = [
        text.replace('{dir}', str(folder)).replace('{root}', str(ROOT))
        for text in [*row.arguments, row.message]
    ]
    result = command_line(*arguments, cwd=folder)
    assert result.status == 2, result
    [line] = result.stderr.splitlines()
    assert line.startswith('main.py: ') and message in line
    after = contents(folder)
    after = {name: after[name] for name in after if after[name] is not None or name in before}
    assert after == before


TABLES: dict[str, dict[str, Row]] = {}  # filled below


def out_of_range() -> list[tuple[str, str]]:
    """Return (setting, value) just outside of every range, and values that are no finite number."""
    found = []
    for key, setting in settings.declared().items():
        limits = setting.range
        if limits is None:
            continue
        values: list = [limits.low - 1, *limits.without]
        if limits.high != base.LARGEST_FLOAT:
            values.append(limits.high + 1)
        is_float = isinstance(setting.default, float)
        values += ['nan', 'inf', '-inf'] if is_float else [10**30, -(10**30)]
        found += [(key, str(value)) for value in values]
    return found


@pytest.mark.parametrize('key, value', every_third_quick(out_of_range()))
def test_a_number_out_of_its_range(command_line, tmp_path, key, value):
    row = Row([TINY, f'--config.{key}={value}'], message=f'{key}=')
    check(row, command_line, tmp_path)


def test_each_number_has_a_range():
    """And no other setting; the defaults are valid."""
    for key, setting in settings.declared().items():
        assert (type(setting.default) in (int, float)) == (setting.range is not None), key
        settings.check_value(key, setting.default)
    for _, *dependents in settings.NEEDS:
        assert settings.declared().keys() >= set(dependents[-1])


def test_help_lists_every_setting(command_line, tmp_path):
    result = command_line('--help', cwd=tmp_path)
    assert result.status == 0
    for key, _ in settings.leaves(base.get_config()):
        [line] = re.findall(rf'^  --config\.{re.escape(key)}=.+\n      (.+)$', result.stdout, re.M)
        assert line.strip()
    for words in ('--config=configs/NAME.py', '--workdir', '--mode'):
        assert words in result.stdout


CONFIG = 'from configs import base\n\ndef get_config():\n    config = base.get_config()\n'
DICT = 'import ml_collections as m\n\ndef get_config():\n    return m.ConfigDict({"%s": 1})\n'
END = '    return config\n'
IMPORT = 'import sys\nsys.path.insert(0, "{dir}")\nimport helper\n'


def mine(message: str, content: str, **more: str) -> Row:
    """A config file of the user's."""
    files = {'mine.py': content} | {f'{name}.py': text for name, text in more.items()}
    return Row(['--config=mine.py'], message, files)


def tiny(*flags: str) -> Row:
    """Flags after --config=configs/tiny.py; the message has the name and value of the last one."""
    return Row([TINY, *flags], ' '.join(flags[-1].removeprefix('--config.').split()))


# Newer Pythons only say that the file does not exist.
TOO_LONG = (
    'File name too long'
    if sys.version_info < (3, 14)
    else f'{"x" * 300}.py: not a Python file: try --config='
)
TABLES['configs'] = {
    'missing': Row(['--config=mine.py'], 'mine.py: not a Python file: try --config=configs/tiny.py'),
    'no suffix': Row(['--config=mine'], '--config=mine: not a Python file', {'mine.py': CONFIG}),
    'empty name': Row(['--config='], 'not a Python file'),
    'long name': Row([f'--config={"x" * 300}.py'], TOO_LONG),
    'NUL in a path': mine('data.files', CONFIG + '    config.data.files = "a\\0b.txt"\n' + END),
    'not UTF-8': mine('mine.py, line 1: ', '\udcff\udcfe'),
    'no config': Row(['--workdir=x'], '--config is missing'),
    'folder': Row(['--config={dir}'], 'not a Python file'),
    'readme': Row(['--config={root}/README.md'], 'not a Python file'),
    'home': Row(['--config=~/nothing.py'], 'nothing.py: not a Python file'),
    'typo': mine('mine.py, line 5: AttributeError', CONFIG + '    config.train.stepz = 3\n' + END),
    'wrong type': mine('mine.py, line 5: TypeError', CONFIG + '    config.train.steps = "many"\n' + END),
    'syntax': mine('mine.py, line 2: ', 'import os\ndef get_config(:\n'),
    'indentation': mine('mine.py, line 2: ', 'def get_config():\nreturn 1\n'),
    'import': mine('mine.py, line 1: ModuleNotFoundError', 'import not_there\n'),
    'own error': mine('mine.py, line 2: ZeroDivisionError', 'def get_config():\n    return 1 / 0\n'),
    'error in another file': mine('helper.py, line 1: NameError', IMPORT, helper='undefined\n'),
    'no get_config': mine('no function get_config', 'x = 1\n'),
    'empty file': mine('no function get_config', ''),
    'null bytes': mine('mine.py, line 1: ', '\0\0'),
    'dict': mine('is a dict', 'def get_config():\n    return {"a": 1}\n'),
    'number': mine('is a int', 'def get_config():\n    return 3\n'),
    'another config': mine('lr is not a setting', DICT % 'lr'),
    'half a config': mine(' is missing from the config', DICT % 'seed'),
    'key added': mine('train.momentum', CONFIG + '    config.unlock()\n    config.train.momentum = 1\n' + END),
    'type in a config': mine('data.vocabulary=None', CONFIG + '    config.data.vocabulary = None\n' + END),
    'size': Row(['--config={root}/configs/t5.py:huge'], 'configs/t5.py:huge'),
    'argument': Row([f'{TINY}:foo'], 'write --config='),
    'typo of a setting': Row([TINY, '--config.train.stepz=3'], 'Did you mean "steps"'),
    'typo of a group': Row([TINY, '--config.trian.steps=3'], 'Did you mean "train"'),
    'group': Row([TINY, '--config.train=3'], '--config.train=3: train is a group of settings'),
    'group in a group': Row([TINY, '--config.data.lengths=3'], '--config.data.lengths.NAME=VALUE'),
    'no value': Row([TINY, '--config.train.steps'], 'Missing value'),
    'setting below a setting': Row([TINY, '--config.train.steps.x=3'], 'train.steps.x'),
    'setting without a config': Row(['--config.x=1'], '--config.x needs --config=FILE'),
    'setting without a config, after a flag': Row(['--workdir=x', '--config.train.steps', '3'], 'steps needs --config=FILE'),
    'setting of a mode without': Row(['--mode=convert', '--from=x', '--to=y', '--config.train.steps=1'], '--config'),
    'setting of evaluate': Row(['--mode=infer', '--checkpoint=x', '--config.decode.beam_size=two'], 'decode.beam_size=two: must be'),
    'text for a flag': Row(['--mode=evaluate', '--checkpoint=x', '--watch=perhaps'], '--watch=perhaps: must be true or false'),
    'text for a number': tiny('--config.train.steps=many'),
    'fraction for a count': tiny('--config.train.steps=1.5'),
    'power of ten': tiny('--config.train.steps=1e3'),
    'nothing for a number': tiny('--config.train.steps='),
    'colons for a number': tiny('--config.seed=1: 2:'),
    'lines for a number': tiny('--config.seed=1\n2'),
    'comma in a number': tiny('--config.model.dropout_rate=0,1'),
    'text for a bool': tiny('--config.restore.strict=maybe'),
    'yes for a bool': tiny('--config.optimizer.factored=yes'),
    'best_is alone': Row([TINY, '--config.save.best_is=lower'], "save.best_is='lower' has no effect without save.best_metric"),
    'task of no metrics': Row([TINY, '--config.infer_eval.task=x'], 'infer_eval.every_steps'),
    'adamw of adafactor': Row([TINY, '--config.optimizer.adamw.weight_decay=0.1'], "optimizer.name='adamw'"),
    'only of nothing': Row([TINY, '--config.restore.only=target/.*'], 'restore.path'),
    'dtype': Row([TINY, '--config.model.dtype=float64'], "model.dtype='float64'"),
    'save dtype': Row([TINY, '--config.save.dtype=int8'], "save.dtype='int8'"),
    'restore dtype': Row([TINY, '--config.restore.dtype=int8'], "restore.dtype='int8'"),
    'on_bad_line': Row([TINY, '--config.data.on_bad_line=ignore'], "data.on_bad_line='ignore'"),
}  # fmt: skip
TABLES['flags'] = {
    'typo': Row(['--confg=x'], 'Did you mean: config'),
    'lines in a name': Row(['--con\nfg\n'], "'con fg '"),
    'one flag of several processes': Row([TINY, '--num_processes=2'], 'give --coordinator_address=HOST:PORT (of process 0)'),
    'process_id': Row([TINY, '--coordinator_address=a:1', '--num_processes=2', '--process_id=2'], '--process_id=2: give'),
    'port': Row([TINY, '--coordinator_address=a:99999', '--num_processes=2', '--process_id=0'], '--coordinator_address=a:99999 --num'),
    'address': Row([TINY, '--coordinator_address=a', '--num_processes=2', '--process_id=1'], '--coordinator_address=a --num'),
    'heartbeat': Row([TINY, '--heartbeat=0'], '--heartbeat=0'),
    'heartbeat of a report': Row(['--mode=report', '--runs=x', '--heartbeat=9'], '--heartbeat is not for --mode=report'),
    'two configs': Row([TINY, TINY, '--config.seed=1'], '--config is given 2 times'),
    'word': Row([TINY, 'train'], "'train' is not a flag"),
    'mode': Row([TINY, '--mode=trian'], '--mode=trian'),
    'format': Row(['--mode=convert', '--from=x', '--to=y', '--format=bin'], '<t5x|hf|peft>'),
    'from without convert': Row([TINY, '--from=x'], '--from is not for --mode=train'),
    'topology without plan': Row([TINY, '--topology=cpu:8'], '--topology is not for --mode=train'),
    'topology without a size': Row([TINY, '--mode=plan', '--topology=v5e'], '--topology=v5e'),
    'topology of no device': Row([TINY, '--mode=plan', '--topology=cpu:0'], '--topology=cpu:0: '),
    'topology of too many devices': Row([TINY, '--mode=plan', '--topology=cpu:99999999999'], '--topology=cpu:99999999999: '),
    'topology of no kind': Row([TINY, '--mode=plan', '--topology=foo:8'], '--topology=foo:8: name a slice'),
    'topology of no GPU': Row([TINY, '--mode=plan', '--topology=h100'], '--topology=h100: write h100:N'),
    'a mesh smaller than the topology': Row([TINY, '--mode=plan', '--topology=cpu:8', '--config.mesh.data=4'], 'mesh.data'),
    'microbatches to plan': Row([TINY, '--mode=plan', '--topology=cpu:8', '--config.train.num_microbatches=3'], 'train.num_microbatches=3'),
    'to without convert': Row([TINY, '--to=x'], '--to is not for --mode=train'),
    'steps to trace': Row([TINY, '--profile=13:10'], '--profile=13:10: write FIRST:LAST'),
    'step to trace beyond all': Row([TINY, '--profile=1:99999999999999999999'], 'write FIRST:LAST'),
    'trace in a bucket': Row([TINY, '--profile=1:2', '--workdir=gs://bucket/run'], 'a trace is written to a disk'),
    'workdir in convert': Row(['--mode=convert', '--from=x', '--to=y', '--workdir=z'], '--workdir is not for'),
    'convert without to': Row(['--mode=convert', '--from=x'], '--to=FOLDER'),
    'convert without from': Row(['--mode=convert', '--to=x'], '--from=CHECKPOINT'),
}  # fmt: skip


def test_a_config_that_may_not_be_read(open_path):
    """Nobody is told that get_config or a setting is missing."""
    file = open_path / 'mine.py'
    file.write_text(CONFIG)
    file.chmod(0)
    with another_user(), pytest.raises(OSError) as refused:
        command_line.parse(['main.py', f'--config={file}'])
    assert errors.one_line(refused.value) == f'{file}: Permission denied: {errors.NAME_REMEDY}'


TABLES['spec'] = {
    'optimizer': Row([TINY, '--config.optimizer.name=sgd'], 'optimizer.name'),
    'factors': Row([TINY, '--config.learning_rate.factors=constnt'], 'constnt'),
    'no factors': Row([TINY, '--config.learning_rate.factors='], 'learning_rate.factors'),
    'normalizing factor': Row([TINY, '--config.loss.loss_normalizing_factor=SUM'], 'loss_normalizing_factor'),
    'infinite factor': Row([TINY, '--config.loss.loss_normalizing_factor=inf'], 'loss_normalizing_factor'),
    'factor that is nan': Row([TINY, '--config.loss.loss_normalizing_factor=nan'], 'loss_normalizing_factor'),
    'negative factor': Row([TINY, '--config.loss.loss_normalizing_factor=-1'], 'loss_normalizing_factor'),
    'activations': Row([TINY, "--config.model.mlp_activations=('tanh',)"], 'mlp_activations'),
    'no activations': Row([TINY, '--config.model.mlp_activations=()'], 'mlp_activations'),
    'no own model': Row([TINY, '--config.model.module=mine'], "model.module='mine': {dir}/mine.py"),
    'heads': Row([TINY, '--config.model.num_heads=5', '--config.mesh.model=2'], 'device_count=2'),
    'mesh': Row([TINY, '--config.mesh.data=4', '--config.mesh.model=2'], 'XLA_FLAGS=--xla_force_host_platform_device_count=8'),
    'mesh of nothing': Row([TINY, '--config.mesh.data=-1', '--config.mesh.model=-1'], 'mesh.'),
    'microbatches': Row([TINY, '--config.train.num_microbatches=3'], 'one of 1, 2, 4, 8, 16'),
    'microbatches 0': Row([TINY, '--config.train.num_microbatches=0'], 'one of 1, 2, 4, 8, 16'),
    'microbatches as a word': Row([TINY, '--config.train.num_microbatches=few'], "train.num_microbatches='few'"),
    'microbatches as a fraction': Row([TINY, '--config.train.num_microbatches=1.5'], 'train.num_microbatches=1.5'),
}  # fmt: skip


# The options of an own model.

OWN = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Options:
    num: int = dataclasses.field(default=2, metadata={'range': (1, 8)})
    kind: str = dataclasses.field(default='a', metadata={'choices': ('a', 'b')})

def modules(default):
    return default
"""


def option(message: str, *flags: str, own: str = OWN) -> Row:
    """Options of the model own.py."""
    return Row([TINY, '--config.model.module=own.py', *flags], message, {'own.py': own})


TABLES['options'] = {
    'out of range': option('model.options.num=9: must be at least 1 and at most 8', '--config.model.options.num=9'),
    'typo': option("model.options.nun='3' is unknown: {dir}/own.py has num, kind: remove it", '--config.model.options.nun=3'),
    'typo in the group': option("unknown setting: 'optoins'", '--config.model.optoins.num=3'),
    'negative, as a word': option('model.options.num=-1: must be at least 1', '--config.model.options.num', '-1'),
    'another type': option('model.options.num=2.5: must be a whole number, such as 2', '-config.model.options.num=2.5'),
    'no number': option("model.options.num='two': must be a whole number, such as 2", '--config.model.options.num', 'two'),
    'no choice': option("model.options.kind='c=d': must be one of 'a', 'b'", '--config.model.options.kind=c=d'),
    'no value': option('model.options.num=True: must be a whole number, such as 2', '--config.model.options.num', '--workdir=x'),
    'nothing': option("model.options.num='': must be a whole number", '--config.model.options.num='),
    'no': option('model.options.num=False: must be a whole number', '--noconfig.model.options.num'),
    'twice': option('--config.model.options.num is given twice', '--config.model.options.num=3', '-config.model.options.num', '4'),
    'no name': option('--config.model.options.=3: model.options is a group of settings: set one', '--config.model.options.=3'),
    'dots': option('--config.model.options.num.x=3: model.options is a group', '--config.model.options.num.x=3'),
    'the group': option('model.options is a group of settings', '--config.model.options=3'),
    'the group alone': option('--config.model.options: model.options is a group of settings', '--config.model.options'),
    'no and a value': option('--noconfig.model.options.num=1: ', '--noconfig.model.options.num=1'),
    'no module': Row([TINY, '--config.model.options.num=3'], "model.options.num='3' is a setting of an own model: set model.module"),
    'no class': option('own.py has no options', '--config.model.options.num=3', own='def modules(default):\n    return default\n'),
    'not frozen': option('own.py: Options=', own=OWN.replace('(frozen=True)', '')),
    'no default': option('own.py: the option num must have a default', own=OWN.replace("int = dataclasses.field(default=2, metadata={'range': (1, 8)})", 'int')),
    'in a config': mine('model.options.num=9: must be', CONFIG + '    config.model.module = "own.py"\n    config.model.options.num = 9\n' + END, own=OWN),
    'in a config, a typo': mine('model.options.nun=3 is unknown', CONFIG + '    config.model.module = "own.py"\n    config.model.options.nun = 3\n' + END, own=OWN),
    'in a config, of another type': mine('must be a whole number', CONFIG + '    config.model.module = "own.py"\n    config.model.options = {"num": [3]}\n' + END, own=OWN),
    'of another mode': Row(['--mode=report', '--runs=x', '--config.model.options.num=3'], '--config is not for --mode=report'),
    'to plan': option('model.options.num=9: must be', '--mode=plan', '--config.model.options.num=9'),
    'without a config': Row(['--config.model.options.num=3'], '--config is missing'),
}  # fmt: skip


# The workdir.

OURS = json.dumps({'data_fingerprint': 'x', 'model': {}, 'train': {'steps': 1}})
FEW = '--config.data.vocabulary=bytes'
NOT_A_RUN = '{dir}/run is not a run of this program; name another --workdir'
HUGGING_FACE = json.dumps({'model_type': 't5', 'd_model': 8})
TABLES['workdirs'] = {
    'config.json': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/config.json': '{"a": 1}'}),
    'config.json of nothing': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/config.json': ''}),
    'config.json that is a list': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/config.json': '[1]'}),
    'config.json that is a folder': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/config.json/': ''}),
    'hugging face': Row([TINY, '--workdir=run'], NOT_A_RUN, {'run/config.json': HUGGING_FACE, 'run/model.safetensors': 'x'}),
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
    'link': Row([TINY, '--workdir=link'], '{dir}/link is not a run', {'run/config.json': HUGGING_FACE, 'link': '-> run'}),
    'file': Row([TINY, '--workdir=run'], '{dir}/run is a file', {'run': 'mine'}),
    'below a file': Row([TINY, '--workdir=run/x'], '{dir}/run is a file', {'run': 'mine'}),
    'empty': Row([TINY, '--workdir='], "'' is not a path"),
    'loop': Row([TINY, '--workdir=a/x'], 'links', {'a': '-> b', 'b': '-> a'}),
    'no bucket': Row([TINY, '--workdir=ftp://bucket/x'], 'ftp://bucket/x: only disks, gs:// and s3://'),
    'address': Row([TINY, '--workdir=http://host/x'], 'http://host/x: only disks, gs:// and s3://'),
    'nobody': Row([TINY, '--workdir=~nobody-here/x'], 'is in no home folder'),
    'long name': Row([TINY, f'--workdir={"x" * 300}'], 'too long'),
    'long name in a folder': Row([TINY, f'--workdir=new/{"x" * 300}'], 'too long'),
    'no permission': Row([TINY, '--workdir=/proc/run', FEW], '/proc/run: No such file or directory: correct its'),
    'folder instead of its lock': Row([TINY, '--workdir=run', FEW], '{dir}/run/lock: Is a directory: ', {'run/config.json': OURS, 'run/lock/': ''}),
}  # fmt: skip


# Text, vocabularies and tasks.

LINES = ''.join(f'the {x} of the lake and the {x} of the hill\n' for x in 'abcdefghij' * 20)
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
TWO = 'question,answer,answer\n'
QA = ['--config.data.inputs={question}', '--config.data.targets={answer}']
GOLDEN = str(ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6')
INFER = ['--mode=infer', f'--checkpoint={GOLDEN}', f'{VOCABULARY}=bytes']
TABLES['texts'] = {
    'commas': of_text(f'{FILES}=,,', message='data.files'),
    'blank': of_text(f'{FILES}= , ', message='data.files'),
    'nothing': of_text(f'{FILES}=nowhere/*.txt', message="'nowhere/*.txt' matches no file"),
    'one of two': of_text(f'{FILES}=text.txt,nowhere.txt', message="'nowhere.txt' matches no file"),
    'folder': of_text(f'{FILES}=sub', message='sub', sub_in_x__txt=LINES),
    'address': of_text(f'{FILES}=http://host/x.txt', message='http://host/x.txt'),
    'home': of_text(f'{FILES}=~nobody-here/x.txt', message='~nobody-here'),
    'empty': of_text(f'{FILES}=none.txt', message="data.files='none.txt'", none__txt=''),
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
    'table as text in inference': Row([*INFER, *QA, '--input=a.data'], 'a.data', {'a.data': QUESTIONS}),
    'kind': of_text('--config.data.kind=xls', message="data.kind='xls': must be one of"),
    'delimiter': of_text('--config.data.delimiter=; ', message="data.delimiter='; ': must be one character"),
    'delimiter of nothing': of_text(f'{FILES}=', '--config.data.delimiter=tab', message="data.delimiter='tab'"),
    'delimiter of lines': of_text('--config.data.delimiter=tab', message="data.delimiter='tab' is for tables, and {dir}/text.txt"),
    'semicolons': of_text(f'{FILES}=a.csv', *QA, message="set data.delimiter=';'", a__csv='question;answer\nq;a\n'),
    'semicolons in inference': Row([*INFER, *QA, '--input=a.csv'], "set data.delimiter=';'", {'a.csv': 'question;answer\nq;a\n'}),
    'kind of nothing': of_text(f'{FILES}=', '--config.data.kind=csv', message="data.kind='csv'"),
    'columns of one name': of_text(f'{FILES}=a.csv', *QA, message="a.csv has the columns 'question'", a__csv=TWO),
    'columns of one name in inference': Row([*INFER, *QA, '--input=a.csv'], "a.csv has the columns 'question'", {'a.csv': TWO}),
    'only a header': of_text(f'{FILES}=a.csv', *QA, message='no document is in {dir}/a.csv', a__csv='question,answer\n'),
    'a short row': of_text(f'{FILES}=a.csv', *QA, message='line 2 of {dir}/a.csv: 1 columns', a__csv='question,answer\nq\n'),
    'an open quote': of_text(f'{FILES}=a.csv', *QA, message='line 2 of {dir}/a.csv: no CSV', a__csv='question,answer\nq,"a\nq,b\n'),
    'text after a quote': of_text(f'{FILES}=a.csv', *QA, message='line 2 of {dir}/a.csv: no CSV', a__csv='question,answer\nq,"a"b\n'),
    'metric': of_text(*QA, '--config.data.metrics=bleu,blue', message="data.metrics='bleu,blue': 'blue' is none, has"),
    'tokenizer of bleu': of_text(*QA, '--config.data.metrics=bleu:zhh', message="tokenizer='zhh' of bleu: sacrebleu has none of this name: use one of none, zh, 13a, "),
    'tokenizer without a name': of_text(*QA, '--config.data.metrics=bleu:', message="tokenizer='' of bleu"),
    'tokenizer of rouge': of_text(*QA, '--config.data.metrics=rouge:zh', message="tokenizer='zh' of rouge: use one of ascii, unicode"),
    'tokenizer of accuracy': of_text(*QA, '--config.data.metrics=accuracy:zh', message="'accuracy:zh' is none, has no tokenizer"),
    'metrics of one name': of_text(*QA, '--config.data.metrics=bleu:zh, bleu', message="'bleu' is none, has no tokenizer, or is there twice"),
    'no column': of_text(f'{FILES}=a.csv', *QA, message="a.csv has no column 'answer'", a__csv='n,question\n1,q\n'),
    'no header': of_text(f'{FILES}=a.tsv', *QA, message='line 1 of {dir}/a.tsv has the columns', a__tsv='\nq\ta\n'),
    'no answer': of_text(f'{FILES}=a.jsonl', *QA, message="a text or number 'answer', the first values are 'question': correct", a__jsonl='{"question": "q"}\n' * 9),
    'null': of_text(f'{FILES}=a.jsonl', *QA, message='null and NaN are missing values', a__jsonl='{"question": "q", "answer": null}\n' * 9),
    'NaN': of_text(f'{FILES}=a.jsonl', *QA, message='null and NaN are missing values', a__jsonl='{"question": "q", "answer": NaN}\n' * 9),
    'inputs without targets': of_text(QA[0], message='needs data.targets'),
    'a template without a field': of_text(QA[0], '--config.data.targets=yes', message="data.targets='yes'"),
    'an open brace': of_text(QA[0], '--config.data.targets={answer', message="data.targets='{answer'"),
    'a field without a name': of_text(QA[0], '--config.data.targets={}', message="data.targets='{}'"),
    'a field with a format': of_text(QA[0], '--config.data.targets={answer:d}', message="data.targets='{answer:d}'"),
    'a field with a conversion': of_text(QA[0], '--config.data.targets={answer!r}', message="data.targets='{answer!r}'"),
    'indented JSON': of_text(f'{FILES}=a.json', message='a.json is JSON over many lines', a__json='{\n "text": "x"\n}\n'),
    'no field': of_text(f'{FILES}=a.json', message="has a text 'text', the first values are 'body': correct", a__json='{"body": "x"}\n' * 9),
    'no text field': of_text('--config.data.text_field=', message="data.text_field=''"),
    'validation alone': of_text(f'{FILES}=', f'{VALIDATION}=text.txt', message='needs data.files'),
    'validation again': of_text(f'{VALIDATION}=text.txt', message='text.txt'),
    'validation by dot': of_text(f'{VALIDATION}=./text.txt', message='text.txt'),
    'validation by link': of_text(f'{VALIDATION}=link.txt', message='text.txt', link__txt='-> text.txt'),
    'validation copied': of_text(f'{VALIDATION}=copy.txt', message='copy.txt', copy__txt=LINES),
    'validation empty': of_text(f'{VALIDATION}=none.txt', message='data.validation_files', none__txt=''),
    'test of nothing': of_text('--config.data.test_files=no/*.txt', message="data.test_files: 'no/*.txt' matches no file"),
    'test of blanks': of_text('--config.data.test_files=none.txt', message='data.test_files', none__txt=''),
    'test of no gzip': of_text('--config.data.test_files=a.gz', message='a.gz is not gzipped', a__gz=LINES),
    'test alone': of_text(f'{FILES}=', '--config.data.test_files=text.txt', message="no document is in split 'train' of 1 text file(s) of the split test: name files"),
    'test of a mixture': Row([TINY, '--config.data.task=t0_train', '--config.data.test_files=x'], "data.test_files='x' is not for data.task='t0_train', which is a mixture"),
    'validation blank': of_text(f'{VALIDATION}=none.txt', message='no document is in {dir}/none.txt', none__txt='\n \n'),
    'fraction of nothing': of_text('--config.data.validation_fraction=0', message='data.validation_fraction=0'),
    'inputs of 1': of_text('--config.data.lengths.inputs=1', message='data.lengths.inputs=1'),
    'inputs of 2': of_text('--config.data.lengths.inputs=2', message='data.lengths.inputs=2'),
    'targets of 1': of_text('--config.data.lengths.targets=1', message='data.lengths.targets=1'),
    'sentinels': of_text(f'{VOCABULARY}=', '--config.data.num_pieces=40', '--config.data.extra_ids=0', message='extra_ids=0'),
    'few sentinels': of_text(f'{VOCABULARY}=', '--config.data.num_pieces=40', '--config.data.extra_ids=2', message='sentinels'),
    'pieces': of_text(f'{VOCABULARY}=', '--config.data.num_pieces=5', message='data.num_pieces=5'),
    'task': of_text('--config.data.task=glue', message="data.task='glue' is unknown: the nearest names are "),
    'objective': of_text('--config.data.task=ul2', message='data.lengths.targets=29: too short for the inputs; use 1'),
    'modes': of_text('--config.data.task=ul2', '--config.data.lengths.inputs=4', message='data.lengths.inputs=4 is too '),
    'concatenate': of_text('--config.data.concatenate=maybe', message="data.concatenate='maybe': must be one of"),
    'task for evaluation': of_text('--config.data.task=glue_ax_v002', message="data.files='text.txt' is not for"),
    'records of a mixture': of_text('--config.data.task=t0_train', message="data.files='text.txt' is not for data.task='t0_train', which is a mixture"),
    'no data set': Row([TINY, '--config.data.task=glue_sst2_v002', '--config.data.tfds_dir={dir}'], "data.tfds='glue/sst2:1.0.0': {dir}"),
    'no caches': of_text('--config.data.cache_dirs=nowhere', message="data.cache_dirs='nowhere'"),
    'caches in a file': of_text('--config.data.cache_dirs=text.txt', message="data.cache_dirs='text.txt'"),
    'no vocabulary': of_text(f'{VOCABULARY}=nowhere', message="data.vocabulary='nowhere'"),
    'vocabulary of text': of_text(f'{VOCABULARY}=text.txt', message='no SentencePiece model'),
    'folder without': of_text(f'{VOCABULARY}=sub', message="data.vocabulary='sub'", sub_in_x__txt='x'),
    'vocabulary address': of_text(f'{VOCABULARY}=http://host/x', message='http://host/x'),
    'vocabulary pointer': of_text(f'{VOCABULARY}=spiece.model', message='git lfs pull', spiece__model=LFS),
    'vocabulary too large': of_text('--config.model.vocab_size=128', message='too small for 359 pieces; use 384'),
    'step offset': of_text('--config.optimizer.step_offset=5', message='step_offset=5 lies after step 0, where the run starts: use 0'),
    'larger than memory': of_text('--config.model.mlp_dim=1048576', '--config.model.emb_dim=65536', message='a checkpoint takes'),
    'restore nothing': of_text('--config.restore.path=nowhere', message='nowhere'),
    'restore text': of_text('--config.restore.path=text.txt', message='text.txt'),
    'restore address': of_text('--config.restore.path=http://host/x', message='http://host/x'),
}  # fmt: skip


def of_cache(folder: str, message: str) -> Row:
    flags = ['--mode=cache', TINY, f'{FILES}=text.txt', f'{VOCABULARY}=bytes']
    return Row([*flags, f'--config.data.cache_dirs={folder}'], message, {'text.txt': LINES})


TABLES['caches'] = {
    'nowhere': of_cache('', 'name it with data.cache_dirs'),
    'no permission': of_cache('/proc/x', '/proc/x: No such file or directory: correct its name or permissions'),
    'file': of_cache('text.txt', '{dir}/text.txt/'),
    'long name': of_cache('x' * 300, 'data.cache_dirs: xxx'),
}  # fmt: skip


def of_conversion(source: str, message: str, target: str = 'out', **files: str) -> Row:
    named = {name.replace('__', '.').replace('_in_', '/'): text for name, text in files.items()}
    return Row(['--mode=convert', f'--from={source}', f'--to={target}'], message, named)


T5 = json.dumps({'model_type': 't5'})
TABLES['conversions'] = {
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
    'to where nobody may write': of_conversion(GOLDEN, '/proc/x/checkpoint_6: No such file or directory: ', target='/proc/x'),
    'to a long name': of_conversion(GOLDEN, 'File name too long: ', target=f'new/{"x" * 300}'),
    'to itself': of_conversion(GOLDEN, 'checkpoint_6', target=GOLDEN),
}  # fmt: skip


def test_a_long_message_keeps_its_two_ends():
    """Names and values in a file may have any length."""
    line = errors.one_line(ValueError(f'a.json has {"x" * 10**6}: correct it'))
    assert len(line) < 5000
    assert line.startswith('a.json has x') and line.endswith('x: correct it')


EVERY = [(table, name) for table, rows in TABLES.items() for name in rows]


@pytest.mark.parametrize('table, name', every_third_quick(EVERY))
def test_wrong_input(command_line, tmp_path, table, name):
    check(TABLES[table][name], command_line, tmp_path)


NAMES = ['mine.py', './mine.py', '../{here}/mine.py', '~/mine.py', 'my configs/ü.py', 'link.py']


@pytest.mark.parametrize('name', NAMES)
def test_a_config_by_every_name(command_line, tmp_path, name):
    """The file is found and read: the message is about its own number of steps."""
    text = CONFIG + '    config.train.steps = 0\n    return config\n'
    (tmp_path / 'my configs').mkdir()
    for file in ('mine.py', 'my configs/ü.py'):
        (tmp_path / file).write_text(text)
    (tmp_path / 'link.py').symlink_to('mine.py')
    flag = f'--config={name}'.replace('{here}', tmp_path.name)
    result = command_line(flag, cwd=tmp_path, HOME=str(tmp_path))
    assert result.status == 2 and result.stderr.startswith('main.py: train.steps=0: must be')


@pytest.mark.parametrize('name, reason', [
    ('missing', 'No such file or directory'),
    ('.', 'Is a directory'),
    ('binary', "can't decode"),
])  # fmt: skip
def test_a_flagfile_that_cannot_be_read(tmp_path, name, reason):
    (tmp_path / 'binary').write_bytes(b'\xff\xfe')
    command = [sys.executable, str(ROOT / 'main.py'), f'--flagfile={name}']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ''
    line, end = done.stderr.split('\n')
    assert line.startswith('main.py: --flagfile: ') and reason in line and end == ''
