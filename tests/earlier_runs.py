"""Runs that an earlier commit began continue with a later one: the same batches, the same losses.

    git worktree add ../earlier COMMIT
    (cd ../earlier && python tests/earlier_runs.py begin FOLDER)   # several minutes
    python tests/earlier_runs.py go_on FOLDER

`begin` makes runs of four kinds and a task cache, and what they come to when they are not stopped.
`go_on` prints the largest difference of the losses; another batch is an error.
"""

import json
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
STOP, END = 4, 8
COMMON = {
    'log.every_steps': 1,
    'save.every_steps': 100,
    'eval.every_steps': END,
    'train.epochs': 0,
    'train.relative_steps': 0,
}


def kinds(folder):
    """Return {name: (config file, settings)} of the runs; each may start from those before it."""
    questions = {'data.files': folder / 'qa.csv', 'data.validation_fraction': 0.2}
    base = {'restore.path': folder / 'tiny-to-the-end'}
    lora = {'model.lora_rank': 4, 'optimizer.multiply_by_parameter_scale': False}
    documents = {'data.files': folder / 'text.txt', 'data.vocabulary': 'bytes'}
    cached = {'data.task': 'qa', 'data.cache_dirs': folder / 'caches'}
    return {
        'tiny': ('tiny.py', {'data.files': folder / 'text.txt', 'data.num_pieces': 500}),
        'ul2': ('tiny.py', {'data.task': 'ul2', 'data.lengths.targets': 123, **documents}),
        'lora': ('qa_csv.py:tiny', {**questions, **base, **lora}),
        'packed_csv': ('qa_csv.py:tiny', {'data.pack': 'tightly', **questions, **base}),
        'cached': ('tiny.py', {'data.vocabulary': folder / 'caches/qa', **cached}),
    }


def write_files(folder):
    lines = []
    rows = ['question,context,answer']
    for i in range(400):
        lines.append(' '.join(f'word{i * j % 97}' for j in range(3, 30 + i % 40)))
        rows.append(f'what is {i}?,"it is {i * 7 % 11}, and more",{i * 7 % 11}')
    (folder / 'text.txt').write_text('\n'.join(lines))
    (folder / 'qa.csv').write_text('\n'.join(rows))


def main(*flags):
    command = [sys.executable, 'main.py', *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f'{" ".join(command)}\n{done.stderr}')


def train(folder, name, workdir, steps):
    config, settings = kinds(folder)[name]
    flags = [f'--config=configs/{config}', f'--workdir={folder / workdir}']
    for key, value in {**COMMON, **settings, 'train.steps': steps}.items():
        flags.append(f'--config.{key}={value}')
    main(*flags)


def begin(folder):
    folder.mkdir(parents=True)
    write_files(folder)
    for name in kinds(folder):
        if name == 'cached':
            main(
                '--mode=cache',
                '--config=configs/tiny.py',
                '--config.data.task=qa',
                f'--config.data.files={folder}/qa.csv',
                '--config.data.inputs={question}',
                '--config.data.targets={answer}',
                f'--config.data.vocabulary={folder}/tiny-to-the-end',
                f'--config.data.cache_dirs={folder}/caches',
            )
        train(folder, name, f'{name}-to-the-end', END)
        train(folder, name, name, STOP)
        print(f'{name}: begun')


def steps_of(workdir):
    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').open()]
    return [line for line in lines if line['run'] == 'train']


def go_on(folder):
    for name in kinds(folder):
        copy = folder / f'{name}-continued'
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder / name, copy)
        train(folder, name, copy.name, END)
        found = steps_of(copy)
        expected = steps_of(folder / f'{name}-to-the-end')
        assert len(found) == len(expected) == END, name
        difference = 0.0
        for step, expected_step in zip(found, expected, strict=True):
            assert step['batch_crc32'] == expected_step['batch_crc32'], (name, step['step'])
            loss = expected_step['loss']
            difference = max(difference, abs(step['loss'] - loss) / abs(loss))
        print(f'{name}: the same batches; the losses differ by at most {difference:.1e}')


if __name__ == '__main__':
    {'begin': begin, 'go_on': go_on}[sys.argv[1]](pathlib.Path(sys.argv[2]).resolve())
