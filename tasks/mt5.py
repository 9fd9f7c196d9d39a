"""mT5's and ByT5's tasks and mixtures.

Both have the same ones, under their own prefix: 'mt5_xnli_zeroshot' and 'byt5_xnli_zeroshot'. The
vocabulary (data.vocabulary), the noise of mc4 (ByT5's spans have 20 bytes) and the lengths come from
the settings. The originals' lengths of inputs and targets:

                                        mT5           ByT5
    mc4                                 1024, 229     1024, 189
    xnli                                1024, 128     2048, 56
    pawsx                               1024, 128     1024, 128
    tydiqa, xquad, mlqa, ner            1024, 512     4096, 512
    glue                                512, 128      2048, 256
    super_glue                          1024, 64      4096, 128
    gem_xsum                            4096, 512     8192, 512
    wikilingua                          -             4096, 1024
    wmt                                 -             1024, 1024

A task in several languages is named TASK.LANGUAGE. 'zeroshot' trains on English and evaluates all
languages; 'translate_train' also trains on translations. Not here: TweetQA and Dakshina, whose tasks
are not published (Dakshina's metric is metrics.cer), and SIGMORPHON.

Source: google-research, multilingual_t5/tasks.py 9dcd60f and byt5/tasks.py 7d4efdd. Imports no jax.
"""

import dataclasses
import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from sources import NO_SPLIT
from tasks import metrics, postprocessors, preprocessors
from tasks.mixtures import (
    NO_TEST,
    NO_TRAIN,
    ONLY_TEST,
    ONLY_TRAIN,
    Mixture,
    PreprocessFn,
    Splits,
    Task,
    proportional,
    supervised,
)
from tasks.preprocessors import Fields, Texts, text_of, texts_of

Row = Task | Mixture

MC4 = """
    af am ar az be bg bg-Latn bn ca ceb co cs cy da de el el-Latn en eo es et eu fa fi fil fr fy ga
    gd gl gu ha haw hi hi-Latn hmn ht hu hy id ig is it iw ja ja-Latn jv ka kk km kn ko ku ky la lb
    lo lt lv mg mi mk ml mn mr ms mt my ne nl no ny pa pl ps pt ro ru ru-Latn sd si sk sl sm sn so
    sq sr st su sv sw ta te tg th tr uk ur uz vi xh yi yo zh zh-Latn zu
""".split()
WIKIPEDIA = """
    af an ar ast az azb ba bar be bg bn bpy br bs ca ce ceb cs cv cy da de el en es et eu fa fi fr fy
    ga gl gu he hi hr ht hu hy id io is it ja jv ka kk kn ko ky la lb lmo lt lv mg min mk ml mn mr ms
    my nds-nl ne new nl nn no oc pa pl pms pnb pt ro ru scn sco sh sk sl sq sr su sv sw ta te tg th
    tl tr tt uk ur uz vi vo war yo zh
""".split()
XNLI = 'ar bg de el en es fr hi ru sw th tr ur vi zh'.split()
PAWSX = 'de en es fr ja ko zh'.split()
TYDIQA = 'ar bn en fi id ko ru sw te'.split()
XQUAD = 'ar de el es hi ru th tr vi zh'.split()
MLQA = 'ar de en es hi vi zh'.split()
NER = """
    af ar bg bn de el en es et eu fa fi fr he hi hu id it ja jv ka kk ko ml mr ms my nl pt ru sw ta
    te th tl tr ur vi yo zh
""".split()
WIKILINGUA = 'es ru tr vi'.split()

ALL = 'all_langs'  # instead of a language
PAWS_CLASSES = ('different_meaning', 'paraphrase')
XSUM_SCORES = ('rouge1', 'rouge2', 'rougeL', 'rougeLsum')
BY_SIZE = proportional(temperature=1 / 0.3)


def tasks(t5: Mapping[str, Row]) -> list[Row]:
    """Return all tasks and mixtures. `t5`: T5's by name, some of which are copied."""
    rows = [*documents_of_mt5(), *mc4('byt5_mc4')]
    for prefix in ('mt5', 'byt5'):
        rows += xnli(prefix)
        rows += pawsx(prefix)
        rows += tydiqa(prefix)
        rows += xquad_and_mlqa(prefix)
        rows += ner(prefix)
        rows += summaries(prefix)
        rows += [copy_of(t5[name], prefix) for name in CLASSIFICATION]
    rows += [copy_of(row, 'byt5') for name, row in t5.items() if name.startswith('wmt')]
    cnn_dailymail = copy_of(t5['cnn_dailymail_v002'], 'mt5')
    assert isinstance(cnn_dailymail, Task)
    # Another version of the data set than T5's.
    return [*rows, dataclasses.replace(cnn_dailymail, tfds='cnn_dailymail:3.1.0')]


def equal(name: str, *groups: Iterable[Task]) -> Mixture:
    """Return a mixture of tasks of equal rates."""
    return Mixture(name, {task.name: 1.0 for task in itertools.chain(*groups)})


# Pretraining.


def documents_of_mt5() -> list[Row]:
    """Return mC4 and Wikipedia by language, and both together."""
    rows = mc4('mc4')
    wikipedia = []
    for language in WIKIPEDIA:
        name = f'mt5_wiki.{language.replace("-", "_")}'
        tfds = f'wikipedia/20200301.{language}:1.0.0'
        wikipedia.append(Task(name, tfds=tfds, objective='span_corruption'))
    rates = dict.fromkeys([row.name for row in wikipedia], BY_SIZE)
    both = rates | dict.fromkeys([row.name for row in rows if isinstance(row, Task)], BY_SIZE)
    return [*rows, *wikipedia, Mixture('mt5_wiki', rates), Mixture('mc4_wiki', both)]


def mc4(name: str) -> list[Row]:
    """Return mC4 by language, and their mixture."""
    rows = []
    for language in MC4:
        row = Task(
            f'{name}.{language.replace("-", "_")}',
            tfds='c4/multilingual:3.0.1',
            train_split=language,
            validation_split=f'{language}-validation',
            test_split=NO_SPLIT,
            objective='span_corruption',
        )
        rows.append(row)
    return [*rows, Mixture(name, dict.fromkeys([row.name for row in rows], BY_SIZE))]


# Sentence pairs.


def xnli(prefix: str) -> list[Row]:
    """Return XNLI. MNLI is its English training set."""

    def row(name: str, tfds: str, splits: Splits, preprocess_fn: PreprocessFn) -> Task:
        return supervised(
            f'{prefix}_xnli_{name}', tfds, preprocess_fn, [metrics.accuracy], splits=splits
        )

    def process(languages: Sequence[str]) -> PreprocessFn:
        return functools.partial(process_xnli, languages=languages)

    english = row('train', 'multi_nli:1.1.0', ONLY_TRAIN, process_mnli)
    evaluated = [row(f'dev_test.{ALL}', 'xnli:1.1.0', NO_TRAIN, process(XNLI))]
    for language in XNLI:
        name = f'dev_test.{language}'
        evaluated.append(row(name, 'xnli:1.1.0', NO_TRAIN, process([language])))
    translated = []
    for language in without_english(XNLI):
        name = f'translate_train.{language}'
        translated.append(row(name, 'xtreme_xnli:1.1.0', ONLY_TRAIN, process([language])))
    return [
        english,
        *evaluated,
        *translated,
        equal(f'{prefix}_xnli_zeroshot', [english], evaluated),
        equal(f'{prefix}_xnli_translate_train', [english], evaluated, translated),
    ]


def pawsx(prefix: str) -> list[Row]:
    """Return PAWS-X, with its own translations and XTREME's."""
    class_id = functools.partial(
        postprocessors.string_label_to_class_id, label_classes=PAWS_CLASSES
    )

    def row(name: str, tfds: str, splits: Splits) -> Task:
        return supervised(f'{prefix}_{name}', tfds, paws, [metrics.accuracy], class_id, splits)

    data_sets = {language: f'paws_x_wiki/{language}:1.0.0' for language in PAWSX}
    english = row('paws', data_sets['en'], ONLY_TRAIN)
    evaluated = [row(f'pawsx_dev_test.{ALL}', ','.join(data_sets.values()), NO_TRAIN)]
    original = []
    for language, data_set in data_sets.items():
        evaluated.append(row(f'pawsx_dev_test.{language}', data_set, NO_TRAIN))
        original.append(row(f'pawsx_translate_train_original.{language}', data_set, ONLY_TRAIN))
    translated = []
    for language in without_english(PAWSX):
        name = f'pawsx_translate_train.{language}'
        translated.append(row(name, f'xtreme_pawsx/{language}:1.0.0', ONLY_TRAIN))
    return [
        english,
        *evaluated,
        *original,
        *translated,
        equal(f'{prefix}_pawsx_zeroshot', [english], evaluated),
        equal(f'{prefix}_pawsx_translate_train', [english], evaluated, translated),
        # As in the originals, this has XTREME's translations, despite its name.
        equal(f'{prefix}_pawsx_translate_train_original', [english], evaluated, translated),
    ]


# Questions.


def questions(name: str, tfds: str, splits: Splits) -> Task:
    """Return a row of questions with several right answers."""
    return supervised(name, tfds, squad, [metrics.squad], postprocessors.qa, splits)


def tydiqa(prefix: str) -> list[Row]:
    tfds = 'tydi_qa/goldp:2.1.0'
    all_languages = questions(f'{prefix}_tydiqa_train_dev', tfds, NO_TEST)
    english = dataclasses.replace(
        questions(f'{prefix}_tydiqa_train.en', tfds, ONLY_TRAIN),
        preprocess_fn=squad_of_tydiqa_english,
    )
    evaluated = []
    for language in TYDIQA:
        splits = Splits(train=NO_SPLIT, validation=f'validation-{language}', test=NO_SPLIT)
        evaluated.append(questions(f'{prefix}_tydiqa_dev.{language}', tfds, splits))
    translated = []
    for language in without_english(TYDIQA):
        splits = ONLY_TRAIN._replace(train=f'translate-train-{language}')
        translated.append(questions(f'{prefix}_tydiqa_translate_train.{language}', tfds, splits))
    return [
        all_languages,
        english,
        *evaluated,
        *translated,
        equal(f'{prefix}_tydiqa', [all_languages], evaluated),
        equal(f'{prefix}_tydiqa_zeroshot', [english], evaluated),
        equal(f'{prefix}_tydiqa_translate_train', [english], translated, evaluated),
    ]


def xquad_and_mlqa(prefix: str) -> list[Row]:
    """Return XQuAD and MLQA. SQuAD and its translations are the training set of both."""
    english = questions(f'{prefix}_squad_train_dev', 'squad/v1.1:3.0.0', NO_TEST)
    data_sets = {language: f'xquad/{language}:3.0.0' for language in [*XQUAD, 'en']}
    xquad = [questions(f'{prefix}_xquad_test.{ALL}', ','.join(data_sets.values()), ONLY_TEST)]
    for language, data_set in data_sets.items():
        xquad.append(questions(f'{prefix}_xquad_test.{language}', data_set, ONLY_TEST))
    translated = {}
    splits = NO_TEST._replace(train='translate-train', validation='translate-dev')
    for language in XQUAD:
        name = f'{prefix}_xquad_translate_train_dev.{language}'
        translated[language] = questions(name, data_sets[language], splits)
    mlqa = []
    for language in MLQA:
        name = f'{prefix}_mlqa_dev_test.{language}'
        row = questions(name, f'mlqa/{language}:1.0.0', NO_TRAIN)
        metric_fns = [functools.partial(metrics.mlqa, lang=language)]
        mlqa.append(dataclasses.replace(row, metric_fns=metric_fns))
    translated_of_mlqa = [translated[language] for language in without_english(MLQA)]
    return [
        english,
        *translated.values(),
        *xquad,
        *mlqa,
        equal(f'{prefix}_xquad_zeroshot', [english], xquad),
        equal(f'{prefix}_xquad_translate_train', translated.values(), [english], xquad),
        equal(f'{prefix}_mlqa_zeroshot', [english], mlqa),
        equal(f'{prefix}_mlqa_translate_train', translated_of_mlqa, [english], mlqa),
    ]


# Named entities.


def ner(prefix: str) -> list[Row]:
    def row(name: str, tfds: str, splits: Splits) -> Task:
        return supervised(f'{prefix}_ner_{name}', tfds, wikiann, [metrics.span_f1], splits=splits)

    trained = {}
    evaluated = []
    for language in NER:
        trained[language] = row(f'train.{language}', f'wikiann/{language}:1.0.0', ONLY_TRAIN)
        evaluated.append(row(f'eval.{language}', f'wikiann/{language}:1.0.0', NO_TRAIN))
    return [
        *trained.values(),
        *evaluated,
        equal(f'{prefix}_ner_zeroshot', [trained['en']], evaluated),
        equal(f'{prefix}_ner_multilingual', trained.values(), evaluated),
    ]


# Summaries.


def summaries(prefix: str) -> list[Row]:
    """Return XSum of GEM, and WikiLingua: from other languages to an English summary."""
    summarize = functools.partial(
        preprocessors.summarize, article_key='document', summary_key='target'
    )
    xsum = supervised(
        f'{prefix}_gem_xsum',
        'gem/xsum:1.0.1',
        summarize,
        [metrics.bleu, functools.partial(metrics.rouge, score_keys=XSUM_SCORES)],
    )
    wikilingua = []
    for language in WIKILINGUA:
        name = f'{prefix}_wikilingua.{language}'
        tfds = f'gem/wiki_lingua_{language}_en:1.0.1'
        wikilingua.append(supervised(name, tfds, source_to_target, [metrics.rouge]))
    return [xsum, *wikilingua, equal(f'{prefix}_wikilingua', wikilingua)]


# Tasks that differ from T5's only in the vocabulary.

GLUE = 'cola sst2 mrpc qqp stsb mnli mnli_mismatched mnli_matched qnli rte wnli ax'.split()
SUPER_GLUE = 'boolq cb copa multirc record rte wic axb axg'.split()
CLASSIFICATION = [
    *[f'glue_{name}_v002' for name in GLUE],
    *[f'super_glue_{name}_v102' for name in SUPER_GLUE],
    'super_glue_wsc_v102_simple_train',
    'super_glue_wsc_v102_simple_eval',
    'dpr_v001_simple',
    'glue_v002_proportional',
    'super_glue_v102_proportional',
]


def copy_of(row: Row, prefix: str) -> Row:
    """Return a task or mixture of T5 under the name PREFIX_NAME."""
    name = f'{prefix}_{row.name}'
    if isinstance(row, Task):
        return dataclasses.replace(row, name=name)
    return Mixture(name, {f'{prefix}_{member}': rate for member, rate in row.members.items()})


def without_english(languages: Sequence[str]) -> list[str]:
    """Return all languages but English, which needs no translation."""
    return [language for language in languages if language != 'en']


# Preprocessors. Source: multilingual_t5/preprocessors.py.


def process_mnli(fields: Fields) -> list[Texts]:
    """Return a premise with a hypothesis, and the index of the class."""
    return [sentence_pair(fields['premise'], fields['hypothesis'], fields['label'])]


def process_xnli(fields: Fields, languages: Sequence[str]) -> list[Texts]:
    """Return an example for each language: the premise and the hypothesis in it."""
    hypothesis = fields['hypothesis']
    texts = texts_of(hypothesis['language'])
    examples = []
    for language in languages:
        for other, translation in zip(texts, hypothesis['translation'], strict=True):
            if other == language:
                premise = fields['premise'][language]
                examples.append(sentence_pair(premise, translation, fields['label']))
    return examples


def sentence_pair(premise: str | bytes, hypothesis: str | bytes, label: int) -> Texts:
    inputs = f'xnli: premise: {text_of(premise)} hypothesis: {text_of(hypothesis)}'
    return {'inputs': inputs, 'targets': str(int(label))}


def paws(fields: Fields) -> list[Texts]:
    """Return two sentences, and whether one is a paraphrase of the other."""
    first = text_of(fields['sentence1'])
    second = text_of(fields['sentence2'])
    example = {
        'inputs': f'paws sentence1: {first} sentence2: {second}',
        'targets': preprocessors.class_name(fields['label'], PAWS_CLASSES),
    }
    return [example]


def squad(fields: Fields) -> list[Texts]:
    """Return the example of T5's `squad`, with other characters padded. The original is called `xquad`."""
    return preprocessors.squad(fields, pad=pad_punctuation)


def squad_of_tydiqa_english(fields: Fields) -> list[Texts]:
    """Return the example of `squad` for a question in English; none for other languages."""
    if text_of(fields['id']).split('-')[0] != 'english':
        return []
    return squad(fields)


def wikiann(fields: Fields) -> list[Texts]:
    """Return a sentence, and the names in it with their kinds."""
    example = {
        'inputs': f'tag: {" ".join(texts_of(fields["tokens"]))}',
        'targets': ' $$ '.join(texts_of(fields['spans'])),
    }
    return [example]


def source_to_target(fields: Fields) -> list[Texts]:
    return [{'inputs': text_of(fields['source']), 'targets': text_of(fields['target'])}]


# Neither a letter nor a number, an underscore or white space. Some are accents.
NOT_OF_A_WORD = re.compile(r'[^\w\t\n\f\r ]')


def pad_punctuation(text: str) -> str:
    """Return a text with spaces around all but letters, accents, numbers and underscores."""

    def pad(match: re.Match) -> str:
        is_accent = unicodedata.category(match[0]).startswith('M')
        return match[0] if is_accent else f' {match[0]} '

    return preprocessors.WHITESPACE.sub(' ', NOT_OF_A_WORD.sub(pad, text))
