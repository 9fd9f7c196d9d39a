"""T5's preprocessors: from the fields of a record to the texts of its examples.

Each function takes a record with TFDS's field names, as TFDS or a line of JSON gives it (a text is a
str or bytes, a list any sequence), and returns its examples: {'inputs': text, 'targets': text},
and the fields that a postprocessor or a metric needs. tasks/t5.py binds the other arguments.
Source: t5/data/preprocessors.py. Imports no jax.
"""

import contextlib
import functools
import re
import string
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from messages import Refused

Fields = Mapping[str, Any]
Texts = dict[str, Any]  # an example: inputs, targets and fields for its metrics

NO_LABEL = -1  # the label of records in a test split
UNKNOWN = '<unk>'  # the targets of these records

MIN_CHARACTERS = 10  # in a docstring's summary, and in the rest

PUNCTUATION = re.compile(f'([{re.escape(string.punctuation)}])')
WHITESPACE = re.compile(r'[\t\n\f\r ]+')  # no other character is white space to T5

# The names of the languages of WMT, as T5 writes them.
LANGUAGES = {
    'cs': 'Czech',
    'de': 'German',
    'en': 'English',
    'es': 'Spanish',
    'et': 'Estonian',
    'fi': 'Finnish',
    'fr': 'French',
    'gu': 'Gujarati',
    'hi': 'Hindi',
    'hu': 'Hungarian',
    'kk': 'Kazakh',
    'lt': 'Lithuanian',
    'lv': 'Latvian',
    'ro': 'Romanian',
    'ru': 'Russian',
    'tr': 'Turkish',
    'zh': 'Chinese',
}

# Translation, summaries.


def translate(fields: Fields, source_language: str, target_language: str) -> list[Texts]:
    """Return a translation; the languages are codes, and names of fields: 'en', 'zh-cn'."""
    fields = fields.get('translation', fields)  # the record of a data set on the Hugging Face hub
    source = LANGUAGES[source_language[:2]]
    target = LANGUAGES[target_language[:2]]
    inputs = f'translate {source} to {target}: {text_of(fields[source_language])}'
    return [{'inputs': inputs, 'targets': text_of(fields[target_language])}]


def summarize(fields: Fields, article_key: str, summary_key: str) -> list[Texts]:
    """Return an article and its summary."""
    inputs = f'summarize: {text_of(fields[article_key])}'
    return [{'inputs': inputs, 'targets': text_of(fields[summary_key])}]


# GLUE and SuperGLUE.


def glue(
    fields: Fields, benchmark_name: str, label_names: Sequence[str], feature_names: Sequence[str]
) -> list[Texts]:
    """Return 'NAME FEATURE: TEXT FEATURE: TEXT' and the name of the class."""
    texts = [f'{name}: {text_of(fields[name])}' for name in feature_names]
    example = {
        'inputs': ' '.join([benchmark_name, *texts]),
        'targets': class_name(fields['label'], label_names),
        'idx': fields['idx'],
    }
    return [example]


def class_name(label: str | int, label_names: Sequence[str]) -> str:
    """Return the name of a class. In a table the label is a text."""
    index = int(label)
    if index == NO_LABEL:
        return UNKNOWN
    if index not in range(len(label_names)):
        raise Refused(f'label {label!r} is not the index of one of {", ".join(label_names)}, or -1')
    return label_names[index]


def stsb(fields: Fields) -> list[Texts]:
    """Return two sentences and their similarity, rounded to 0.0, 0.2 ... 5.0 in float32."""
    first = text_of(fields['sentence1'])
    second = text_of(fields['sentence2'])
    similarity = np.round(np.float32(fields['label']) * np.float32(5)) / np.float32(5)
    example = {
        'inputs': f'stsb sentence1: {first} sentence2: {second}',
        'targets': f'{similarity:.1f}',
        'idx': fields['idx'],
    }
    return [example]


def axb(fields: Fields, label_names: Sequence[str]) -> list[Texts]:
    """Return a record of SuperGLUE's diagnostics as one of RTE, under the names of RTE's fields."""
    renamed = {**fields, 'premise': fields['sentence1'], 'hypothesis': fields['sentence2']}
    return glue(renamed, 'rte', label_names, feature_names=('hypothesis', 'premise'))


def multirc(fields: Fields) -> list[Texts]:
    """Return a question, one answer and a paragraph; whether the answer is right."""
    [example] = glue(
        fields,
        benchmark_name='multirc',
        label_names=('False', 'True'),
        feature_names=('question', 'answer', 'paragraph'),
    )
    without_breaks = example['inputs'].replace('<br>', ' ')
    example['inputs'] = re.sub('</?b>', '', without_breaks)
    idx = example.pop('idx')
    for name in ('paragraph', 'question', 'answer'):
        example[f'idx/{name}'] = idx[name]
    return [example]


def record(fields: Fields) -> list[Texts]:
    """Return an example for each answer to a query with a placeholder (ReCoRD)."""
    passage = text_of(fields['passage'])
    passage = re.sub(r'([.?!"\'])\n@highlight\n', r'\1 ', passage)
    passage = passage.replace('\n@highlight\n', '. ')
    entities = ', '.join(texts_of(fields['entities']))
    answers = texts_of(fields['answers'])
    examples = []
    for answer in answers or [UNKNOWN]:
        example = {
            'inputs': (
                f'record query: {text_of(fields["query"])} entities: {entities} passage: {passage}'
            ),
            'targets': answer,
            'answers': answers,
            'idx/passage': fields['idx']['passage'],
            'idx/query': fields['idx']['query'],
        }
        examples.append(example)
    return examples


# The Winograd schemas: which noun does a pronoun stand for? Inputs mark it: 'wsc: ... *it* ...'.

# Records of WSC whose index does not point at their pronoun, by the beginning of their text.
CORRECTIONS = {
    'The boy continued to whip': ('for him," he said. ', 'for X ," he said.'),
    'When they had eventually calmed down': ('use it ,', 'use X ,'),
}


def wsc_simple(fields: Fields, correct_referent_only: bool) -> list[Texts]:
    """Return a text with its pronoun marked, and the noun.

    The noun may be the wrong one; with `correct_referent_only`, such records have no example.
    """
    label = int(fields.get('label', 0))
    if correct_referent_only and not label:
        return []
    pronoun = text_of(fields['span2_text'])
    text = text_of(fields['text'])
    blanked = text
    for begin, (old, new) in CORRECTIONS.items():
        if text.startswith(begin):
            blanked = text.replace(old, new)
    if blanked == text:
        words = text.split(' ')
        index = int(fields['span2_index'])
        if index <= 0 or words[index] != pronoun:
            raise Refused(f'span2_index={index} is not at {pronoun!r}: count words from 0')
        # As in T5, a space follows even a pronoun at the end.
        blanked = ' '.join([*words[:index], 'X', ' '.join(words[index + 1 :])])
    marked = blanked.replace(' X ', f' *{pronoun}* ')
    example = {
        'inputs': f'wsc: {marked}',
        'targets': text_of(fields['span1_text']),
        'label': label,
        'idx': fields['idx'],
    }
    return [example]


def definite_pronoun_resolution_simple(fields: Fields) -> list[Texts]:
    """Return a sentence with the first of its pronouns marked, and the noun."""
    pronoun = re.escape(text_of(fields['pronoun']))
    marked = re.sub(rf' ({pronoun})( |\.|,)', r' *\1*\2', text_of(fields['sentence']), count=1)
    targets = class_name(fields['label'], texts_of(fields['candidates']))
    return [{'inputs': f'wsc: {marked}', 'targets': targets}]


def wnli_simple(fields: Fields) -> list[Texts]:
    """Return the first sentence with a pronoun marked, and the words that replace it in the second.

    These heuristics were written only for the splits validation and test.
    """
    premise = text_of(fields['sentence1'])
    hypothesis = text_of(fields['sentence2'])
    words = clean_words(premise)
    hypothesis_words = clean_words(hypothesis)
    matches = []
    for index, word in enumerate(words):
        if word in PRONOUNS:
            matches.append((index, *match_pronoun(words, hypothesis_words, index)))
    index, _, referent = max(matches, key=lambda match: match[1])  # the first of equal scores
    example = {
        'inputs': f'wsc: {mark_word(premise, index)}',
        'targets': referent_in(hypothesis, referent),
        'premise': premise,
        'hypothesis': hypothesis,
        'label': int(fields.get('label', 0)),
        'idx': fields['idx'],
    }
    return [example]


PRONOUNS = {'he', 'she', 'they', 'it', 'her', 'his', 'their', 'them', 'him'}
ARTICLES = ('a', 'an', 'the')


def clean_words(text: str) -> list[str]:
    """Return the words in lower case, each without a mark at its end."""
    words = [re.sub(r'[.,?!]$', '', word) for word in text.strip().lower().split(' ')]
    return [word for word in words if word]


def match_pronoun(premise: list[str], hypothesis: list[str], index: int) -> tuple[int, str]:
    """Return how many words around a pronoun the hypothesis shares, and its words instead of the pronoun."""
    before = premise[:index]
    after = premise[index + 1 :]
    num_before = num_shared_words(hypothesis[::-1], before[::-1])
    num_after = num_shared_words(hypothesis, after)
    score = num_before + num_after
    if not score:
        return 0, ''
    before = before[len(before) - num_before :]
    after = after[:num_after]
    text = ' '.join(hypothesis)
    # As in T5, the words themselves are patterns.
    for pattern in ([*before, '(.+)', *after], ['^(.+)', *after], [*before, '(.+)$']):
        match = re.search(' '.join(pattern), text)
        if match:
            return score, match[1]
    return score, ''


def num_shared_words(hypothesis: list[str], words: list[str]) -> int:
    """Return how many of the first `words` follow each other in the hypothesis."""
    text = ' '.join(hypothesis)
    for i in range(len(words)):
        if ' '.join(words[: i + 1]) not in text:
            return i
    return len(words)


def mark_word(sentence: str, index: int) -> str:
    """Return a sentence with stars around one of its words, but not around the mark after it."""
    words = sentence.split(' ')
    word = words[index]
    if word[-1] in ('.', ',', '!', '?'):
        words[index] = f'*{word[:-1]}* {word[-1]}'
    else:
        words[index] = f'*{word}*'
    return ' '.join(words)


def referent_in(hypothesis: str, referent: str) -> str:
    """Return a referent as the hypothesis writes it, from its last article on, not possessive."""
    words = referent.split(' ')
    # The first position of each article, as in T5.
    begin = max([words.index(article) for article in ARTICLES if article in words] or [0])
    pattern = ' '.join(rf'{re.escape(word)}[.,?!]?' for word in words[begin:])
    match = re.search(pattern, hypothesis, re.IGNORECASE)
    assert match, f'{referent!r} is not in {hypothesis!r}'
    return re.sub(r"('s|')?\Z", '', re.sub(r'[.,!?]\Z', '', match[0]), count=1)


# Reading comprehension.


def pad_punctuation(text: str) -> str:
    """Return a text with spaces around each mark, but only single spaces."""
    return WHITESPACE.sub(' ', PUNCTUATION.sub(r' \1 ', text))


def squad(
    fields: Fields, include_context: bool = True, pad: Callable[[str], str] = pad_punctuation
) -> list[Texts]:
    """Return a question with its context, and the first answer; all with padded punctuation."""
    answers = [pad(answer) for answer in texts_of(fields['answers']['text'])]
    question = pad(text_of(fields['question']))
    context = pad(text_of(fields['context']))
    inputs = join(['squad trivia question:', question])
    if include_context:
        inputs = join(['question:', question, 'context:', context])
    example = {
        'inputs': inputs,
        'targets': answers[0],
        'id': text_of(fields['id']),
        'context': context,
        'question': question,
        'answers': answers,
    }
    return [example]


def squad_span_space_tokenized(fields: Fields) -> list[Texts]:
    """Return the example of `squad` with the positions of the answer's words as targets; none without a span.

    As in T5, an answer at the very end of the context is not found.
    """
    [example] = squad(fields)
    answer = words_of(example['targets'])
    context = words_of(example['context'])
    for start in range(len(context) - len(answer)):
        end = start + len(answer)
        if context[start:end] == answer:
            return [example | {'targets': f'start: {start} end: {end - 1}'}]
    return []


def words_of(text: str) -> list[str]:
    """Split a text at each character that is not an ASCII letter, digit or underscore."""
    return re.sub(r'\W', ' ', text, flags=re.ASCII).split(' ')


def trivia_qa(fields: Fields) -> list[Texts]:
    """Return an example for each context and each alias of the answer that is in it."""
    contexts = []
    if 'entity_pages' in fields:
        contexts += texts_of(fields['entity_pages']['wiki_context'])
    if 'search_results' in fields:
        contexts += texts_of(fields['search_results']['search_context'])
    question = pad_punctuation(text_of(fields['question']))
    aliases = texts_of(fields['answer']['normalized_aliases'])
    # Differs from T5, where an alias without a letter is in every context.
    aliases = [pad_punctuation(alias) for alias in aliases if alias.strip()]
    examples = []
    for context in contexts:
        context = pad_punctuation(context)
        inputs = join(['question:', question, 'context:', context])
        for alias in aliases:
            if is_found(alias, context):
                examples.append({'inputs': inputs, 'targets': alias})
    return examples


def is_found(alias: str, context: str) -> bool:
    """Return whether an alias, a pattern in T5, is in a context. Lowers ASCII letters: A is a, but É is not é."""
    alias = alias.encode().lower().decode()
    context = context.encode().lower().decode()
    try:
        return re.search(alias, context) is not None
    except re.error:  # Differs from T5, which fails.
        return alias in context


# Closed-book question answering. Source: google-research, t5_closed_book_qa/t5_cbqa.


def open_question(fields: Fields, prefix: str, answers_field: str) -> list[Texts]:
    """Return a question and the first of its answers."""
    answers = texts_of(fields[answers_field])
    example = {
        'inputs': f'{prefix} question: {text_of(fields["question"])}',
        'targets': answers[0],
        'answers': answers,
    }
    return [example]


natural_questions_open = functools.partial(open_question, prefix='nq', answers_field='answer')
web_questions_open = functools.partial(open_question, prefix='wq', answers_field='answers')


def natural_questions_open_randanswer(fields: Fields) -> list[Texts]:
    """Return a question and one of its answers.

    Differs from T5, which draws another one each time: here a hash of the question chooses it.
    """
    [example] = natural_questions_open(fields)
    answers = example['answers']
    example['targets'] = answers[zlib.crc32(example['inputs'].encode()) % len(answers)]
    return [example]


def trivia_qa_open(fields: Fields) -> list[Texts]:
    """Return a question and the main form of its answer."""
    example = {
        'inputs': f'trivia_qa question: {text_of(fields["question"])}',
        'targets': text_of(fields['answer']['value']),
        'answers': texts_of(fields['answer']['aliases']),
    }
    return [example]


YES_OR_NO = ('no', 'yes')


def natural_questions_nocontext(fields: Fields) -> list[Texts]:
    """Return a question and 'answer: A answer: B', the answers of all annotators; no example without answers."""
    annotations = fields['annotations']
    labels = [int(label) for label in annotations['yes_no_answer']]
    answers = [YES_OR_NO[label] for label in labels if label != NO_LABEL]
    row_starts = []
    values: list[str] = []
    for short_answers in annotations['short_answers']['text']:
        row_starts.append(len(values))
        values += texts_of(short_answers)
    answers += values
    if not answers:
        return []
    example = {
        'inputs': f'nq question: {text_of(fields["question"]["text"])}',
        'targets': ' '.join(f'answer: {answer}' for answer in answers),
        'short_answers/values': values,
        'short_answers/row_starts': row_starts,
        'yes_no_answers': labels,
    }
    return [example]


def mask_salient_spans(fields: Fields) -> list[Texts]:
    """Return an example for each salient span, bytes `start` to `limit`: the text with '_X_' for the span, and the span."""
    sentence = text_of(fields['text']).encode()
    examples = []
    for start, limit in zip(fields['spans']['start'], fields['spans']['limit'], strict=True):
        masked = sentence[:start] + b'_X_' + sentence[limit:]
        targets = sentence[start:limit].decode(errors='replace')
        inputs = f'nem: {masked.decode(errors="replace")}'
        examples.append({'inputs': inputs, 'targets': targets})
    return examples


# The documentation of this Python.


def pydoc_summary(fields: Fields) -> list[Texts]:
    """Return the rest of a docstring as inputs, its summary as targets; none if either is short."""
    if len(fields['summary']) < MIN_CHARACTERS or len(fields['rest']) < MIN_CHARACTERS:
        return []
    return [{'inputs': f'summarize: {fields["rest"]}', 'targets': fields['summary']}]


# Values and texts.


def text_of(value: object) -> str:
    """Return a text, which may be UTF-8 bytes."""
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    elif isinstance(value, str):
        return str(value)  # also numpy's
    raise Refused(f'{value!r:.40} is not a text: write a string')


def texts_of(values: Iterable[object]) -> list[str]:
    if isinstance(values, str | bytes):
        raise Refused(f'{values!r:.40} is one text: write a list')
    return [text_of(value) for value in values]


def join(texts: Sequence[str]) -> str:
    """Join texts with a space, and make all spaces single."""
    return WHITESPACE.sub(' ', ' '.join(texts))
