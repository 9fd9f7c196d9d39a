"""`--mode=report`: the cells of runs, finished or not; the text of users in them."""

import json
import re
import shutil

import pytest
from runs import damage_line

from formats import best
from messages import Refused
from modes import report
from run import results


def cells_of(lines):
    """Return {title of a row: its cells} of a table in Markdown, without padding and marks of code."""
    rows = {}
    for line in lines:
        title, *cells = re.split(r'(?<!\\) *\| *', line.replace('`', ''))[1:-1]
        assert title not in rows
        rows[title] = cells
    assert len({len(line) for line in lines}) == len({len(cells) for cells in rows.values()}) == 1
    return rows


def values_of(folder, name, tag):
    return {line['step']: line[tag] for line in best.read_metrics(folder) if line['run'] == name}


def test_one_run(uninterrupted, tmp_path, command_line):
    """Its settings that are not the default, and its numbers; nothing where it has none."""
    done = command_line('--mode=report', f'--runs={uninterrupted}', f'--output_dir={tmp_path}/new')
    assert done.status == 0, done.stderr
    assert (tmp_path / 'new/report.md').read_text() == done.stdout
    rows = cells_of(done.stdout.splitlines())
    assert rows[''] == [uninterrupted.name]
    assert rows['model.vocab_size'] == ['384'] and 'model.head_dim' in rows and 'seed' not in rows
    losses = values_of(uninterrupted, 'train', 'nats_per_token')
    assert rows['training loss, last'] == [f'{losses[6]:.3f} at 6']
    losses = values_of(uninterrupted, 'training_eval/span_corruption', 'nats_per_text_token')
    step = min(losses, key=losses.get)
    title = 'validation loss of span_corruption'
    assert rows[f'{title}, best'] == [f'{losses[step]:.3f} at {step}']
    assert rows[f'{title}, last'] == [f'{losses[6]:.3f} at 6']
    seconds = sum(values_of(uninterrupted, 'train', 'timing/seconds').values())
    assert rows['seconds of all steps'] == [f'{seconds:.1f}']
    assert float(rows['seconds a step, median'][0]) == pytest.approx(seconds / 6, rel=1)
    assert list(rows)[-1] == f'{title}, last'


def test_several_runs(uninterrupted, evaluated, tmp_path):
    """The settings that differ, metrics with T5's best steps, and the same examples in one row."""
    other = shutil.copytree(evaluated / 'run', tmp_path / 'b')
    file = other / 'inference_eval/qa-000006.jsonl'
    examples = [json.loads(line) for line in file.read_text().splitlines()]
    for step, f1, accuracy in ((1, 90.0, 10.0), (2, 60.0, 60.0), (3, 50.0, 20.0)):
        values = {'f1': f1, 'accuracy': accuracy}
        results.Results(other).write('glue_mrpc_v002', step, values, [], settings='hash')
    answer = 'a | b\n`c` \x1b[31m\ud800' + 'd' * 80
    changed = [{**examples[0], 'output': answer}, *examples[1:]]
    file.write_text('\n'.join(map(json.dumps, changed)))
    lines = report.write([str(evaluated / 'run'), str(uninterrupted), str(other)], str(tmp_path))
    rows = cells_of(lines)
    assert rows['data.task'] == ['"qa"', '"span_corruption"', '"qa"']
    assert not {'seed', 'model.vocab_size', 'train.steps'} & rows.keys()
    assert rows['MRPC (F1), best'] == ['', '', '60.000 at 2']
    assert rows['MRPC (accuracy), last'] == ['', '', '20.000 at 3']
    scores = results.Results(other).scores()['rank/accuracy']
    assert rows['rank/accuracy, last'] == [f'{scores[6]:.3f} at 6', '', f'{scores[6]:.3f} at 6']
    titles = [title for title in rows if title.startswith('qa: ')]
    assert len(titles) == 3 and titles[0] == 'qa: is 0 é? → yes'
    assert rows[titles[0]][1:] == ['', rf'a \| b c [31m {"d" * 45} …']
    assert rows[titles[1]][0] == rows[titles[1]][2]
    assert re.fullmatch(r'score -\d+\.\d+', rows['rank: is 0 é? → yes'][2])


def test_a_run_in_progress(uninterrupted, tmp_path):
    """A step that is there twice counts once, an unfinished line not at all."""
    run = shutil.copytree(uninterrupted, tmp_path / 'run')
    line = {'step': 7, 'run': 'train', 'corpus': 'files'}
    loads = {f'experts/load/{i}': i / 100 for i in range(12)}
    texts = [json.dumps({**line, 'nats_per_token': x, **loads}) for x in (9.0, 2.0)]
    with (run / 'metrics.jsonl').open('a') as file:
        file.write('\n'.join([*texts, '{"step": 8, "run": "train", "nats_per_t']))
    rows = cells_of(report.write([str(run)]))
    assert rows['training loss, last'] == ['2.000 at 7']
    titles = [title for title in rows if title.startswith('load')]
    assert titles == [f'load of expert {i}, last' for i in range(12)]
    assert rows['load of expert 11, last'] == ['0.110 at 7']
    (run / 'metrics.jsonl').write_text('')
    with pytest.raises(Refused, match=str(run)):
        report.write([str(run)])


def test_a_damaged_example_is_named(evaluated, tmp_path):
    run = shutil.copytree(evaluated / 'run', tmp_path / 'run')
    damage_line(run / 'inference_eval/rank-000006.jsonl', 2, '{"input": {')
    with pytest.raises(Refused, match='line 2 of .*/rank-000006.jsonl'):
        report.write([str(run)])
    assert not (run / 'report.md').exists()
