"""T0's tasks and mixtures: P3's data sets, each under several prompts.

A task is a data set under one prompt. Its examples are read from P3, where they are written out and
tokenized: copy the folders of the tasks from `data` in huggingface.co/datasets/bigscience/P3, and
name the folder that holds the copies with data.cache_dirs. t0_prompts.csv has the prompts of each
data set, as promptsource 7dab96a names them, in its order:

    original_task   whether the prompt asks for what the data set was made for
    num_choices     how many answers there are; 'vary' if an example has its own; '' for any text
    metrics         promptsource's names

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
from collections.abc import Collection, Iterable
from typing import NamedTuple

from sources import NO_SPLIT
from tasks import metrics
from tasks.mixtures import MetricFn, Mixture, PostprocessFn, Rate, Task, proportional
from tasks.postprocessors import string_label_to_class_id
from tasks.preprocessors import Fields

P3 = 'the folder data/{} of huggingface.co/datasets/bigscience/P3'
USERS_COPY = 'a cache that you make of it: it is not in P3, see tasks/promptsource.py'
PROMPTS_FILE = pathlib.Path(__file__).with_name('t0_prompts.csv')

MAX_EXAMPLES = 500_000  # of a data set, of all its prompts together
ANLI_ROUNDS = ('_r1', '_r2', '_r3')

# Data set: number of training examples.

T0 = {
    'adversarial_qa/dbert': 10_000,
    'adversarial_qa/dbidaf': 10_000,
    'adversarial_qa/droberta': 10_000,
    'ag_news': 120_000,
    'amazon_polarity': 3_600_000,
    'app_reviews': 288_065,
    'cnn_dailymail/3.0.0': 287_113,
    'common_gen': 67_389,
    'cos_e/v1.11': 9_741,
    'cosmos_qa': 25_262,
    'dbpedia_14': 560_000,
    'dream': 6_116,
    'duorc/ParaphraseRC': 69_524,
    'duorc/SelfRC': 60_721,
    'gigaword': 3_803_957,
    'glue/mrpc': 3_668,
    'glue/qqp': 363_846,
    'imdb': 25_000,
    'kilt_tasks/hotpotqa': 88_869,
    'multi_news': 44_972,
    'paws/labeled_final': 49_401,
    'qasc': 8_134,
    'quail': 10_246,
    'quarel': 1_941,
    'quartz': 2_696,
    'quoref': 19_399,
    'ropes': 10_924,
    'rotten_tomatoes': 8_530,
    'samsum': 14_732,
    'sciq': 11_679,
    'social_i_qa': 33_410,
    'trec': 5_452,
    'wiki_bio': 582_659,
    'wiki_hop/original': 43_738,
    'wiki_qa': 20_360,
    'wiqa': 29_808,
    'xsum': 204_045,
    'yelp_review_full': 650_000,
}
# T0+ has these besides, which GPT-3 is evaluated on.
T0_PLUS = {
    'ai2_arc/ARC-Challenge': 1_119,
    'ai2_arc/ARC-Easy': 2_251,
    'hellaswag': 39_905,
    'openbookqa/main': 4_957,
    'piqa': 16_113,
    'race/high': 62_445,
    'race/middle': 25_421,
    'squad_v2': 130_319,
    'trivia_qa/unfiltered': 87_622,
    'web_questions': 3_778,
}
# T0++ has these besides: SuperGLUE without CB and RTE.
T0_PLUS_PLUS = {
    'super_glue/boolq': 9_427,
    'super_glue/copa': 400,
    'super_glue/multirc': 27_243,
    'super_glue/record': 100_730,
    'super_glue/wic': 5_428,
    'super_glue/wsc.fixed': 554,
}

# What they are evaluated on.

EVALUATION = (
    'anli',
    'hellaswag',
    'story_cloze/2016',
    'super_glue/cb',
    'super_glue/copa',
    'super_glue/rte',
    'super_glue/wic',
    'super_glue/wsc.fixed',
    'winogrande/winogrande_xl',
)
# promptsource has no prompts for another one, jigsaw_toxicity_pred.
BIAS_AND_FAIRNESS = (
    'crows_pairs',
    'super_glue/axg',
    'wino_bias/type1_anti',
    'wino_bias/type1_pro',
    'wino_bias/type2_anti',
    'wino_bias/type2_pro',
)
NOT_IN_P3 = ('story_cloze/2016', *BIAS_AND_FAIRNESS)
# Training sets that no checkpoint was chosen by; wiki_hop could not be cached.
NOT_VALIDATED = (
    'adversarial_qa/dbert',
    'adversarial_qa/dbidaf',
    'amazon_polarity',
    'app_reviews',
    'dbpedia_14',
    'dream',
    'duorc/ParaphraseRC',
    'gigaword',
    'imdb',
    'multi_news',
    'paws/labeled_final',
    'samsum',
    'trec',
    'wiki_bio',
    'wiki_hop/original',
)


class Prompt(NamedTuple):
    """A row of t0_prompts.csv."""

    dataset: str
    name: str
    is_original_task: bool
    num_choices: str
    metrics: tuple[str, ...]

    @property
    def task_names(self) -> list[str]:
        """The names of its tasks: one, of ANLI one for each round."""
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
    """Return all tasks and mixtures."""
    found: list[Task | Mixture] = []
    for prompt in prompts():
        for name in prompt.task_names:
            found.append(text_task(prompt, name))
            if prompt.num_choices:
                found.append(score_task(prompt, name))
    return found + mixtures()


# Mixtures.


def mixtures() -> list[Task | Mixture]:
    """Return the mixtures of T0's paper."""
    training = prompts_of(T0)
    original = original_of(training)
    first_original = {prompt.dataset: prompt for prompt in reversed(original)}
    validated = [prompt for prompt in original if prompt.dataset not in NOT_VALIDATED]
    return [
        training_mixture('t0_train', training),
        training_mixture('t0+_train', prompts_of(T0 | T0_PLUS)),
        training_mixture('t0++_train', prompts_of(T0 | T0_PLUS | T0_PLUS_PLUS)),
        training_mixture('t0_train_one_og_prompt', first_original.values()),
        training_mixture('t0_train_all_og_prompts', original),
        score_mixture('t0_train_score_eval', validated),
        score_mixture('t0_eval_score_eval', original_of(prompts_of(EVALUATION))),
        score_mixture('bias_fairness_eval_score_eval', prompts_of(BIAS_AND_FAIRNESS)),
    ]


def prompts_of(datasets: Collection[str]) -> list[Prompt]:
    """Return the prompts of some data sets."""
    return [prompt for prompt in prompts() if prompt.dataset in datasets]


def original_of(members: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts that ask for what their data set was made for."""
    return [prompt for prompt in members if prompt.is_original_task]


def training_mixture(name: str, members: Iterable[Prompt]) -> Mixture:
    """Return a mixture of prompts, each with the rate of its data set."""
    sizes = T0 | T0_PLUS | T0_PLUS_PLUS
    num_prompts = collections.Counter(prompt.dataset for prompt in prompts())
    rates: dict[str | Task | Mixture, Rate] = {}
    for prompt in members:
        rate = sizes[prompt.dataset]
        if rate > MAX_EXAMPLES:  # its prompts share the limit; a smaller one counts whole for each
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
    if prompt.dataset in NOT_IN_P3 or (is_ranked and prompt.dataset not in EVALUATION):
        return USERS_COPY
    return P3.format(name)


def task_name(dataset: str, prompt: str) -> str:
    """Return the name of the task of a data set, as 'super_glue/rte', and a prompt."""
    return re.sub(r'[^\w.]+', '_', f'{dataset.replace("/", "_")}_{prompt}')


@functools.cache
def prompts() -> list[Prompt]:
    """Return the rows of t0_prompts.csv."""
    with PROMPTS_FILE.open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        is_original_task = row['original_task'] == 'yes'
        metric_names = tuple(row['metrics'].split(';'))
        found.append(
            Prompt(
                row['dataset'], row['prompt'], is_original_task, row['num_choices'], metric_names
            )
        )
    return found


# Postprocessors and metrics.


def stripped(text: str, example: Fields | None = None, is_target: bool = False) -> str:
    """Return a text without white space at its ends: some targets of P3 begin with it."""
    return text.strip()


def answer(text: str, example: Fields | None = None, is_target: bool = False) -> str | list[str]:
    """Return a stripped answer; for targets a list of it.

    Differs from T0, where SQuAD's metric takes each letter of the targets as an answer.
    """
    return [text.strip()] if is_target else text.strip()


def class_id(text: str, example: Fields, is_target: bool = False) -> int:
    """Return the number of a stripped answer among 'answer_choices' of the example, -1 for none."""
    return string_label_to_class_id(text.strip(), label_classes=example['answer_choices'])


def rank_classification(text: str, example: Fields, is_target: bool = False) -> object:
    """Return ((example, choice), is_correct, weight, number of target ids) of targets.

    An evaluation gives the number as 'num_target_tokens'; else it is that of the ids in 'targets',
    0 where these are a text. A score is returned as it is. Source: t5/data/postprocessors.py.
    """
    if not is_target:
        return text
    num_ids = 0 if isinstance(example['targets'], str) else len(example['targets'])
    num_ids = example.get('num_target_tokens', num_ids)
    index, choice = example['idx']
    is_correct = bool(example['is_correct'])
    return (int(index), int(choice)), is_correct, float(example.get('weight', 1.0)), num_ids


# promptsource's names of metrics. What it calls 'Other' T0 takes for accuracy.
METRICS: dict[str, MetricFn] = {
    'Accuracy': metrics.accuracy,
    'BLEU': metrics.bleu,
    'Other': metrics.accuracy,
    'ROUGE': metrics.rouge,
    'Spearman Correlation': metrics.spearman_corrcoef,
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

    Differs from T0, whose metrics of GLUE and SuperGLUE fail where the answer is no class, as does
    its correlation.
    """
    if prompt.num_classes and prompt.dataset in CLASS_METRICS:
        return list(CLASS_METRICS[prompt.dataset])
    found = []
    for name in prompt.metrics:
        if name == 'Spearman Correlation' and not prompt.num_classes:
            continue
        if METRICS[name] not in found:
            found.append(METRICS[name])
    return found
