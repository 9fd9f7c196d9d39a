"""Values that a person types or copies and that are wrong: a row names the setting, flag or file that is refused.

All rows run in this process, through the command line and a mode, up to where its work would begin. A dozen commands
at the end prove the way from an error to the terminal.
"""

import importlib
import json
import math
import re
import shlex

import pytest
from command_line import ROOT
from permissions import another_user

import modes
from configs import base
from configs import check as settings
from configs.setting import LARGEST_FLOAT
from messages import Refused
from modes import command_line as parser
from modes import errors, processes

GOLDEN = ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6'
LINES = ''.join(f'the {x} of the lake and the {x} of the hill\n' for x in 'abcdefghij' * 20)
LFS = 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n'
CONFIG = 'from configs import base\n\ndef get_config():\n    config = base.get_config()\n    {}\n    return config\n'
DICT = 'import ml_collections as m\n\ndef get_config():\n    return m.ConfigDict({{"{}": 1}})\n'
OWN = """
import dataclasses
from messages import Refused

@dataclasses.dataclass(frozen=True)
class Options:
    num: int = 2
    rate: float = 0.5
    which: tuple = ('a',)

    def __post_init__(self):
        if not 1 <= self.num <= 8:
            raise Refused(f'model.options.num={self.num}: use 1 to 8')

def modules(family):
    return family
"""
OURS = json.dumps({'data_fingerprint': 'x', 'model': {}, 'train': {'steps': 1}})
HUGGING_FACE = json.dumps({'model_type': 't5', 'd_model': 8})
CHRONOS = (
    '{"model_type": "t5", "architectures": ["NAME"], "chronos_config": {"input_patch_size": 16}}'
)
# {name in the folder: content}; a name that ends with / is a folder, and '-> x' a link to x.
FILES = {
    'text.txt': LINES,
    'copy.txt': LINES,
    'link.txt': '-> text.txt',
    'none.txt': '',
    'blank.txt': '\n \n\n',
    'a bad line.jsonl': '{"text": "a line"}\n' * 9 + '{"text": "a line}\n',
    'pointer.txt': LFS,
    'loop_a.txt': '-> loop_b.txt',
    'loop_b.txt': '-> loop_a.txt',
    'dangling.txt': '-> nothing.txt',
    'sub/x.txt': LINES,
    'empty/': '',
    'no_function.py': 'x = 1\n',
    'dict.py': 'def get_config():\n    return {"a": 1}\n',
    'another.py': DICT.format('lr'),
    'half.py': DICT.format('seed'),
    'added.py': CONFIG.format('config.unlock(); config.train.momentum = 1'),
    'no_type.py': CONFIG.format('config.data.vocabulary = None'),
    'option.py': CONFIG.format('config.model.module = "own.py"; config.model.options.num = 9'),
    'own.py': OWN,
    'plain.py': 'def modules(family):\n    return family\n',
    'json/config.json': '{"a": 1}',
    'json_of_nothing/config.json': '',
    'json_folder/config.json/': '',
    'hf/config.json': HUGGING_FACE,
    'hf/model.safetensors': 'x',
    'hf_torch/config.json': HUGGING_FACE,
    'hf_torch/pytorch_model.bin': 'x',
    'bert/config.json': '{"model_type": "bert"}',
    'bert/model.safetensors': 'x',
    'chronos_bolt/config.json': CHRONOS.replace('NAME', 'ChronosBoltModelForForecasting'),
    'chronos_2/config.json': CHRONOS.replace('NAME', 'Chronos2Model'),
    'mesh_tf/model.ckpt-5.index': 'x',
    't5x/checkpoint': 'x',
    'metrics/metrics.jsonl': '{"mine": 1}\n',
    'locked/lock': 'mine',
    'lock_folder/lock/': '',
    'has_vocabulary/vocabulary.model': 'mine',
    'half_saved/checkpoint_5.tmp-backup/x': 'y',
    'run_link': '-> hf',
    'loop_a': '-> loop_b',
    'loop_b': '-> loop_a',
    'ours/config.json': OURS,
    'ours/lock/': '',
}
TINY = f'--config={ROOT}/configs/tiny.py '
TEXT = f'{TINY} --config.data.files=text.txt --config.data.vocabulary=bytes '
QA = f'{TEXT} --config.data.inputs={{question}} --config.data.targets={{answer}} '
OPTION = f'{TINY} --config.model.module=own.py '
CONVERT = '--mode=convert --to=out '
T5X = f"""{TEXT} --config.model.vocab_size=384 --config.model.emb_dim=32 --config.model.head_dim=8
    --config.model.mlp_dim=64 --config.restore.path={GOLDEN} """
BEST = (
    f'{TEXT} --config.save.best_is=lower --config.save.best_metric=training_eval/span_corruption/'
)
# The words of a command, and what its refusal names.
ROWS = [
    # Configs and settings.
    ('--config=gone.py', 'gone.py'),
    ('--config=own', '--config=own'),
    ('--config=', '--config='),
    ('--config=sub', '--config=sub'),
    ('--config=~/gone.py', 'gone.py'),
    (f'--config={"x" * 300}.py', 'xxx'),
    ('--workdir=x', '--mode=train needs --config'),
    ('--mode=plan --topology=cpu:8', '--mode=plan needs --config'),
    ('--mode=cache --shard=1/2', '--mode=cache needs --config'),
    ('--config=no_function.py', 'get_config'),
    ('--config=dict.py', 'get_config'),
    ('--config=another.py', 'lr'),
    ('--config=half.py', 'config'),
    ('--config=added.py', 'train.momentum'),
    ('--config=no_type.py', 'data.vocabulary'),
    (f'--config={ROOT}/configs/t5.py:huge', 't5.py:huge'),
    (f'--config={ROOT}/configs/tiny.py:foo', 'tiny.py:foo'),
    (f'{TINY} --config.train.stepz=3', 'stepz'),
    (f'{TINY} --config.trian.steps=3', 'trian'),
    (f'{TINY} --config.train=3', '--config.train'),
    (f'{TINY} --config.data.lengths=3', '--config.data.lengths'),
    (f'{TINY} --config.train.steps', 'train.steps'),
    (f'{TINY} --config.train.steps.x=3', 'train.steps.x'),
    ('--config.x=1', '--config.x'),
    ('--mode=convert --from=x --to=y --config.train.steps=1', '--config'),
    ('--mode=infer --checkpoint=x --config.decode.beam_size=two', 'decode.beam_size=two'),
    ('--mode=evaluate --checkpoint=x --watch=perhaps', '--watch=perhaps'),
    (f'{TINY} --config.train.steps=many', 'train.steps=many'),
    (f'{TINY} --config.train.steps=1.5', 'train.steps=1.5'),
    (f'{TINY} --config.train.steps=', 'train.steps'),
    (f'{TINY} "--config.seed=1\n2"', 'seed=1'),
    (f'{TINY} --config.model.dropout_rate=0,1', 'model.dropout_rate=0,1'),
    (f'{TINY} --config.restore.strict=maybe', 'restore.strict=maybe'),
    (f'{TINY} --config.save.best_is=lower', 'save.best_is'),
    (f'{TINY} --config.infer_eval.task=x', 'infer_eval.every_steps'),
    (f'{TINY} --config.optimizer.adamw.weight_decay=0.1', 'optimizer.name'),
    (f'{TINY} --config.restore.only=target/.*', 'restore.path'),
    (f'{TINY} --config.model.dtype=float64', 'model.dtype'),
    (f'{TINY} --config.save.dtype=int8', 'save.dtype'),
    (f'{TINY} --config.restore.dtype=int8', 'restore.dtype'),
    (f'{TINY} --config.restore.frozen_dtype=float16', 'restore.frozen_dtype'),
    (f'{TINY} --config.data.on_bad_line=ignore', 'data.on_bad_line'),
    (f'{TINY} --config.data.kind=xls', 'data.kind'),
    (f'{TINY} "--config.data.delimiter=; "', 'data.delimiter'),
    (f'{TINY} --config.data.concatenate=maybe', 'data.concatenate'),
    (f'{TINY} --config.data.text_field=', 'data.text_field'),
    # Flags.
    ('--confg=x', 'config'),
    ('"--con\nfg\n"', 'con fg'),
    (f'{TINY} {TINY}', '--config'),
    (f'{TINY} train', 'train'),
    (f'{TINY} --mode=trian', '--mode=trian'),
    ('--mode=convert --from=x --to=y --format=bin', '--format=bin'),
    (f'{TINY} --from=x', '--from'),
    (f'{TINY} --topology=cpu:8', '--topology'),
    ('--mode=convert --from=x --to=y --workdir=z', '--workdir'),
    ('--mode=report --runs=x --heartbeat=9', '--heartbeat'),
    (f'{TINY} --heartbeat=0', '--heartbeat=0'),
    ('--mode=convert --from=x', '--to'),
    ('--mode=convert --to=x', '--from'),
    (f'{TINY} --profile=13:10', '--profile'),
    (f'{TINY} --profile=1:99999999999999999999', '--profile'),
    (f'{TINY} --profile=1:2 --workdir=gs://bucket/run', '--profile'),
    ('--flagfile=gone', '--flagfile'),
    ('--flagfile=.', '--flagfile'),
    (f'{TINY} --num_processes=2', '--coordinator_address'),
    (f'{TINY} --coordinator_address=a:1 --num_processes=2 --process_id=2', '--process_id=2'),
    (f'{TINY} --coordinator_address=a:99999 --num_processes=2 --process_id=0', 'a:99999'),
    (f'{TINY} --coordinator_address=a --num_processes=2 --process_id=1', '--coordinator_address=a'),
    # Options of an own model.
    (f'{OPTION} --config.model.options.num=9', 'model.options.num=9'),
    (f'{OPTION} --config.model.options.nun=3', 'model.options.nun'),
    (f'{OPTION} --config.model.optoins.num=3', 'optoins'),
    (f'{OPTION} --config.model.options.num=-1', 'model.options.num=-1'),
    (f'{OPTION} --config.model.options.num 1', 'model.options.num'),
    (f'{OPTION} -config.model.options.num=2.5', 'model.options.num=2.5'),
    (f'{OPTION} --config.model.options.num=two', 'model.options.num'),
    (f'{OPTION} --config.model.options.num=', 'model.options.num'),
    (f'{OPTION} --noconfig.model.options.num', 'model.options.num'),
    (f'{OPTION} --config.model.options.rate=1e999', 'model.options.rate=inf'),
    (f'{OPTION} --config.model.options.which=a', 'model.options.which'),
    (f'{OPTION} --config.model.options.which=(3,[4])', 'model.options.which'),
    (f'{OPTION} --config.model.options.num=3 -config.model.options.num=4', 'model.options.num'),
    (f'{OPTION} --config.model.options.=3', 'model.options'),
    (f'{OPTION} --config.model.options=3', 'model.options'),
    (f'{TINY} --config.model.options.num=3', 'model.module'),
    (f'{TINY} --config.model.module=plain.py --config.model.options.num=3', 'plain.py'),
    (f'{TINY} --config.model.module=switch --config.model.options.num_experts=0', 'model.options.num_experts=0'),
    (f'{TINY} --config.model.module=switch --config.model.options.split_experts=data', 'model.options.split_experts'),
    (f'{TINY} --config.model.module=long_t5 --config.model.options.local_radius=0', 'model.options.local_radius=0'),
    (f'{TINY} --config.model.module=long_t5 --config.model.options.encoder_attention=x', 'encoder_attention'),
    (f'{TINY} --config.model.module=gone', 'model.module'),
    (f'{TINY} --config.model.module=no_function.py', 'no_function.py'),
    ('--config=option.py', 'model.options.num=9'),
    ('--mode=report --runs=x --config.model.options.num=3', '--config'),
    # The model, the optimizer and the mesh.
    (f'{TINY} --config.optimizer.name=sgd', 'optimizer.name'),
    (f'{TINY} --config.learning_rate.factors=constnt', 'constnt'),
    (f'{TINY} --config.learning_rate.factors=', 'learning_rate.factors'),
    (f'{TINY} --config.learning_rate.base_learning_rate=0.0', 'base_learning_rate=0.0: must be above 0'),
    (f'{TINY} --config.loss.loss_normalizing_factor=SUM', 'loss.loss_normalizing_factor'),
    (f'{TINY} --config.loss.loss_normalizing_factor=nan', 'loss.loss_normalizing_factor'),
    (f"""{TINY} "--config.model.mlp_activations=('tanh',)" """, 'model.mlp_activations'),
    (f'{TINY} "--config.model.mlp_activations=()"', 'model.mlp_activations'),
    (f'{TINY} --config.model.num_heads=5 --config.mesh.model=2', 'model.num_heads'),
    (f'{TINY} --config.model.module=switch --config.model.options.num_experts=3 --config.mesh.model=2', 'options.num_experts=3'),
    (f'{TINY} --config.mesh.data=16', 'mesh.data=16'),
    (f'{TINY} --config.mesh.data=-1 --config.mesh.model=-1', 'mesh.'),
    (f'{TINY} --config.train.num_microbatches=3', 'train.num_microbatches'),
    (f'{TINY} --config.train.num_microbatches=few', 'train.num_microbatches'),
    (f'{TINY} "--config.optimizer.trainable=("', 'optimizer.trainable'),
    (f'{TINY} --config.optimizer.trainable=decoder', 'optimizer.trainable'),
    (f'{TINY} --config.restore.frozen_dtype=bfloat16', 'restore.frozen_dtype'),
    (f'{TEXT} --config.train.early_stopping=2', 'train.early_stopping'),
    (f'{BEST}loss --config.save.best_is=', 'save.best_is'),
    (f'{BEST}loss --config.save.every_steps=3 --config.eval.every_steps=2', 'save.every_steps'),
    (f'{BEST}los', 'save.best_metric'),
    (f'{TEXT} --config.optimizer.step_offset=5', 'step_offset'),
    (f'{TEXT} --config.model.mlp_dim=1048576 --config.model.emb_dim=65536', 'runs/tiny'),
    # The workdir.
    *[(f'{TEXT} --workdir={name}', name) for name in (
        'json', 'json_of_nothing', 'json_folder', 'hf', 'mesh_tf', 't5x', 'metrics', 'locked', 'lock_folder',
        'has_vocabulary', 'half_saved', 'run_link', 'text.txt', 'text.txt/x', 'loop_a/x', 'ftp://bucket/x',
        'http://host/x', '~nobody-here/x', 'x' * 300, '/proc/run', 'ours',
    )],
    (f'{TEXT} --workdir=', 'path'),
    # Text, vocabularies and tasks.
    (f'{TEXT} --config.data.files=,,', 'data.files'),
    (f'{TEXT} --config.data.files=nowhere/*.txt', 'nowhere/*.txt'),
    (f'{TEXT} --config.data.files=text.txt,nowhere.txt', 'nowhere.txt'),
    (f'{TEXT} --config.data.files=sub', 'sub'),
    (f'{TEXT} --config.data.files=http://host/x.txt', 'http://host/x.txt'),
    (f'{TEXT} --config.data.files=~nobody-here/x.txt', '~nobody-here'),
    (f'{TEXT} --config.data.files=none.txt', 'none.txt'),
    (f'{TEXT} --config.data.files=blank.txt', 'blank.txt'),
    (f'{TEXT} --config.data.files=pointer.txt', 'pointer.txt'),
    (f'{TEXT} --config.data.files=loop_a.txt', 'loop_a.txt'),
    (f'{TEXT} --config.data.files=dangling.txt', 'dangling.txt'),
    (f'{TEXT} --config.data.files= --config.data.delimiter=tab', 'data.delimiter'),
    (f'{TEXT} --config.data.files= --config.data.kind=csv', 'data.kind'),
    (f'{TEXT} --config.data.validation_files=text.txt', 'text.txt'),
    (f'{TEXT} --config.data.validation_files=link.txt', 'text.txt'),
    (f'{TEXT} --config.data.validation_files=copy.txt', 'copy.txt'),
    (f'{TEXT} --config.data.validation_files=none.txt', 'data.validation_files'),
    (f'{TEXT} --config.data.validation_files=blank.txt', 'blank.txt'),
    (f'{TEXT} --config.data.files= --config.data.validation_files=text.txt', 'data.files'),
    (f'{TEXT} --config.data.validation_fraction=0', 'data.validation_fraction'),
    (f'{TEXT} --config.data.test_files=no/*.txt', 'data.test_files'),
    (f'{TEXT} --config.data.files= --config.data.test_files=text.txt', 'train'),
    (f'{TINY} --config.data.task=t0_train --config.data.test_files=x', 'data.test_files'),
    (f'{QA} --config.data.metrics=bleu,blue', 'blue'),
    (f'{QA} --config.data.metrics=bleu:zhh', 'zhh'),
    (f'{QA} --config.data.metrics=accuracy:zh', 'accuracy:zh'),
    (f'{TEXT} --config.data.inputs={{question}}', 'data.inputs'),
    (f'{TEXT} --config.data.weight={{w}}', 'data.weight'),
    (f'{QA} --config.data.weight=w', 'data.weight'),
    (f'{QA} --config.data.weight={{w}} --config.loss.loss_normalizing_factor=AVERAGE_PER_SEQUENCE', 'AVERAGE_PER'),
    (f'{QA} --config.data.references={{b}}', 'data.references'),
    (f'{TEXT} --config.data.inputs={{question}} --config.data.references=a', 'data.references'),
    *[(f'{QA} --config.data.targets={text}', 'data.targets') for text in ('yes', '{answer', '{}', '{answer:d}')],
    (f'{TEXT} --config.data.lengths.inputs=1', 'data.lengths.inputs=1'),
    (f'{TEXT} --config.data.lengths.targets=1', 'data.lengths.targets=1'),
    (f'{TEXT} --config.data.vocabulary= --config.data.num_pieces=40 --config.data.extra_ids=0', 'data.extra_ids'),
    (f'{TEXT} --config.data.vocabulary= --config.data.num_pieces=5', 'data.num_pieces'),
    (f'{TEXT} --config.data.vocabulary= "--config.data.files=a bad line.jsonl"', 'stop (skip leaves it out): line 10 of'),
    (f'{TEXT} --config.data.task=glue', 'data.task'),
    (f'{TEXT} --config.data.task=ul2', 'data.lengths.targets'),
    (f'{TEXT} --config.data.task=glue_ax_v002', 'data.files'),
    (f'{TEXT} --config.data.task=t0_train', 'data.files'),
    (f'{TINY} --config.data.task=glue_sst2_v002 --config.data.tfds_dir=.', 'data.tfds'),
    (f'{TEXT} --config.data.cache_dirs=nowhere', 'data.cache_dirs'),
    (f'{TEXT} --config.data.cache_dirs=text.txt', 'data.cache_dirs'),
    (f'{TEXT} --config.data.module=gone.py', 'data.module'),
    (f'{TEXT} --config.data.module=no_function.py', 'TASKS'),
    (f'{TEXT} --config.loss.module=gone.py', 'loss.module'),
    (f'{TEXT} --config.loss.module=no_function.py', 'weighted_sums'),
    (f'{TEXT} --config.loss.options.beta=1', 'loss.options.beta'),
    (f'{TEXT} --config.data.vocabulary=nowhere', 'data.vocabulary'),
    (f'{TEXT} --config.data.vocabulary=text.txt', 'text.txt'),
    (f'{TEXT} --config.data.vocabulary=empty', 'data.vocabulary'),
    (f'{TEXT} --config.data.vocabulary=http://host/x', 'http://host/x'),
    (f'{TEXT} --config.data.vocabulary=pointer.txt', 'pointer.txt'),
    (f'{TEXT} --config.model.vocab_size=128', 'model.vocab_size'),
    # Checkpoints.
    (f'{TEXT} --config.restore.path=nowhere', 'nowhere'),
    (f'{TEXT} --config.restore.path=text.txt', 'text.txt'),
    (f'{TEXT} --config.restore.path=http://host/x', 'http://host/x'),
    (f'{T5X} "--config.restore.only=("', 'restore.only'),
    (f'{T5X} --config.restore.only=encoder/.*', 'restore.only'),
    (f'{T5X} --config.train.steps=6', 'restore.path'),
    (f'{T5X} --config.data.vocabulary=', 'data.vocabulary'),
    (f'{T5X} --config.model.num_decoder_layers=1', 'decoder/layers_1'),
    (f'{T5X} --config.model.num_decoder_layers=3', 'decoder/layers_2'),
    (f'{CONVERT} --from=nowhere', 'nowhere'),
    (f'{CONVERT} --from=empty', 'empty'),
    (f'{CONVERT} --from=text.txt', 'text.txt'),
    (f'{CONVERT} --from=http://host/x', 'http://host/x'),
    (f'{CONVERT} --from=/', '/'),
    (f'{CONVERT} --from=loop_a', 'loop_a'),
    (f'{CONVERT} --from=json', 'json'),
    (f'{CONVERT} --from=hf_torch', 'model.safetensors'),
    (f'{CONVERT} --from=bert', 'bert'),
    (f'{CONVERT} --from=chronos_bolt', 'architectures=ChronosBoltModelForForecasting'),
    ('--mode=infer --checkpoint=chronos_2 --text=a', 'architectures=Chronos2Model'),
    *[(f'--mode=convert --from={GOLDEN} --to={name}', name) for name in (
        'text.txt', 'text.txt/x', 'gs://bucket/x', 'sub', '/proc/x', f'new/{"x" * 300}', str(GOLDEN),
    )],
    # Caches and answers.
    (f'{TEXT} --mode=cache', 'data.cache_dirs'),
    (f'{TEXT} --mode=cache --config.data.cache_dirs=/proc/x', '/proc/x'),
    (f'{TEXT} --mode=cache --config.data.cache_dirs=text.txt', 'text.txt'),
    (f'{TEXT} --mode=cache --config.data.cache_dirs=out --shard=3/2', '--shard=3/2'),
    ('--mode=infer --checkpoint=nowhere --text=a', 'nowhere'),
    (f'--mode=infer --checkpoint={GOLDEN} --text=a', 'data.vocabulary'),
    (f'--mode=infer --checkpoint={GOLDEN} --config.data.vocabulary=bytes --input=gone.txt', 'gone.txt'),
    ('--mode=evaluate --checkpoint=nowhere', 'nowhere'),
    ('--mode=report', '--runs'),
    ('--mode=report --runs=nowhere', 'nowhere'),
    ('--mode=report --runs=metrics', 'line 1 of'),
    ('--mode=report --runs=gs://bucket/run', 'gs://bucket/run'),
    ('--mode=tasks glue', 'glue'),
]  # fmt: skip


class Signals:
    """Ends a mode where its work would begin: nothing was refused."""

    is_silent = True
    number = 0

    def begin_work(self, can_wait=False):
        raise AssertionError('work begins')


def run(words):
    """Do what main.main does with a command, without what changes the process."""
    flags = parser.FLAGS
    for name in list(flags):  # of the row before
        if name.startswith('config.'):
            delattr(flags, name)
        else:
            flags[name].unparse()
    config = parser.parse(['main.py', *words])
    if flags.mode == 'train':
        processes.join(*[getattr(flags, name) for name in processes.FLAGS])
    importlib.import_module(f'.{flags.mode}', modes.__name__).main(config, flags, Signals())


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('refusals')
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith('/'):
            path.mkdir()
        elif content.startswith('-> '):
            path.symlink_to(content.removeprefix('-> '))
        else:
            path.write_text(content)
    before = contents(folder)
    yield folder
    after = contents(folder)
    assert {name: after[name] for name in before} == before
    assert {name.split('/')[0] for name in after.keys() - before.keys()} <= {'runs'}


def contents(folder):
    """Return every file with its content, without caches."""
    found = {}
    for path in folder.rglob('*'):
        if path.is_file() and '__pycache__' not in path.parts:
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@pytest.mark.parametrize('words, name', ROWS, ids=lambda text: ' '.join(text.split()[-2:])[:60])
def test_it_is_refused_in_one_line(folder, monkeypatch, words, name):
    monkeypatch.chdir(folder)
    with pytest.raises((Refused, OSError)) as error:
        run(shlex.split(words))
    line = errors.one_line(error.value)
    assert name in line and '\n' not in line


def out_of_range():
    """Return (setting, value) just outside of every range, and values that are no finite number."""
    found = []
    for key, setting in settings.declared().items():
        limits = setting.range
        if limits is not None:
            values = [limits.low - 1, *limits.without]
            if limits.high != LARGEST_FLOAT:
                values.append(limits.high + 1)
            if isinstance(setting.default, float):
                values += [math.nan, math.inf, -math.inf]
            found += [(key, type(setting.default)(value)) for value in values]
    return found


def test_numbers_have_ranges():
    """Each number has one, and no other setting; the defaults are valid."""
    for key, setting in settings.declared().items():
        assert (type(setting.default) in (int, float)) == (setting.range is not None), key
        settings.check_value(key, setting.default)
    for key, value in out_of_range():
        config = base.get_config()
        config.update_from_flattened_dict({key: value})
        with pytest.raises(Refused) as error:
            settings.check(config)
        assert str(error.value).startswith(f'{key}='), (key, value)


@pytest.mark.parametrize('value', ['4', 'many', 1.5, True, None, (1,)])
def test_neither_a_whole_number_nor_auto(value):
    with pytest.raises(Refused):
        settings.check_value('train.num_microbatches', value)


def test_a_config_that_may_not_be_read(open_path):
    file = open_path / 'mine.py'
    file.write_text(CONFIG)
    file.chmod(0)
    with another_user(), pytest.raises(OSError) as error:
        parser.parse(['main.py', f'--config={file}'])
    assert errors.one_line(error.value).startswith(f'{file}: Permission denied: ')


# Words of a command, what its last line names, and its status.
COMMANDS = [
    (f'{TINY} --config.train.steps=0', 'train.steps=0', 2),
    (f'{TINY} --config.train.stepz=3', 'stepz', 2),
    (
        f'{TINY} --config.model.module=grouped_heads --config.model.options.num_kv_heads=3',
        'model.options.num_kv_heads=3',
        2,
    ),
    ('--config=./steps.py', 'train.steps=0', 2),
    ('--config=../{here}/steps.py', 'train.steps=0', 2),
    ('--config=~/steps.py', 'train.steps=0', 2),
    ("'--config=my configs/ü.py'", 'train.steps=0', 2),
    ('--config=link.py', 'train.steps=0', 2),
    ('--flagfile=binary', '--flagfile', 2),
    (f'{TINY} --workdir=link.py', 'link.py', 2),
    (f'{TINY} --mode=plan --topology=v5e', '--topology=v5e', 2),
    (f'{TINY} --mode=plan --topology=cpu:99999999999', '--topology=cpu:99999999999', 2),
    (f'{TINY} --mode=plan --topology=cpu:8 --config.mesh.data=4', 'mesh.data', 2),
    ('--help --config=gone.py', 'gone.py', 2),
    ('--help --config.model.module=gone.py', 'model.module', 2),
    ('--config=raises.py', 'ZeroDivisionError', 1),
    ('--help --config=raises.py', 'ZeroDivisionError', 1),
]


@pytest.mark.parametrize('words, name, status', COMMANDS)
def test_on_the_terminal(command_line, tmp_path, words, name, status):
    """A value is one line, a mistake in a config a traceback; nothing is written."""
    (tmp_path / 'my configs').mkdir()
    for file in ('steps.py', 'my configs/ü.py'):
        (tmp_path / file).write_text(CONFIG.format('config.train.steps = 0'))
    (tmp_path / 'raises.py').write_text(CONFIG.format('1 / 0'))
    (tmp_path / 'link.py').symlink_to('steps.py')
    (tmp_path / 'binary').write_bytes(b'\xff\xfe')
    before = contents(tmp_path)
    words = shlex.split(words.replace('{here}', tmp_path.name))
    done = command_line(*words, cwd=tmp_path, HOME=str(tmp_path))
    lines = done.stderr.splitlines()
    assert done.status == status and name in lines[-1]
    if status == 2:
        assert len(lines) == 1 and lines[0].startswith('main.py: ')
    assert contents(tmp_path) == before


def test_help_lists_every_setting(command_line, tmp_path):
    done = command_line('--help', cwd=tmp_path)
    assert done.status == 0
    for key, _ in settings.leaves(base.get_config()):
        [line] = re.findall(rf'^  --config\.{re.escape(key)}=.+\n      (.+)$', done.stdout, re.M)
        assert line.strip()
    for words in ('--config=configs/NAME.py', '--workdir', '--mode'):
        assert words in done.stdout
