"""The options of an own model: on the command line, in --help, in a run and of its checkpoints."""

import json

import pytest
from command_line import ROOT
from small_models import OPTIONS

import infer
from modes import command_line as parser

CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from runs import small_config

def get_config(num='3'):
    config = small_config({corpus!r}, steps=1)
    config.model.update(module={own!r}, dropout_rate=0.0)
    config.model.options.num = int(num)
    config.eval.every_steps = 1
    config.save.every_steps = 1
    return config
"""
# A config that starts from another one.
VARIANT = """
import sys
sys.path.insert(0, {folder!r})
import mine

def get_config():
    config = mine.get_config()
    config.model.options.rate = 0.25
    return config
"""


# The words, the options and the other words.
@pytest.mark.parametrize('words, options, others', [
    (['--config.model.options.num=3'], {'num': '3'}, []),
    (['-config.model.options.rate=-1e-3', 'x'], {'rate': '-1e-3'}, ['x']),
    (['--config.model.options.text=a=b\n--c', '--step=3'], {'text': 'a=b\n--c'}, ['--step=3']),
    (['--config.model.options.text='], {'text': ''}, []),
    (['--config.model.options.a=1', '--config.model.options.b=2'], {'a': '1', 'b': '2'}, []),
    (['--config.model.remat=full'], {}, ['--config.model.remat=full']),
])  # fmt: skip
def test_options_are_taken_out(words, options, others):
    assert parser.take_options(['main.py', *words]) == ['main.py', *others]
    assert parser.OPTIONS == {f'model.options.{name}': x for name, x in options.items()}
    parser.take_options(['main.py'])
    assert parser.OPTIONS == {}


@pytest.fixture
def folder(tmp_path, corpus):
    """A config and its own model."""
    own = tmp_path / 'own.py'
    own.write_text(OPTIONS)
    names = {
        'corpus': corpus,
        'tests': str(ROOT / 'tests'),
        'own': str(own),
        'folder': str(tmp_path),
    }
    (tmp_path / 'mine.py').write_text(CONFIG.format(**names))
    (tmp_path / 'variant.py').write_text(VARIANT.format(**names))
    return tmp_path


LISTED = """  --config.model.options.num=2
      How many.
  --config.model.options.rate=0.5
  --config.model.options.gated=False
  --config.model.options.kind='a'
"""


@pytest.mark.parametrize('words', [
    ['--config.model.module=own.py'],
    pytest.param(['--config=variant.py'], marks=pytest.mark.slow),
    pytest.param(['--config', 'mine.py:4', '--config.model.options.num=5'], marks=pytest.mark.slow),
])  # fmt: skip
def test_help_lists_options(command_line, folder, words):
    plain = command_line('--help', cwd=folder).stdout
    assert 'Options of' not in plain
    result = command_line(*words, '--help', cwd=folder)
    assert result.status == 0 and result.stdout.startswith(plain.rstrip())
    assert LISTED in result.stdout


@pytest.mark.slow
def test_options_of_a_run(command_line, folder):
    def main(*words, status=0, message=''):
        result = command_line(*words, cwd=folder)
        assert result.status == status, result
        if status == 2:
            [line] = result.stderr.splitlines()
            assert message in line
        return result.stdout

    expected = {'num': 3, 'rate': -0.5, 'gated': True, 'kind': 'b=c', 'which': ['z'], 'widths': []}
    words = ['--config=mine.py', '--workdir=run', '-config.model.options.rate=-5e-1']
    words += ['--config.model.options.gated=True', '--config.model.options.kind=b=c']
    words += ["--config.model.options.which=('z',)"]
    main(*words)
    for file in ('run/config.json', 'run/checkpoint_1/config.json'):
        assert json.loads((folder / file).read_text())['model']['options'] == expected
    t5 = infer.load(folder / 'run')
    assert t5.config.options.which == ('z',)

    # The run resumes with these alone; one that its config.json lacks has its default.
    change = "model/options/kind: 'b=c' -> 'a'; model/options/rate: -0.5 -> 0.25"
    again = ['--config.model.options.gated=True', "--config.model.options.which='z',"]
    main('--config=variant.py', '--workdir=run', *again, status=2, message=change)
    main(*words, '--config.model.options.num=4', status=2, message='model/options/num: 3 -> 4')
    main(*words, '--config.model.options.widths=()', '--config.train.steps=2')

    # A checkpoint brings its options, and the command line may change them.
    (folder / 'in.jsonl').write_text('{"inputs": "aei", "targets": "lou"}\n')
    score = ['--mode=infer', '--input=in.jsonl', '--score', '--checkpoint']

    def score_of(*words):
        return json.loads(main(*score, *words))['score']

    expected_score = infer.load(folder / 'run').score(['aei'], ['lou'])[0]
    assert score_of('run') == pytest.approx(expected_score, rel=1e-5)
    assert score_of('run', '--config.model.options.num=3') == pytest.approx(
        expected_score, rel=1e-5
    )
    other_score = score_of('run', '--config.model.options.num=1')
    assert abs(other_score - expected_score) > 1e-3
    assert score_of('run', '--config=mine.py:1', *words[2:]) == pytest.approx(other_score, rel=1e-5)
    main(*score, 'run', '--config.model.options.num=9', status=2, message='num=9: use at most 8')
    main(*score, 'run', '--config.model.options.nun=3', status=2, message="nun='3' is unknown")
    main(*score, 'run', '--output_dir=out')
    main(
        *score,
        'run',
        '--output_dir=out',
        '--config.model.options.num=1',
        status=2,
        message='model/options/num: 3 -> 1',
    )

    # A conversion keeps them; a plan needs no checkpoint.
    main('--mode=convert', '--from=run', '--to=t5x')
    assert infer.load(folder / 't5x').config == infer.load(folder / 'run').config
    main('--mode=plan', '--config=variant.py', '--config.model.options.num=5')
