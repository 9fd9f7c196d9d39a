"""Folders as runs leave them, for tests of the report: metrics, settings and results, no model."""

import json

from configs import base
from run import results


def answered(inputs='capital of France?', target='Paris', output='Paris', **others):
    """A line of the results of a task, whose postprocessors change nothing."""
    texts = {
        'inputs': [5, 6, 1],
        'inputs_pretokenized': inputs,
        'targets': [7, 1],
        'targets_pretokenized': target,
    }
    return {'input': texts, 'target': target, 'output': output, 'prediction': output, **others}


def scored(inputs, score):
    """The line of an example that was scored."""
    line = answered(inputs, score=score)
    del line['output'], line['prediction']
    return line


QA = answered()


def curve_line(step, corpus='made up', **others):
    """A line of metrics.jsonl about a step of training."""
    return {
        'step': step,
        'run': 'train',
        'corpus': corpus,
        'nats_per_token': 3 + 2 / step + step % 7 / 100,
        'accuracy': 0.1,
        'learning_rate/current': 0.01 / step,
        'weight_gradient_norm': 3.0,
        'batch_crc32': 123456789,
        'timing/steps_per_second': 2.0,
        'timing/tokens_per_second': 1000.0 + step,
        'timing/data_wait_fraction': 0.0,
        'data/made_up/examples': step,
        **others,
    }


def write_run(
    folder,
    num_steps,
    of_steps=None,
    first_step=0,
    changes=None,
    validation=None,
    corpus='made up',
    **others,
):
    """Write a run. Return its folder.

    `changes`: of nested settings; `validation`: {task: its losses, the last one of the last step};
    `others`: metrics of all lines.
    """
    folder.mkdir(parents=True)
    last = first_step + num_steps
    settings = json.loads(base.get_config().to_json())
    settings['train']['steps'] = of_steps or last
    for name, value in (changes or {}).items():
        if isinstance(value, dict):
            settings[name] |= value
        else:
            settings[name] = value
    settings |= {'corpus': corpus, 'data_fingerprint': 'f', 'vocabulary_hash': 'v'}
    (folder / 'config.json').write_text(json.dumps(settings))
    (folder / 'model-info.txt').write_text('Total number of parameters: 1234567\n\n')
    lines = []
    for step in range(first_step + 1, last + 1):
        lines.append(curve_line(step, corpus=corpus, **others))
    for task, losses in (validation or {}).items():
        for i, loss in enumerate(losses):
            line = {
                'step': last - len(losses) + 1 + i,
                'run': f'training_eval/{task}',
                'corpus': corpus,
                'nats_per_text_token': loss,
                'unigram_nats_per_text_token': 6.5,
            }
            lines.append(line)
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return folder


def write_results(folder, task, step, examples, **values):
    """Write the results of a task as an evaluation does."""
    kept = results.Results(folder)
    kept.write(task, step, values, examples, settings='hash')
    kept.write_table()


# Lines of files of a run that no run writes, and that no kill leaves.
METRICS = '"step": 2, "run": "train", "corpus": "c", "nats_per_token": '
DAMAGED_LINES = {
    'metrics.jsonl': [
        '{"step": 2, "ru',
        '[1]',
        'null',
        f'{{{METRICS}[1.0]}}',
        f'{{{METRICS}"3.1"}}',
        f'{{{METRICS}null}}',
        f'{{{METRICS}true}}',
        '{"run": "train", "corpus": "c"}',
        '{"step": 2.5, "run": "train", "corpus": "c"}',
        '{"step": 2, "run": 5, "corpus": "c"}',
        '{"step": 2, "run": "train", "corpus": null}',
        '\0' * 9,
        '[' * 100_000,
        '\udc89PNG',
    ],
    'inference_eval/qa-metrics.jsonl': [
        '{"step": 2, "f1": 5',
        '7',
        '{"step": 2, "f1": "5"}',
        '{"step": 2, "f1": {"a": 1}}',
        '{"step": "2", "f1": 5.0}',
        '{"f1": 5.0}',
        '\udcff',
    ],
}


def damage_line(file, number, text):
    """Replace a line of a file, the first one being 1, by `text`."""
    lines = file.read_bytes().splitlines(keepends=True)
    lines[number - 1] = text.encode(errors='surrogateescape') + b'\n'
    file.write_bytes(b''.join(lines))
