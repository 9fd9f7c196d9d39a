"""Data in the form that each recipe reads: TFDS data sets, caches as P3's, CSV, JSON Lines."""

import csv
import json
import pathlib

import data_sets
import numpy as np

import tasks
from sources import NO_SPLIT, tfrecord
from sources import cache as task_cache

GOLDEN = pathlib.Path(__file__).parent / 'golden'
NUM_RECORDS = 6  # in each split
QUESTIONS = [
    {'question': 'Where is Ada?', 'context': 'Ada is in Oslo, and\nBert, "the cook", in Rome.'},
    {'question': 'Who is the cook?', 'context': 'Ada is in Oslo, Bert the cook in Rome.'},
    {'question': 'Wo wohnt Jürgen?', 'context': 'Jürgen wohnt in Köln – am Rhein.'},
]
ANSWERS = ['Oslo', '', 'Köln']  # the second question counts as one without an answer


# TFDS.


def prepare_tfds(folder: pathlib.Path, names: list[str]) -> None:
    """Prepare the data sets of tasks, with the splits that these tasks read."""
    records = records_of_tasks()
    records_of_data_set: dict[str, list] = {}
    splits: dict[str, set] = {}
    for name in names:
        task = tasks.get(name)
        records_of_data_set[task.tfds] = records[name]
        of_task = {task.train_split or 'train', task.validation_split or 'validation'}
        splits.setdefault(task.tfds, set()).update(of_task - {NO_SPLIT})
    for data_set, of_tasks in records_of_data_set.items():
        some = [of_tasks[i % len(of_tasks)] for i in range(NUM_RECORDS)]
        records_of_split = dict.fromkeys(sorted(splits[data_set]), some)
        if records_of_split:  # some have the split test alone
            data_sets.prepare_data_set(folder, data_set, records_of_split)


def records_of_tasks() -> dict[str, list[dict]]:
    """Return {task: records as TFDS yields them}."""
    records: dict[str, list[dict]] = {}
    for line in (GOLDEN / 'tasks.jsonl').read_text().splitlines():
        case = json.loads(line)
        records.setdefault(case['task'], []).append(case['raw'])
    for i, label in enumerate([0.0, 2.5, 5.0]):  # a correlation needs several
        records['glue_stsb_v002'].append(records['glue_stsb_v002'][0] | {'label': label, 'idx': i})
    return records


# P3.


def write_p3(folder: pathlib.Path, names: list[str]) -> None:
    """Write a cache of each task, ids of bytes, as P3 has them: inputs without EOS."""
    for name in names:
        task = tasks.get(name)
        is_ranked = name.endswith('_score_eval')
        [metric, *_] = task.metric_fns
        num_choices = getattr(metric, 'keywords', {}).get('num_classes') or 2
        choices = ['yes', 'no', 'perhaps', 'never'][:num_choices]
        examples = []
        for i in range(2):
            example = p3_example(f'Is {name} number {i} right?', '\n' + choices[i], choices)
            if not is_ranked:
                examples.append(example)
                continue
            for j, choice in enumerate(choices):
                ranked = p3_example(f'Is {name} number {i} right?', choice, choices)
                del ranked['answer_choices']
                ranked['idx'] = np.array([i, j], np.int32)
                ranked['is_correct'] = i == j
                ranked['weight'] = 1.0
                examples.append(ranked)
        for split in ('validation',) if is_ranked else ('train', 'validation'):
            write_split(folder / name, split, examples)
        (folder / name / 'COMPLETED').touch()


def p3_example(inputs: str, targets: str, choices: list[str]) -> dict:
    return {
        'inputs': np.array(list(inputs.encode()), np.int32) + 3,
        'inputs_pretokenized': inputs,
        'targets': np.array([*(x + 3 for x in targets.encode()), 1], np.int32),
        'targets_pretokenized': targets,
        'answer_choices': choices,
    }


def write_split(folder: pathlib.Path, split: str, examples: list[dict]) -> None:
    """Write a split of a cache of SeqIO, in one shard."""
    features = {name: info_of(value) for name, value in examples[0].items()}
    info = {'features': features, 'num_shards': 1, 'seqio_version': '0.0.20'}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f'info.{split}.json').write_text(json.dumps(info))
    with (folder / f'{split}.tfrecord-00000-of-00001').open('wb') as file:
        for example in examples:
            tfrecord.write_record(file, task_cache.encode(example))


def info_of(value) -> dict:
    if isinstance(value, np.ndarray):
        return {'dtype': 'int32', 'shape': [None]}
    if isinstance(value, list):
        return {'dtype': 'string', 'shape': [None]}
    dtypes = {str: 'string', bool: 'bool', float: 'float32'}
    return {'dtype': dtypes[type(value)], 'shape': []}


# Files.


def write_questions(file: pathlib.Path, num_rows: int = 12, answers=tuple(ANSWERS)) -> None:
    """Write a CSV of questions; quoted fields hold commas, quotes and newlines."""
    with file.open('w', newline='') as stream:
        writer = csv.writer(stream)
        writer.writerow(['question', 'context', 'answer'])
        for i in range(num_rows):
            row = QUESTIONS[i % 3]
            writer.writerow([row['question'], row['context'], answers[i % 3]])


def write_json_lines(file: pathlib.Path, rows: list[dict]) -> None:
    file.write_text('\n'.join(json.dumps(row) for row in rows))
