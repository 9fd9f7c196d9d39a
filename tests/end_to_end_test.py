"""The program as its user meets it: it runs, stops, resumes, refuses, and leaves its files."""

import json
import re
import subprocess
import sys
import zlib

import corpora
import numpy as np
import own_task
import pytest
from runs import OPTIMIZED, ROOT, Program, assert_same_run, metrics_of, run, small_config, state_of
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import checkpoint
import loop
import sources.pydoc
import tasks
import tasks.open
import vocabulary as vocabularies
from messages import LossNotFinite, Refused
from modes import evaluate as evaluate_mode
from prepare import prepare
from run.train_vocabulary import find_or_train_vocabulary
from stream import Stream


def first_batch_crc(config, workdir):
    """Return the batch_crc32 of the first step in metrics.jsonl, when it is logged alone."""
    vocabulary = find_or_train_vocabulary(config.data, workdir, None, 384)
    mixture = tasks.open.open_mixture(config.data)
    batch = next(Stream(mixture, 'train', vocabulary, config.data, batch_size=4, seed=config.seed))
    crc = zlib.crc32(b''.join(x.tobytes() for x in batch.values()))
    return zlib.crc32(np.array([float(crc)]).tobytes())


def test_the_same_seed_twice_gives_the_same_bits(corpus, uninterrupted, tmp_path):
    config = small_config(corpus)
    assert_same_run(run(config, tmp_path), uninterrupted, 6)
    expected = metrics_of(uninterrupted)[0]['batch_crc32']
    assert first_batch_crc(config, uninterrupted) == expected
    config.seed = 1
    assert first_batch_crc(config, uninterrupted) != expected


def test_a_continued_run_is_the_uninterrupted_run(corpus, uninterrupted, tmp_path):
    """Stopped right after it saved step 3, and continued to 6."""
    config = small_config(corpus)
    stopped = prepare(config, tmp_path)

    def stop(run):
        raise KeyboardInterrupt

    stopped.hooks.append(loop.Hook(name='stop', is_due=lambda run: run.step == 3, call=stop))
    with pytest.raises(KeyboardInterrupt):
        loop.train(stopped)
    assert checkpoint.steps(tmp_path) == [3]
    run(config, tmp_path)
    assert_same_run(tmp_path, uninterrupted, 6)


@pytest.mark.slow
def test_another_mesh_goes_on_with_the_same_batches(corpus, tmp_path):
    """Three steps on eight devices, three on one, three on eight, against nine on one."""

    def on_eight(steps):
        config = small_config(corpus, steps, data_axis=2, model_axis=2)
        config.mesh.fsdp = 2
        config.model.update(remat='full', scan_layers=True)
        return config

    run(small_config(corpus, steps=9), tmp_path / 'expected')
    run(on_eight(steps=3), tmp_path / 'moved')
    run(small_config(corpus, steps=6), tmp_path / 'moved')
    run(on_eight(steps=9), tmp_path / 'moved')
    assert len(metrics_of(tmp_path / 'moved')) == 12
    for found, expected in zip(
        metrics_of(tmp_path / 'moved'), metrics_of(tmp_path / 'expected'), strict=True
    ):
        assert found.get('batch_crc32') == expected.get('batch_crc32')
        assert found['loss'] == pytest.approx(expected['loss'], rel=1e-5)


def short_corpus(folder):
    """Write 30 lines, a few batches. Return the file."""
    lines = [f'line {i} of a short text' + ' goes on' * (i % 7) for i in range(30)]
    (folder / 'short.txt').write_text('\n'.join(lines))
    return str(folder / 'short.txt')


EPOCHS = {'train.epochs': 2, 'data.vocabulary': 'bytes', 'log.every_steps': 2}


@pytest.mark.slow
def test_a_run_ends_after_its_epochs(tmp_path, capsys):
    """Every example is given as often as there are epochs, also where the run was stopped."""
    config = small_config(short_corpus(tmp_path), steps=100_000)
    config.update_from_flattened_dict(EPOCHS)
    run(config, tmp_path / 'run')
    lines = metrics_of(tmp_path / 'run')
    last = lines[-1]['step']
    assert last < 100 and lines[-1]['run'] == 'training_eval/span_corruption'
    assert checkpoint.steps(tmp_path / 'run')[-1] == last
    assert evaluate_mode.last_step(tmp_path / 'run') == last  # --watch ends here
    mixture = tasks.open.open_mixture(config.data)
    vocabulary = vocabularies.ByteVocabulary(100)
    stream = corpora.stream_of(
        mixture.tasks[0].source, 'train', vocabulary, config.data, 4, 0, num_epochs=2
    )
    assert len(list(stream)) == last
    examples = [line.get('data/span_corruption/examples') for line in lines]
    assert max(filter(None, examples)) == stream.counts[0, 0]

    stopped = prepare(config, tmp_path / 'stopped')
    steps = iter([0, 0, 2])
    assert loop.train(stopped, stop=lambda: next(steps)) == 2
    run(config, tmp_path / 'stopped')
    assert_same_run(tmp_path / 'stopped', tmp_path / 'run', last)
    capsys.readouterr()
    without_evaluation = ''.join(json.dumps(line) + '\n' for line in lines[:-1])
    (tmp_path / 'run' / 'metrics.jsonl').write_text(without_evaluation)  # a signal ended it
    run(config, tmp_path / 'run')
    text = capsys.readouterr().out
    assert 'train.epochs=2 ended at step' in text
    assert text.endswith('; a larger --config.train.epochs continues.\n')
    assert metrics_of(tmp_path / 'run') == lines


def test_epochs_of_a_mixture_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr('validation.UNIGRAM_TOKENS', 1000)
    (tmp_path / 'mine.py').write_text(
        'from tasks import Mixture, Task\n'
        f"a = Task('a', files={short_corpus(tmp_path)!r}, objective='span_corruption')\n"
        "b = Task('b', files=a.files, objective='span_corruption')\n"
        "c = Task('c', files=a.files, objective='span_corruption')\n"
        "d = Task('d', validation_files=a.files, train_split='none', objective='span_corruption')\n"
        "TASKS = [a, b, Mixture('both', {'a': 1, 'b': 1, c: 0, d: 1})]  # c and d are evaluated alone\n"
    )
    config = small_config('', steps=2)
    config.data.update(module=str(tmp_path / 'mine.py'), task='both', vocabulary='bytes')
    config.train.epochs = 1
    with pytest.raises(Refused, match='train.epochs=1'):
        prepare(config, tmp_path / 'run')
    config.train.epochs = 0
    run(config, tmp_path / 'run')
    [first, second, *evaluations] = metrics_of(tmp_path / 'run')
    assert second['data/a/examples'] + second['data/b/examples'] >= 8
    assert [x['run'] for x in evaluations] == [f'training_eval/{name}' for name in 'abcd']
    assert evaluations[2]['nats_per_text_token'] == evaluations[0]['nats_per_text_token']
    # Both tasks have the same text, and the baseline is that of the mixture.
    assert evaluations[0]['unigram_nats_per_text_token'] == pytest.approx(
        evaluations[1]['unigram_nats_per_text_token'], rel=0.2
    )


def test_trimmed_examples_are_counted_and_shown(tmp_path, capsys):
    rows = [{'q': f'{i}', 'a': 'long ' * (i % 4)} for i in range(1, 60) if i % 4]
    (tmp_path / 'qa.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    config = small_config(str(tmp_path / 'qa.jsonl'), steps=4)
    config.data.update(vocabulary='bytes', inputs='{q}', targets='{a}')
    run(config, tmp_path / 'run')
    line = metrics_of(tmp_path / 'run')[-2]
    trimmed = line['data/text_to_text/trimmed']
    examples = line['data/text_to_text/examples']
    assert 0 < trimmed < examples  # those above 9; lengths are 5, 10 and 15
    shown = f'{trimmed:,.0f} of {examples:,.0f} examples of text_to_text '
    assert shown in capsys.readouterr().out


def test_what_a_run_leaves(uninterrupted):
    names = 'checkpoint_3 checkpoint_6 config.json lock metrics.jsonl model-info.txt train'
    names += ' training_eval vocabulary.model'
    assert sorted(path.name for path in uninterrupted.iterdir()) == names.split()
    steps = [(line['run'], line['step']) for line in metrics_of(uninterrupted)]
    evaluation = 'training_eval/span_corruption'
    assert [step for name, step in steps if name == 'train'] == [1, 2, 3, 4, 5, 6]
    assert [step for name, step in steps if name == evaluation] == [3, 6]
    [file] = (uninterrupted / 'train').iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert {event.step for event in events} == {1, 2, 3, 4, 5, 6}
    tags = {value.tag for event in events for value in event.summary.value if event.step == 1}
    assert tags >= {
        'accuracy',
        'cross_ent_loss',
        'cross_ent_loss_per_all_target_tokens',
        'learning_rate',
        'learning_rate/current',
        'loss',
        'loss_per_all_target_tokens',
        'loss_per_nonpadding_target_token',
        'effective_batch_size/decoder',
        'effective_batch_size/encoder',
        'non_padding_fraction/decoder',
        'non_padding_fraction/encoder',
        'non_padding_fraction/loss_weights',
        'non_padding_fraction/overall',
        'timing/seconds',
        'timing/seqs',
        'timing/seqs_per_second_per_core',
        'timing/target_tokens_per_second_per_core',
        'timing/seqs_per_second',
        'timing/steps_per_second',
        'timing/target_tokens_per_second',
        'z_loss',
        'z_loss_per_all_target_tokens',
    }


def test_config_json_and_model_info(uninterrupted):
    """config.json has what resuming compares; model-info.txt lists the arrays as T5X does."""
    settings = json.loads((uninterrupted / 'config.json').read_text())
    assert settings['corpus'] == 'files'
    assert settings['model']['emb_dim'] == 16
    assert len(settings['data_fingerprint']) == 32
    assert len(settings['vocabulary_hash']) == 32
    assert settings['train']['num_microbatches'] == 1
    text = (uninterrupted / 'model-info.txt').read_text()
    arrays = state_of(uninterrupted, 6)
    total = sum(x.size for name, x in arrays.items() if name.startswith('target/'))
    assert f'\nTotal number of parameters: {total}\n\n' in text
    embedding = r'Variable token_embedder/embedding +size 6144 +shape \(384, 16\) +partition spec '
    assert re.search(embedding + r"\('model', 'fsdp'\)\n", text)
    assert re.search(r'Variable param_states/.*/v_row ', text)


def test_parameters_that_are_not_finite_are_named_as_such(corpus, uninterrupted, tmp_path):
    """No learning rate repairs a checkpoint that is restored."""
    tree = state_of(uninterrupted, 3)
    tree['target/encoder/encoder_norm/scale'] = np.full(16, np.nan, np.float32)
    checkpoint.save(tmp_path / 'broken', 3, tree)
    config = small_config(corpus)
    config.restore.path = str(tmp_path / 'broken')
    config.data.vocabulary = str(uninterrupted / 'vocabulary.model')
    with pytest.raises(LossNotFinite, match='restore.path') as stopped:
        run(config, tmp_path / 'run')
    assert 'learning_rate' not in str(stopped.value)


# The command line.


def main(*arguments):
    command = [sys.executable, 'main.py', *arguments]
    return subprocess.run(command, cwd=ROOT, env=OPTIMIZED, capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path):
    """configs/tiny.py, cut to a few steps, and fine-tuned."""
    steps = {'train.steps': 8, 'eval.every_steps': 8, 'save.every_steps': 8, 'log.every_steps': 4}
    command = ['--config=configs/tiny.py', f'--workdir={tmp_path}']
    command += [f'--config.{name}={value}' for name, value in steps.items()]
    first = main(*command)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert lines[0].startswith('T5 with 1,869,568 parameters in float32 on 1 cpu device')
    assert re.match(r'Compiled in \d+\.\d s\.$', lines[3])
    for step, line in zip((1, 4, 8), lines[4:], strict=False):
        assert re.match(rf'step {step}/8 loss \d+\.\d+( accuracy \d\.\d+)? lr ', line)
        assert re.search(r' [\d,]+ tokens/s \d+:\d\d:\d\d left(, data wait \d+%)?$', line)
    assert re.match(r'Step 8: validation loss \d+\.\d+ nats per text token', lines[-4])
    assert re.match(r'Time \d:\d\d:\d\d: ', lines[-3]) and 'compiling 0:' in lines[-3]
    assert str(tmp_path) in lines[-2]
    assert lines[-1].startswith('Next: ')
    assert checkpoint.steps(tmp_path) == [8]
    finetuned = main(
        '--config=configs/finetune_pydoc.py',
        f'--workdir={tmp_path}/finetuned',
        f'--config.restore.path={tmp_path}',
        '--config.train.steps=2',
        '--config.eval.every_steps=2',
        '--config.save.every_steps=2',
    )
    assert finetuned.returncode == 0, finetuned.stderr
    answer = f"python main.py --mode=infer --checkpoint={tmp_path}/finetuned --text='...' answers; "
    assert f'Next: {answer}' in finetuned.stdout


@pytest.mark.slow
def test_a_bad_line_that_training_comes_to_exits_1(command_line, tmp_path):
    """Found while training, not before. The steps before it are saved, and its remedy works."""
    own_task.write(tmp_path, num_rows=400)
    own_task.insert_bad_line(tmp_path / 'qa.jsonl', 300)
    program = Program(tmp_path, '', steps=100, log=100, save=100, evaluate=100)
    settings = ['vocabulary=bytes', 'pack=no', 'inputs={q}', 'targets={a}']
    settings += [f'files={tmp_path}/qa.jsonl', f'validation_files={tmp_path}/dev.jsonl']
    flags = [f'--config.data.{setting}' for setting in settings]
    result = command_line(*program.arguments(tmp_path / 'run'), *flags)
    assert result.status == 1, result.stderr
    [line] = result.stderr.splitlines()
    assert f'line 301 of {tmp_path}/qa.jsonl: ' in line
    [step] = checkpoint.steps(tmp_path / 'run')
    assert 0 < step < 100
    assert f'Step {step} is saved before the error' in result.stdout
    for name in ('run', 'skipped'):
        skip = '--config.data.on_bad_line=skip'
        result = command_line(*program.arguments(tmp_path / name), *flags, skip)
        assert result.status == 0, result.stderr
        assert f'Left out, 1 so far: line 301 of {tmp_path}/qa.jsonl: ' in result.stdout
    assert_same_run(tmp_path / 'run', tmp_path / 'skipped', 100)


@pytest.mark.slow
def test_c4_without_c4_says_so_everywhere(pydoc, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('validation.UNIGRAM_TOKENS', 1000)
    documents = corpora.documents_of(pydoc)[::10]  # the whole takes seconds to read
    monkeypatch.setattr(sources.pydoc, 'documents', lambda: documents)
    config = small_config('', steps=1)
    config.data.task = 'c4_v220_span_corruption'
    config.data.vocabulary = 'bytes'
    run(config, tmp_path)
    assert_not_c4(capsys.readouterr().out, tmp_path)


def assert_not_c4(printed, workdir):
    assert printed.startswith('!' * 80)
    assert 'THIS IS NOT C4' in printed
    settings = json.loads((workdir / 'config.json').read_text())
    assert settings['corpus'] == 'pydoc instead of C4'
    assert {line['corpus'] for line in metrics_of(workdir)} == {'pydoc instead of C4'}
