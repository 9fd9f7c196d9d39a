"""benchmarks/time_to_quality.py: the examples that both get, and the rival on a few words for seconds."""

import json

import pytest
from benchmark_scripts import assert_refuses

SCRIPT = 'time_to_quality.py'


@pytest.mark.long
@pytest.mark.slow
def test_examples(benchmark, tmp_path):
    benchmark.write_examples(tmp_path)
    words = json.loads((tmp_path / 'examples.json').read_text())
    assert len(words['test']) == 12297
    letters, pronunciations = words['train'][0]
    assert letters[-1] == 1 and all(x[-1] == 1 and 0 not in x for x in pronunciations)
    assert max(len(x) for _, some in words['test'] for x in some) <= 32
    assert benchmark.command(tmp_path / 'ours', tmp_path, 'float32', 30)[-2:] == [
        '--config.infer_eval.num_examples=4000',
        '--config.decode.beam_size=1',
    ]


def write_five_words(folder):
    """Write examples in which a word is answered by its own ids. How many are learned depends on the machine."""
    words = [[[*range(3, 3 + n), 1], [[*range(3, 3 + n), 1]]] for n in range(1, 6)] * 100
    (folder / 'examples.json').write_text(json.dumps({'train': words, 'test': words[:5]}))


@pytest.mark.peers
@pytest.mark.parametrize(
    'optimizer, schedule, dtype',
    [
        ('adafactor', 'constant', 'float32'),
        ('adafactor_scaled', 'linear', 'float32'),
        ('adamw_torch', 'linear', 'bfloat16'),
    ],
)
def test_the_rival(benchmark, tmp_path, monkeypatch, optimizer, schedule, dtype):
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    write_five_words(tmp_path)
    setting = benchmark.Setting(optimizer, 1e-3, schedule, 64, dtype)
    monkeypatch.setattr(benchmark, 'SPEED_SECONDS', 1)
    found = benchmark.run_theirs(tmp_path, setting, seconds=3, num_words=5, num_evaluations=2)
    first, last = found
    assert 0 < first.seconds < last.seconds
    assert first.loss == 0 < last.loss
    assert 2 * first.step == last.step
    assert {first.word_error, last.word_error} <= {0, 20, 40, 60, 80, 100}


@pytest.mark.peers
def test_the_rival_takes_as_many_steps_again(benchmark, tmp_path):
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    write_five_words(tmp_path)
    setting = benchmark.Setting('adamw_torch', 1e-3, 'linear', 64, 'float32')
    found = benchmark.run_theirs(
        tmp_path, setting, 1000, num_words=5, num_evaluations=2, num_steps=4
    )
    assert [x.step for x in found] == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    'ours, theirs, text',
    [
        # Ours is better at its end: what the rival's last one reaches, and the other way round.
        (
            [(100, 60.0), (200, 50.0), (300, 40.0)],
            [(250, 55.0), (600, 45.0)],
            '45.00 %: ours after 250 s, transformers after 600 s: 2.40 times',
        ),
        (
            [(375, 45.0)],
            [(200, 60.0), (600, 50.0), (900, 40.0)],
            '45.00 %: ours after 375 s, transformers after 750 s: 2.00 times',
        ),
        # Nothing learned.
        (
            [(10, 100.0), (20, 100.0)],
            [(5, 100.0), (9, 100.0)],
            '100.00 %: ours after 10 s, transformers after 5 s: 0.50 times',
        ),
    ],
)
def test_how_much_sooner(benchmark, ours, theirs, text):
    runs = [[benchmark.Evaluation(*x) for x in run] for run in (ours, theirs)]
    assert benchmark.sooner(*runs) == text


@pytest.mark.slow
def test_refuses():
    assert_refuses(SCRIPT, '--minutes=0', '--minutes')
