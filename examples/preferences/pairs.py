"""Make up pairs of answers, and join their scores.

    python examples/preferences/pairs.py                   # writes answers.csv and pairs.jsonl
    python examples/preferences/pairs.py CHOSEN REJECTED   # writes scored.jsonl, from two files of --mode=infer --score

Half of the answers in answers.csv are short, half are long. In pairs.jsonl the short ones are chosen.
"""

import csv
import json
import random
import sys


def write_people(num_rows=1000):
    rng = random.Random(0)
    names = ['Ada', 'Bert', 'Cleo', 'Dora', 'Emil', 'Fay', 'Gus', 'Hana', 'Ivo', 'Jill']
    towns = ['Oslo', 'Rome', 'Lima', 'Cairo', 'Quito', 'Delhi', 'Paris', 'Tunis', 'Minsk', 'Perth']
    with open('answers.csv', 'w', newline='') as table, open('pairs.jsonl', 'w') as pairs:
        writer = csv.writer(table)
        writer.writerow(['question', 'context', 'answer'])
        for _ in range(num_rows):
            (name, other), (town, home) = rng.sample(names, 2), rng.sample(towns, 2)
            question = f'Where does {name} live?'
            context = f'{name} lives in {town}. {other} lives in {home}.'
            answers = [town, f'{name} lives in {town}, far away from {other}.']
            writer.writerow([question, context, rng.choice(answers)])
            pair = dict(zip(('chosen', 'rejected'), answers, strict=True))
            print(json.dumps({'prompt': f'{question}\n{context}', **pair}), file=pairs)


def join(chosen, rejected):
    """Write the records of two files of scores, which have the same order, with both scores."""
    with open(chosen) as first, open(rejected) as second, open('scored.jsonl', 'w') as scored:
        for lines in zip(first, second, strict=True):
            one, other = map(json.loads, lines)
            record = {name: one['inputs'][name] for name in ('prompt', 'chosen', 'rejected')}
            scores = {'chosen_score': one['score'], 'rejected_score': other['score']}
            print(json.dumps(record | scores), file=scored)


if __name__ == '__main__':
    join(*sys.argv[1:]) if sys.argv[1:] else write_people()
