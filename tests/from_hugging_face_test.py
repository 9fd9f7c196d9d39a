"""docs/from_hugging_face.md: the names of its tables exist in transformers and peft, and their numbers are equal here."""

import inspect
import pathlib
import re

import numpy as np
import pytest
from small_models import assert_refused

import infer

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs/from_hugging_face.md'
GOLDEN = ROOT / 'tests/golden/hf_t5_1_1'
INPUTS = [[5, 9, 200, 31, 1], [77, 4, 1]]
pytestmark = [pytest.mark.peers, pytest.mark.usefixtures('highest_precision')]


def import_or_skip(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[peers]'")


def names_in(heading):
    """The arguments in the left column of the table below a heading."""
    section = PAGE.read_text().split(f'\n## {heading}\n')[1].split('\n## ')[0]
    rows = [line.split('|')[1] for line in section.splitlines() if line.startswith('| ')]
    code = ' '.join(re.findall(r'`([^`]*)`', ' '.join(rows)))
    return set(re.findall(r'(?<![.\w(\'])[a-z][a-z0-9]*(?:_[a-z0-9]+)*(?![\w.(\']|_)', code))


@pytest.fixture(scope='module')
def models():
    """The same checkpoint in transformers and here."""
    transformers = import_or_skip('transformers')
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(GOLDEN)
    return theirs.eval(), infer.load(GOLDEN)


def generate(theirs, ids, **options):
    """The ids that transformers answers, without BOS, EOS and padding."""
    torch = import_or_skip('torch')
    rows = theirs.generate(torch.tensor([ids]), max_new_tokens=12, **options)
    return [[i for i in row if i > 1] for row in rows.tolist()]


def test_arguments_exist():
    transformers = import_or_skip('transformers')
    arguments = inspect.signature(transformers.Seq2SeqTrainingArguments).parameters
    values = {
        'adafactor',
        'adamw_torch',
        'group_by_length',
        'tensorboard',
        'early_stopping_patience',
    }
    named = names_in("Trainer's arguments") - values
    assert len(named) > 30
    assert named - {'compute_metrics'} <= set(arguments)
    trainer = inspect.signature(transformers.Seq2SeqTrainer).parameters
    assert 'compute_metrics' in trainer
    callback = inspect.signature(transformers.EarlyStoppingCallback).parameters
    assert 'early_stopping_patience' in callback
    config = set(vars(transformers.GenerationConfig()))
    config |= set(inspect.signature(transformers.GenerationMixin.generate).parameters)
    assert names_in('generate') - {'decoder_input_ids', 'generate'} <= config


def test_adapters_exist():
    peft = import_or_skip('peft')
    assert names_in('peft') >= {'r', 'lora_alpha'}
    arguments = inspect.signature(peft.LoraConfig).parameters
    assert {'r', 'lora_alpha', 'target_modules'} <= set(arguments)


def test_greedy_answers(models):
    theirs, t5 = models
    for ids in INPUTS:
        assert generate(theirs, ids) == t5.generate([ids], max_length=12)


def test_prompts(models):
    torch = import_or_skip('torch')
    theirs, t5 = models
    prompt = generate(theirs, INPUTS[0])[0][:2] or [7, 8]
    start = torch.tensor([[0, *prompt]])
    found = generate(theirs, INPUTS[0], decoder_input_ids=start)
    ours = t5.generate(INPUTS[:1], max_length=12 + len(prompt), prompts=[prompt])
    assert found == ours


def test_loss_of_labels(models):
    """transformers' loss of labels padded with -100 is the mean of -score over tokens."""
    torch = import_or_skip('torch')
    theirs, t5 = models
    labels = np.array([[9, 8, 7, 1], [5, 1, -100, -100]])
    inputs = np.array([[5, 9, 200, 31, 1], [77, 4, 1, 0, 0]])
    mask = torch.tensor(inputs > 0)
    with torch.no_grad():
        loss = theirs(torch.tensor(inputs), attention_mask=mask, labels=torch.tensor(labels)).loss
    scores = t5.score(inputs, np.where(labels == -100, 0, labels))
    np.testing.assert_allclose(-scores.sum() / (labels > 0).sum(), loss.item(), rtol=1e-5)
    assert_refused(lambda: t5.score(inputs, labels), '-100')
