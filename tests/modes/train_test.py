"""--profile writes a trace of the steps that it names."""

import gzip
import itertools
import json

import pytest
from runs import assert_same_run, small_config

from messages import Refused
from modes import train as train_mode
from prepare import prepare


def traced_steps(workdir):
    """Return the numbers of the train steps in each trace of a workdir, in the order of their names."""
    found = []
    for file in sorted(workdir.glob('profile/plugins/profile/*/perfetto_trace.json.gz')):
        events = json.loads(gzip.decompress(file.read_bytes()))['traceEvents']
        steps = [event['args']['step_num'] for event in events if event.get('name') == 'train']
        found.append(sorted(int(step) for step in steps))
    return found


@pytest.mark.slow
def test_steps_are_traced(corpus, uninterrupted, tmp_path, capsys):
    """Those that a run takes before it stops, and when it resumes. They are the steps of any run."""

    def train(text, num_steps=None):
        asked = itertools.count(1)
        run = prepare(small_config(corpus), tmp_path)
        train_mode.train_traced(
            run, train_mode.parse(text, 'run'), lambda: 2 * (next(asked) == num_steps)
        )
        return capsys.readouterr().out

    assert 'this run takes' not in train('2:4', num_steps=2)
    assert traced_steps(tmp_path) == [[2]]
    assert '--profile=1:2: this run takes the steps 3 to 6.' in train('1:2', num_steps=1)
    assert traced_steps(tmp_path) == [[2]]
    assert '--profile=2:5: this run takes the steps 4 to 6.' in train('2:5')
    assert sorted(traced_steps(tmp_path)) == [[2], [4, 5]]
    assert 'nothing to do' in train('2:5')
    assert_same_run(tmp_path, uninterrupted, 6)


def test_steps_of_the_flag():
    assert not train_mode.parse('', 'gs://bucket/run')
    assert list(train_mode.parse('10:13', 'run')) == [10, 11, 12, 13]
    for text in ('3', ':3', '3:', '0:2', '3:2', '-1:2', '1:2:3', 'a:b', '1.0:2', '1:²'):
        with pytest.raises(Refused, match=f'--profile={text}'):
            train_mode.parse(text, 'run')
