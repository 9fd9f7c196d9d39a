"""T0's tasks and mixtures: P3's data sets, each under several prompts.

A task is a data set under one prompt. Its examples are read from P3, where they are written out and
tokenized: copy the folders of the tasks from `data` in huggingface.co/datasets/bigscience/P3, and
name the folder that holds the copies with data.cache_dirs. t0_prompts.csv has the prompts of each
data set, as promptsource 7dab96a names them, in its order:

    original_task   whether the prompt asks for the task of the data set
    num_choices     how many answers there are; 'vary' if an example has its own; '' for any text
    metrics         promptsource's names

t0_datasets.csv has the data sets:

    train_size      number of training examples
    trained_by      the first model that is trained on it: T0, T0+ (adds GPT-3's evaluation data sets)
                    or T0++ (adds SuperGLUE without CB and RTE)
    evaluated_by    T0, or bias_fairness; promptsource has no prompts for one more, jigsaw_toxicity_pred
    in_p3           whether P3 has it
    validated       whether checkpoints were chosen by it; wiki_hop could not be cached

A prompt with choices has two tasks: NAME, whose targets are the right answer, and NAME_score_eval,
which has an example for each choice, to be ranked by its score. P3 has the latter for the data sets
that T0 is evaluated on; promptsource.py makes others. Story Cloze and bias_fairness are not in P3.

Source: Sanh et al. 2022; bigscience-workshop/t-zero 7a699e3, t0/seqio_tasks/tasks.py and
t0/datasets.csv. Imports no jax.
"""

import collections
import csv
import functools
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sources import NO_SPLIT
from tasks import metrics
from tasks.mixtures import MetricFn, Mixture, PostprocessFn, Rate, Task, proportional
from tasks.postprocessors import string_label_to_class_id, string_to_float
from tasks.preprocessors import Fields

P3 = 'the folder data/{} of huggingface.co/datasets/bigscience/P3'
USERS_COPY = 'a cache that you make of it: it is not in P3, see tasks/promptsource.py'
FOLDER = pathlib.Path(__file__).parent

MAX_EXAMPLES = 500_000  # a larger data set counts as this many, for all its prompts together
ANLI_ROUNDS = ('_r1', '_r2', '_r3')


class Prompt(NamedTuple):
    """A row of t0_prompts.csv."""

    dataset: str
    name: str
    is_original_task: bool
    num_choices: str
    metrics: tuple[str, ...]

    @property
    def task_names(self) -> list[str]:
        """The names of its tasks: one, but for ANLI one per round."""
        suffixes = ANLI_ROUNDS if self.dataset == 'anli' else ('',)
        return [task_name(self.dataset, self.name) + suffix for suffix in suffixes]

    @property
    def num_classes(self) -> int | None:
        """The number of choices, None unless all examples have the same ones."""
        if self.num_choices.isdecimal():
            return int(self.num_choices)
        return None


@functools.cache
def tasks() -> list[Task | Mixture]:
    rows: list[Task | Mixture] = []
    for prompt in prompts():
        for name in prompt.task_names:
            rows.append(text_task(prompt, name))
            if prompt.num_choices:
                rows.append(score_task(prompt, name))
    return rows + mixtures()


# Mixtures.


def mixtures() -> list[Task | Mixture]:
    """Return the mixtures of T0's paper."""
    training = trained_by('T0')
    original = [prompt for prompt in training if prompt.is_original_task]
    first_original = {prompt.dataset: prompt for prompt in reversed(original)}
    validated = [prompt for prompt in original if data_sets()[prompt.dataset]['validated'] == 'yes']
    evaluated = [prompt for prompt in evaluated_by('T0') if prompt.is_original_task]
    return [
        training_mixture('t0_train', training),
        training_mixture('t0+_train', trained_by('T0', 'T0+')),
        training_mixture('t0++_train', trained_by('T0', 'T0+', 'T0++')),
        training_mixture('t0_train_one_og_prompt', first_original.values()),
        training_mixture('t0_train_all_og_prompts', original),
        score_mixture('t0_train_score_eval', validated),
        score_mixture('t0_eval_score_eval', evaluated),
        score_mixture('bias_fairness_eval_score_eval', evaluated_by('bias_fairness')),
    ]


def trained_by(*models: str) -> list[Prompt]:
    """Return the prompts of the data sets that these models are the first to be trained on."""
    return [prompt for prompt in prompts() if data_sets()[prompt.dataset]['trained_by'] in models]


def evaluated_by(group: str) -> list[Prompt]:
    """Return the prompts of the data sets of an evaluation."""
    return [prompt for prompt in prompts() if data_sets()[prompt.dataset]['evaluated_by'] == group]


def training_mixture(name: str, members: Iterable[Prompt]) -> Mixture:
    """Return a mixture of prompts, each with the rate of its data set."""
    num_prompts = collections.Counter(prompt.dataset for prompt in prompts())
    rates: dict[str | Task | Mixture, Rate] = {}
    for prompt in members:
        rate = int(data_sets()[prompt.dataset]['train_size'])
        if rate > MAX_EXAMPLES:  # only the prompts of a larger data set share its rate
            rate = MAX_EXAMPLES // num_prompts[prompt.dataset]
        rates |= dict.fromkeys(prompt.task_names, rate)
    return Mixture(name, rates)


def score_mixture(name: str, members: Iterable[Prompt]) -> Mixture:
    """Return a mixture of the ranked tasks of the prompts that have choices."""
    rate = proportional(maximum=MAX_EXAMPLES)
    names = []
    for prompt in members:
        if prompt.num_choices:
            names += prompt.task_names
    return Mixture(name, {f'{task}_score_eval': rate for task in names})


# Tasks.


def text_task(prompt: Prompt, name: str) -> Task:
    """Return the task of a prompt whose targets are the right answer."""
    postprocess_fn: PostprocessFn = stripped
    if prompt.num_classes:
        postprocess_fn = class_id
    elif 'Squad' in prompt.metrics:
        postprocess_fn = answer
    return Task(
        name=name,
        cache=cache_of(prompt, name),
        validation_split='validation',
        objective='prompted_text_to_text',
        postprocess_fn=postprocess_fn,
        metric_fns=metrics_of(prompt),
    )


def score_task(prompt: Prompt, name: str) -> Task:
    """Return the task of a prompt that has an example for each choice."""
    metric = functools.partial(metrics.rank_classification, num_classes=prompt.num_classes)
    return Task(
        name=f'{name}_score_eval',
        cache=cache_of(prompt, f'{name}_score_eval'),
        train_split=NO_SPLIT,
        validation_split='validation',
        objective='prompted_text_to_text',
        postprocess_fn=rank_classification,
        metric_fns=[metric],
    )


def cache_of(prompt: Prompt, name: str) -> str:
    """Return where the cache of a task comes from."""
    is_ranked = name.endswith('_score_eval')
    data_set = data_sets().get(prompt.dataset)  # None for a user's templates
    if data_set is None or data_set['in_p3'] != 'yes':
        return USERS_COPY
    if is_ranked and data_set['evaluated_by'] != 'T0':
        return USERS_COPY
    return P3.format(name)


def task_name(dataset: str, prompt: str) -> str:
    """Return the name of the task of a data set, as 'super_glue/rte', and a prompt."""
    return re.sub(r'[^\w.]+', '_', f'{dataset.replace("/", "_")}_{prompt}')


@functools.cache
def prompts() -> list[Prompt]:
    """Return the rows of t0_prompts.csv."""
    prompts = []
    for row in rows_of('t0_prompts.csv'):
        prompt = Prompt(
            dataset=row['dataset'],
            name=row['prompt'],
            is_original_task=row['original_task'] == 'yes',
            num_choices=row['num_choices'],
            metrics=tuple(row['metrics'].split(';')),
        )
        prompts.append(prompt)
    return prompts


@functools.cache
def data_sets() -> dict[str, dict[str, str]]:
    """Return {name: row} of t0_datasets.csv."""
    return {row['dataset']: row for row in rows_of('t0_datasets.csv')}


def rows_of(name: str) -> list[dict[str, str]]:
    """Return the rows of a table next to this file."""
    with (FOLDER / name).open(encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


# Postprocessors and metrics.


def stripped(text: str, example: Fields | None = None, is_target: bool = False) -> str:
    """Strip a text: some targets of P3 begin with white space."""
    return text.strip()


def answer(text: str, example: Fields | None = None, is_target: bool = False) -> str | list[str]:
    """Return a stripped answer; for targets a list with it.

    Differs from T0, where SQuAD's metric takes each letter of the targets as an answer.
    """
    return [text.strip()] if is_target else text.strip()


def class_id(text: str, example: Fields, is_target: bool = False) -> int:
    """Return the number of a stripped answer among 'answer_choices' of the example, -1 for none."""
    return string_label_to_class_id(text.strip(), label_classes=example['answer_choices'])


def rank_classification(text: str, example: Fields, is_target: bool = False) -> object:
    """Return ((example, choice), is_correct, weight, number of target ids) of targets.

    An evaluation gives the number as 'num_target_tokens'; else it counts the ids in 'targets',
    0 if these are a text. A score is returned unchanged. Source: t5/data/postprocessors.py.
    """
    if not is_target:
        return text
    num_ids = 0 if isinstance(example['targets'], str) else len(example['targets'])
    num_ids = example.get('num_target_tokens', num_ids)
    index, choice = example['idx']
    is_correct = bool(example['is_correct'])
    return (int(index), int(choice)), is_correct, float(example.get('weight', 1.0)), num_ids


def spearman_corrcoef(
    targets: Sequence[str | int], predictions: Sequence[str | int]
) -> metrics.Values:
    """Return the correlation of ratings, classes or texts. Differs from T0, which fails for a text that is not a number: here it is -1."""
    target_numbers = [string_to_float(str(target)) for target in targets]
    predicted_numbers = [string_to_float(str(prediction)) for prediction in predictions]
    return metrics.spearman_corrcoef(target_numbers, predicted_numbers)


# promptsource's names of metrics. T0 uses accuracy for 'Other'.
METRICS: dict[str, MetricFn] = {
    'Accuracy': metrics.accuracy,
    'BLEU': metrics.bleu,
    'Other': metrics.accuracy,
    'ROUGE': metrics.rouge,
    'Spearman Correlation': spearman_corrcoef,
    'Squad': metrics.squad,
}
# T5's metrics of data sets of GLUE and SuperGLUE.
CLASS_METRICS: dict[str, tuple[MetricFn, ...]] = {
    'glue/mrpc': (metrics.f1_score_with_invalid, metrics.accuracy),
    'glue/qqp': (metrics.f1_score_with_invalid, metrics.accuracy),
    'super_glue/cb': (metrics.mean_multiclass_f1(num_classes=3), metrics.accuracy),
}


def metrics_of(prompt: Prompt) -> list[MetricFn]:
    """Return the metrics of the task whose targets are the right answer.

    Differs from T0, whose metrics of GLUE and SuperGLUE fail if the answer is not a class, and whose correlation
    fails for a review. T0 has no metric of SuperGLUE's axg.
    """
    if prompt.num_classes and prompt.dataset in CLASS_METRICS:
        return list(CLASS_METRICS[prompt.dataset])
    metric_fns = []
    for name in prompt.metrics:
        if name == 'Spearman Correlation' and prompt.name == 'generate_review':
            continue
        if METRICS[name] not in metric_fns:
            metric_fns.append(METRICS[name])
    return metric_fns
