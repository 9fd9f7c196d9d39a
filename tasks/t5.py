"""Every task and mixture of T5 by name, except one for decoder-only models.

    python main.py --mode=tasks                              lists them
    python main.py --mode=tasks glue_v002_proportional       prints a mixture: its tasks, rates and sources
    python main.py --mode=tasks glue_cola_v002 --examples=3  prints examples as text and as ids

A task says where its records come from, how each becomes texts, and how answers are scored: to add
one, add a row to a group. A data set is TFDS's NAME/CONFIG:VERSION. tasks/names.py looks names up.
Source of the tables: t5/data/{tasks,mixtures,glue_utils}.py and google-research,
t5_closed_book_qa/t5_cbqa/tasks.py. Imports no jax.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from sources import NO_SPLIT
from tasks import metrics, postprocessors, preprocessors
from tasks import mt5 as tasks_mt5
from tasks import t0 as tasks_t0
from tasks.mixtures import (
    ALL_SPLITS,
    NO_TEST,
    NO_TRAIN,
    ONLY_TEST,
    ONLY_TRAIN,
    MetricFn,
    Mixture,
    PostprocessFn,
    PreprocessFn,
    Rate,
    Splits,
    Task,
    proportional,
    supervised,
)
from tasks.preprocessors import Fields

# Documents. T5 configures the objective of the *_unsupervised tasks in gin; here it belongs to the
# settings data.noise_density and data.mean_noise_span_length.


def documents(name: str, tfds: str, objective: str = 'span_corruption') -> Task:
    return Task(name, tfds=tfds, objective=objective)


# Text to text. Rows have T5's splits: the data set's, or slices of them.


# GLUE and SuperGLUE. Inputs are 'PREFIX FIELD: text FIELD: text', targets the name of a class.

ACCURACY = [metrics.accuracy]
F1 = [metrics.f1_score_with_invalid, metrics.accuracy]
NO_METRICS: list[MetricFn] = []


def glue(
    name: str,
    fields: Sequence[str],
    classes: Sequence[str],
    metric_fns: Sequence[MetricFn] = ACCURACY,
    splits: Splits = ALL_SPLITS,
    prefix: str = '',
    task: str = 'glue_{}_v002',
    tfds: str = 'glue/{}:1.0.0',
) -> Task:
    """Return a row of GLUE. `prefix`: of the inputs, '' for the name."""
    return supervised(
        task.format(name),
        tfds.format(name),
        functools.partial(
            preprocessors.glue,
            benchmark_name=prefix or name,
            label_names=classes,
            feature_names=fields,
        ),
        metric_fns,
        functools.partial(postprocessors.string_label_to_class_id, label_classes=classes),
        splits,
    )


super_glue = functools.partial(glue, task='super_glue_{}_v102', tfds='super_glue/{}:1.0.2')

SENTENCES = ['sentence1', 'sentence2']
PREMISE = ['hypothesis', 'premise']  # in this order
NLI = ['entailment', 'neutral', 'contradiction']
ENTAILMENT = ['entailment', 'not_entailment']
BOOLEAN = ['False', 'True']
CHOICES = ['choice1', 'choice2']


def glue_tasks() -> list[Task]:
    return [
        glue('cola', ['sentence'], ['unacceptable', 'acceptable'], [metrics.matthews_corrcoef]),
        glue('sst2', ['sentence'], ['negative', 'positive']),
        glue('mrpc', SENTENCES, ['not_equivalent', 'equivalent'], F1),
        glue('qqp', ['question1', 'question2'], ['not_duplicate', 'duplicate'], F1),
        supervised(
            'glue_stsb_v002',
            'glue/stsb:1.0.0',
            preprocessors.stsb,
            [metrics.pearson_corrcoef, metrics.spearman_corrcoef],
            postprocessors.string_to_float,
        ),
        # The evaluation splits of MNLI are the next two tasks.
        glue('mnli', PREMISE, NLI, splits=ONLY_TRAIN),
        glue('mnli_matched', PREMISE, NLI, splits=NO_TRAIN, prefix='mnli'),
        glue('mnli_mismatched', PREMISE, NLI, splits=NO_TRAIN, prefix='mnli'),
        glue('qnli', ['question', 'sentence'], ENTAILMENT),
        glue('rte', SENTENCES, ENTAILMENT),
        glue('wnli', SENTENCES, ['not_entailment', 'entailment']),
        glue('ax', PREMISE, NLI, NO_METRICS, ONLY_TEST, prefix='mnli'),
    ]


def super_glue_tasks() -> list[Task]:
    return [
        super_glue('boolq', ['passage', 'question'], BOOLEAN),
        super_glue(
            'cb',
            PREMISE,
            ['entailment', 'contradiction', 'neutral'],
            [metrics.mean_multiclass_f1(num_classes=3), metrics.accuracy],
        ),
        super_glue('copa', [*CHOICES, 'premise', 'question'], CHOICES),
        supervised(
            'super_glue_multirc_v102',
            'super_glue/multirc:1.0.2',
            preprocessors.multirc,
            [metrics.multirc_f1_over_all_answers, metrics.mean_group_metric(metrics.all_match)],
            postprocessors.multirc,
        ),
        supervised(
            'super_glue_record_v102',
            'super_glue/record:1.0.2',
            preprocessors.record,
            [metrics.deduplicate_metric(metrics.squad)],
            postprocessors.record,
        ),
        super_glue('rte', PREMISE, ENTAILMENT),
        super_glue('wic', [*SENTENCES, 'word'], BOOLEAN),
        supervised(
            'super_glue_axb_v102',
            'super_glue/axb:1.0.2',
            functools.partial(preprocessors.axb, label_names=ENTAILMENT),
            NO_METRICS,
            functools.partial(postprocessors.string_label_to_class_id, label_classes=ENTAILMENT),
            ONLY_TEST,
        ),
        super_glue('axg', PREMISE, ENTAILMENT, NO_METRICS, ONLY_TEST, prefix='rte'),
    ]


def winograd_tasks() -> list[Task]:
    return [
        supervised(
            'dpr_v001_simple',
            'definite_pronoun_resolution:1.1.0',
            preprocessors.definite_pronoun_resolution_simple,
            [metrics.accuracy],
            splits=Splits(validation=NO_SPLIT),
        ),
        supervised(
            'super_glue_wsc_v102_simple_train',
            'super_glue/wsc.fixed:1.0.2',
            functools.partial(preprocessors.wsc_simple, correct_referent_only=True),
            splits=ONLY_TRAIN,
        ),
        supervised(
            'super_glue_wsc_v102_simple_eval',
            'super_glue/wsc.fixed:1.0.2',
            functools.partial(preprocessors.wsc_simple, correct_referent_only=False),
            [metrics.accuracy],
            postprocessors.wsc_simple,
            NO_TRAIN,
        ),
        supervised(
            'glue_wnli_v002_simple_eval',
            'glue/wnli:1.0.0',
            preprocessors.wnli_simple,
            [metrics.accuracy],
            postprocessors.wsc_simple,
            NO_TRAIN,
        ),
    ]


# The same with a sentinel at the end of the inputs and at the beginning of the targets, as the
# models saw it in pretraining.


def with_sentinel(task: Task) -> Task:
    """Return the _1_sentinel variant of a task. Source: seqio/experimental.py."""

    def postprocess(text: str, example: Fields | None = None, is_target: bool = False) -> object:
        return task.postprocess(postprocessors.without_sentinel(text), example, is_target)

    return dataclasses.replace(
        task,
        name=name_with_sentinel(task.name),
        objective='text_to_text_1_sentinel',
        postprocess_fn=postprocess,
    )


def name_with_sentinel(name: str) -> str:
    """Return the name of the variant, which keeps the task's suffix: _train, _eval."""
    for suffix in ('_train', '_eval'):
        if name.endswith(suffix):
            return f'{name.removesuffix(suffix)}_1_sentinel{suffix}'
    return f'{name}_1_sentinel'


# Reading comprehension, summaries, translation.


def squad(
    name: str, preprocess_fn: PreprocessFn, metric_fn: MetricFn, postprocess_fn: PostprocessFn
) -> Task:
    return supervised(name, 'squad/v1.1:3.0.0', preprocess_fn, [metric_fn], postprocess_fn, NO_TEST)


SQUAD_WITHOUT_CONTEXT = functools.partial(preprocessors.squad, include_context=False)
SQUAD_SPAN = preprocessors.squad_span_space_tokenized


def translation(name: str, tfds: str, target_language: str) -> Task:
    """Return a row from English to another language."""
    preprocess_fn = functools.partial(
        preprocessors.translate, source_language='en', target_language=target_language
    )
    return supervised(name, tfds, preprocess_fn, [metrics.bleu])


# Closed-book question answering: rows of questions that have several right answers.

questions = functools.partial(
    supervised, metric_fns=[metrics.squad], postprocess_fn=postprocessors.qa
)
natural_questions = functools.partial(
    questions,
    tfds='natural_questions_open:1.0.0',
    preprocess_fn=preprocessors.natural_questions_open,
)
web_questions = functools.partial(
    questions, tfds='web_questions:1.0.0', preprocess_fn=preprocessors.web_questions_open
)
trivia_qa = functools.partial(
    questions,
    tfds='trivia_qa/unfiltered.nocontext:1.1.0',
    preprocess_fn=preprocessors.trivia_qa_open,
    metric_fns=[metrics.trivia_qa],
)
annotated_questions = functools.partial(
    supervised,
    tfds='natural_questions:0.0.2',
    preprocess_fn=preprocessors.natural_questions_nocontext,
    metric_fns=[metrics.natural_questions],
    postprocess_fn=postprocessors.natural_questions,
)
SALIENT_SPANS = 'salient_span_wikipedia/sentences:1.0.0'


# Mixtures: names with rates. A task with a rate of 0 is only evaluated.

# WNLI is missing on purpose: T5 trains on WSC and DPR instead.
GLUE_RATES: dict[str, float] = {
    'glue_cola_v002': 8551,
    'glue_sst2_v002': 67349,
    'glue_mrpc_v002': 3668,
    'glue_qqp_v002': 363849,
    'glue_stsb_v002': 5749,
    'glue_mnli_v002': 392702,
    'glue_qnli_v002': 104743,
    'glue_rte_v002': 2490,
    'glue_mnli_mismatched_v002': 0,
    'glue_mnli_matched_v002': 0,
    'glue_ax_v002': 0,
}
WINOGRAD_RATES: dict[str, float] = {
    'dpr_v001_simple': 1322,
    'super_glue_wsc_v102_simple_train': 259,
    'super_glue_wsc_v102_simple_eval': 0,
}
SUPER_GLUE_RATES: dict[str, float] = {
    **WINOGRAD_RATES,
    'super_glue_boolq_v102': 9427,
    'super_glue_cb_v102': 250,
    'super_glue_copa_v102': 400,
    'super_glue_multirc_v102': 27243,
    'super_glue_record_v102': 138854,
    'super_glue_rte_v102': 2490,
    'super_glue_wic_v102': 5428,
    'super_glue_axb_v102': 0,
    'super_glue_axg_v102': 0,
}
FIXED_RATES = GLUE_RATES | SUPER_GLUE_RATES
LARGE = ['cnn_dailymail_v002', 'wmt_t2t_ende_v003', 'wmt15_enfr_v003']
OTHERS = ['squad_v010_allanswers', 'wmt16_enro_v003', *LARGE]
C4 = 'c4_v020_unsupervised'
EVERY = [*FIXED_RATES, *OTHERS, C4]
OPEN_QA = ['trivia_qa_open', 'natural_questions_open', 'web_questions_open']


def multi_task(left_out: Iterable[str] = ()) -> dict[str, Rate]:
    """Return the rates of all tasks not in `left_out`: fixed ones, else the number of examples.

    GLUE and SuperGLUE both have RTE: each gets half its rate.
    """
    rates: dict[str, Rate] = {}
    for name in EVERY:
        if name not in left_out:
            rates[name] = FIXED_RATES.get(name, proportional())
    both = ('glue_rte_v002', 'super_glue_rte_v102')
    if rates.keys() >= set(both):
        rates |= dict.fromkeys(both, 2490 / 2)
    return rates


def leave_one_out(name: str, left_out: Iterable[str]) -> Mixture:
    """Return the mixture of all tasks except a benchmark's."""
    return Mixture(f'leave_one_out_{name}', multi_task(left_out))


def mixtures() -> list[Mixture]:
    en_mix: dict[str, Rate] = {C4: 1e6}
    en_mix |= dict.fromkeys([*FIXED_RATES, 'squad_v010_allanswers'], proportional())
    return [
        Mixture('glue_v002_proportional', GLUE_RATES),
        Mixture('glue_mnli_and_dev_v002', {name: 1.0 for name in GLUE_RATES if 'mnli' in name}),
        Mixture('super_glue_v102_proportional', SUPER_GLUE_RATES),
        Mixture(
            'super_glue_v102_proportional_sentinel',
            {name_with_sentinel(name): rate for name, rate in SUPER_GLUE_RATES.items()},
        ),
        Mixture('wsc_dpr_simple_proportional', WINOGRAD_RATES),
        # T5 sets the rate of C4, and a maximum for the others, in gin.
        Mixture('en_mix', en_mix),
        Mixture('all_equal', dict.fromkeys(EVERY, 1.0)),
        Mixture('all_proportional', multi_task()),
        Mixture('all_mix', multi_task() | {C4: 1e6}),
        leave_one_out('glue_v002_proportional', GLUE_RATES),
        leave_one_out('super_glue_v102_proportional', SUPER_GLUE_RATES),
        *[leave_one_out(name, [name]) for name in OTHERS],
        Mixture('large_supervised_equal', dict.fromkeys(LARGE, 1.0)),
        Mixture('large_supervised_proportional', dict.fromkeys(LARGE, proportional())),
        Mixture('large_translation_equal', {'wmt_t2t_ende_v003': 1.0, 'wmt15_enfr_v003': 1.0}),
        Mixture('squad_trivia_qa_equal', {'squad_v010_allanswers': 1.0, 'trivia_qa_v010': 1.0}),
        Mixture('closed_book_qa', dict.fromkeys(OPEN_QA, proportional())),
        Mixture('closed_book_qa_test', {f'{name}_test': proportional() for name in OPEN_QA}),
    ]


@functools.cache
def groups() -> dict[str, list[Task] | list[Mixture]]:
    """Return {title: the tasks or mixtures of T5}."""
    return {
        'Documentation of this Python': [
            Task(
                'pydoc_summary',
                preprocess_fn=preprocessors.pydoc_summary,
                metric_fns=[
                    functools.partial(metrics.rouge, score_keys=['rouge1', 'rouge2', 'rougeL'])
                ],
            ),
        ],
        'The CMU Pronouncing Dictionary': [
            Task(
                'cmudict_g2p',
                test_split='test',
                inputs='{letters}',
                references='{pronunciations}',
                metric_fns=[metrics.word_error, metrics.phoneme_error],
            ),
        ],
        'Documents': [
            documents('c4_v220_span_corruption', 'c4/en:2.2.0'),
            documents('c4_v220_iid_denoising', 'c4/en:2.2.0', 'iid_denoising'),
            documents('c4_v220_prefix_lm', 'c4/en:2.2.0', 'prefix_lm'),
            documents('c4_v220_full_lm', 'c4/en:2.2.0', 'full_lm'),
            documents(
                'c4_prefix_lm_objective_encoder_decoder_architecture',
                'c4/en:2.2.0',
                'pack_prefix_lm_encoder_decoder',
            ),
            documents('c4_v020_unsupervised', 'c4/en:2.2.0'),
            documents('c4_noclean_v020_unsupervised', 'c4/en.noclean:2.2.0'),
            documents('c4_realnewslike_v020_unsupervised', 'c4/en.realnewslike:2.2.0'),
            documents('c4_webtextlike_v020_unsupervised', 'c4/en.webtextlike:2.2.0'),
            documents('wikipedia_20190301.en_v003_unsupervised', 'wikipedia/20190301.en:1.0.0'),
        ],
        'GLUE': glue_tasks(),
        'SuperGLUE': super_glue_tasks(),
        'Winograd schemas': winograd_tasks(),
        'SuperGLUE with a sentinel': [
            with_sentinel(task) for task in [*super_glue_tasks(), *winograd_tasks()[:3]]
        ],
        'Reading comprehension': [
            squad('squad_v010_allanswers', preprocessors.squad, metrics.squad, postprocessors.qa),
            squad(
                'squad_v010_context_free', SQUAD_WITHOUT_CONTEXT, metrics.squad, postprocessors.qa
            ),
            squad(
                'squad_v010_allanswers_span', SQUAD_SPAN, metrics.span_squad, postprocessors.span_qa
            ),
            # Differs from T5, which takes each character of the target as an answer.
            squad('squad_v010', preprocessors.squad, metrics.squad, postprocessors.only_answer),
            supervised(
                'trivia_qa_v010',
                'trivia_qa/rc:1.1.0',
                preprocessors.trivia_qa,
                objective='trivia_qa_truncate_inputs',
            ),
        ],
        'Summaries and translation': [
            supervised(
                'cnn_dailymail_v002',
                'cnn_dailymail:3.4.0',
                functools.partial(
                    preprocessors.summarize, article_key='article', summary_key='highlights'
                ),
                [metrics.rouge],
            ),
            translation('wmt14_ende_v003', 'wmt14_translate/de-en:1.0.0', 'de'),
            translation('wmt14_enfr_v003', 'wmt14_translate/fr-en:1.0.0', 'fr'),
            translation('wmt15_enfr_v003', 'wmt15_translate/fr-en:1.0.0', 'fr'),
            translation('wmt16_enro_v003', 'wmt16_translate/ro-en:1.0.0', 'ro'),
            translation('wmt19_ende_v003', 'wmt19_translate/de-en:1.0.0', 'de'),
            translation('wmt_t2t_ende_v003', 'wmt_t2t_translate/de-en:1.0.0', 'de'),
        ],
        'Closed-book question answering': [
            natural_questions(
                'natural_questions_open',
                splits=Splits('train[:79168]', 'train[79168:]', test='validation'),
            ),
            natural_questions('natural_questions_open_test', splits=NO_TEST),
            natural_questions(
                'natural_questions_open_randanswer',
                preprocess_fn=preprocessors.natural_questions_open_randanswer,
                # It trains on the smaller part, as in T5.
                splits=Splits('train[79168:]', 'train[:79168]', test='validation'),
            ),
            annotated_questions(
                'natural_questions_nocontext',
                metric_fns=[functools.partial(metrics.natural_questions, non_null_threshold=1)],
                splits=Splits('train[7830:79168]', 'train[:7830]', test='validation'),
            ),
            annotated_questions('natural_questions_nocontext_test', splits=NO_TEST),
            web_questions('web_questions_open', splits=Splits('train[:3417]', 'train[3417:]')),
            web_questions('web_questions_open_test', splits=Splits('train', 'test', NO_SPLIT)),
            trivia_qa(
                'trivia_qa_open',
                splits=Splits('train[:78785]', 'train[78785:]', test='validation'),
            ),
            trivia_qa('trivia_qa_open_test', splits=Splits('train+validation', NO_SPLIT)),
            supervised(
                'salient_span_masked_wikipedia',
                SALIENT_SPANS,
                preprocessors.mask_salient_spans,
                splits=ONLY_TRAIN,
            ),
            documents('span_corrupted_wikipedia', SALIENT_SPANS),
        ],
        'Mixtures': mixtures(),
    }


@functools.cache
def table() -> dict[str, Task | Mixture]:
    """Return all tasks and mixtures of T5, mT5, ByT5 and T0, by name."""
    rows: dict[str, Task | Mixture] = {}
    for group in groups().values():
        rows |= {row.name: row for row in group}
    others = [*tasks_mt5.tasks(rows), *tasks_t0.tasks()]
    return rows | {row.name: row for row in others}
