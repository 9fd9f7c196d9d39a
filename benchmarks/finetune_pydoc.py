"""What pretraining brings: finetune_pydoc.py from tiny.py's checkpoint against from scratch.

    python benchmarks/finetune_pydoc.py [--folder=runs/pretraining] [--seeds=3]

Pretrains configs/tiny.py once, then fine-tunes configs/finetune_pydoc.py with each seed, from that
checkpoint and from initial parameters, with the same vocabulary and the same batches. A run that is
finished in the folder is not repeated.

Prints, of the validation split: the loss in nats per text token of each start, the mean over the
seeds and the spread (the largest minus the smallest); ROUGE-L of both; ROUGE-L of two answers that
need no model: the first eight words of the input, and the constant text that is best on the
training summaries. Source of the comparison: Raffel et al. 2020 (T5) §3.2.4, Table 2 and §3.5.

The goal: the mean losses differ by more than two spreads.
"""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import main_runs
from absl import app, flags

import tasks
import tasks.open
from configs import finetune_pydoc
from tasks import metrics

ROOT = Path(__file__).resolve().parents[1]
FLAGS = flags.FLAGS
flags.DEFINE_string('folder', 'runs/pretraining', 'The folder of the runs.')
flags.DEFINE_integer('seeds', 3, 'Seeds of fine-tuning.')

TASK = 'pydoc_summary'
LOSS = 'nats_per_text_token'
NUM_WORDS = 8  # the answer that is the beginning of the input
NUM_SUMMARIES = 300  # the constant answer is chosen on these
NUM_FREQUENT_WORDS = 40  # its words are among these


def main(argv: list[str]) -> None:
    folder = Path(FLAGS.folder).resolve()
    pretrained = folder / 'tiny'
    run('tiny', pretrained, {})
    starts = {
        'from the pretrained checkpoint': str(pretrained),
        'from scratch': '',
    }
    for title, start in starts.items():
        losses = []
        scores = []
        for seed in range(FLAGS.seeds):
            workdir = folder / f'{"finetuned" if start else "scratch"}_{seed}'
            run(
                'finetune_pydoc',
                workdir,
                {
                    'seed': seed,
                    'restore.path': start,
                    'data.vocabulary': pretrained,
                    'infer_eval.every_steps': 1_000_000,  # the last step is always evaluated
                },
            )
            losses.append(main_runs.last_metrics(workdir, f'training_eval/{TASK}')[LOSS])
            scores.append(main_runs.last_metrics(workdir, f'inference_eval/{TASK}')['eval/rougeL'])
        print(f'{title:32} {LOSS} {describe(losses, 3)}   ROUGE-L {describe(scores, 1)}')
    report_baselines(workdir)


def run(config: str, workdir: Path, settings: Mapping[str, Any]) -> None:
    """Run a config to its end. A run that is finished says so, and is not repeated."""
    command = main_runs.command(f'{config}.py', workdir, settings)
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)


def describe(values: list[float], digits: int) -> str:
    """Return the mean and the spread of some values."""
    mean = sum(values) / len(values)
    spread = max(values) - min(values)
    return f'{mean:.{digits}f} (spread {spread:.{digits}f})'


def report_baselines(workdir: Path) -> None:
    """Print ROUGE-L of the answers that need no model."""
    config = finetune_pydoc.get_config()
    config.data.task = TASK
    source = tasks.open.open_mixture(config.data).tasks[0].source
    texts = {}
    for split in ('train', 'validation'):
        records = [record.fields for record in source.records(split)]
        texts[split] = list(tasks.get(TASK).preprocess(records))
    examples = texts['validation']
    targets = [example['targets'] for example in examples]
    first_words = []
    for example in examples:
        words = example['inputs'].removeprefix('summarize: ').split()
        first_words.append(' '.join(words[:NUM_WORDS]))
    print(f'first {NUM_WORDS} words of the input: ROUGE-L {rouge_l(targets, first_words):.1f}')
    summaries = [example['targets'] for example in texts['train']]
    constant = best_constant(random.Random(0).sample(summaries, NUM_SUMMARIES))
    score = rouge_l(targets, [constant] * len(targets))
    print(f'constant {constant!r}: ROUGE-L {score:.1f} ({len(targets)} examples)')


def best_constant(targets: list[str]) -> str:
    """Return a text with a high mean ROUGE-L: frequent words are appended while that helps."""
    counts = Counter(word for target in targets for word in target.lower().split())
    words = [word for word, _ in counts.most_common(NUM_FREQUENT_WORDS)]
    best = ''
    best_score = 0.0
    while True:
        longer = [f'{best} {word}'.strip() for word in words]
        scores = [rouge_l(targets, [text] * len(targets)) for text in longer]
        if max(scores) <= best_score:
            return best
        best_score = max(scores)
        best = longer[scores.index(best_score)]


def rouge_l(targets: list[str], predictions: list[str]) -> float:
    return metrics.rouge(targets, predictions, score_keys=['rougeL'])['rougeL']


if __name__ == '__main__':
    app.run(main)
