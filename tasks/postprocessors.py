"""Postprocessors: from a predicted text, or the targets, to the value that the metrics compare.

Each function takes (text, example, is_target): the example has the fields from its preprocessor.
tasks/t5.py binds the other arguments. Source: t5/data/postprocessors.py. Imports no jax.
"""

import math
from collections.abc import Sequence

from tasks.preprocessors import Fields, text_of, texts_of

SENTINEL = '<extra_id_0>'
DETERMINERS = frozenset(
    'a an few her his each every many much my our some that the their these this those which whose '
    'your'.split()
)


def string_to_float(
    text: str, example: Fields | None = None, is_target: bool = False, default: float = -1.0
) -> float:
    """Return a finite number, or `default` for any other text."""
    try:
        number = float(text)
    except ValueError:
        return default
    return number if math.isfinite(number) else default


def string_label_to_class_id(
    text: str,
    example: Fields | None = None,
    is_target: bool = False,
    *,
    label_classes: Sequence[str],
    default: int = -1,
) -> int:
    """Return the index of a class, or `default` for a text that differs, if only in a space or a capital."""
    if text in label_classes:
        return label_classes.index(text)
    return default


def multirc(text: str, example: Fields, is_target: bool = False) -> dict[str, object]:
    """Return {'value': class}; for targets also 'group', the number of the question."""
    value = string_label_to_class_id(text, label_classes=('False', 'True'))
    if is_target:
        return {'value': value, 'group': int(example['idx/question'])}
    return {'value': value}


def record(text: str, example: Fields, is_target: bool = False) -> dict[str, object]:
    """Return {'value': answer}; for targets all answers, and 'group', the query's two numbers."""
    if is_target:
        group = (int(example['idx/passage']), int(example['idx/query']))
        return {'value': texts_of(example['answers']), 'group': group}
    return {'value': text}


def qa(text: str, example: Fields, is_target: bool = False) -> str | list[str]:
    """Return an answer; for targets all answers."""
    if is_target:
        return texts_of(example['answers'])
    return text


def only_answer(text: str, example: Fields, is_target: bool = False) -> str | list[str]:
    """Return an answer; for targets a list with it."""
    return [text] if is_target else text


def span_qa(text: str, example: Fields, is_target: bool = False) -> str | dict[str, object]:
    """Return a span; for targets all answers and the context."""
    if is_target:
        return {'answers': texts_of(example['answers']), 'context': text_of(example['context'])}
    return text


def wsc_simple(text: str, example: Fields, is_target: bool = False) -> int:
    """Return whether the referent is the example's; for targets, whether the example's is right.

    -1 for a text without words other than determiners.
    """
    if is_target:
        return int(example['label'])
    predicted = without_determiners(text)
    if not predicted:
        return -1
    # In a task cache, 'targets' are ids.
    field = 'targets_pretokenized' if 'targets_pretokenized' in example else 'targets'
    referent = without_determiners(text_of(example[field]))
    if ("'" in predicted) != ("'" in referent):
        return 0  # "Bob" is not "Bob's hat"
    predicted_words = set(predicted.split(' '))
    referent_words = set(referent.split(' '))
    return int(predicted_words <= referent_words or referent_words <= predicted_words)


def without_determiners(text: str) -> str:
    """Return a text in lower case, without determiners."""
    words = text.strip().lower().split(' ')
    return ' '.join(word for word in words if word not in DETERMINERS)


def natural_questions(text: str, example: Fields, is_target: bool = False) -> list[tuple[str, ...]]:
    """Return the answers in 'answer: A answer: B' as one group; for targets one group per annotator.

    Source: google-research, t5_closed_book_qa/t5_cbqa/postprocessors.py.
    """
    if not is_target:
        answers = text.split('answer:')[1:]
        return [tuple(answer.strip() for answer in answers)]
    values = texts_of(example['short_answers/values'])
    starts = [int(start) for start in example['short_answers/row_starts']]
    ends = [*starts[1:], len(values)]
    groups = []
    labels = example['yes_no_answers']
    for label, start, end in zip(labels, starts, ends, strict=True):
        if label == -1:
            groups.append(tuple(values[start:end]))
        else:
            groups.append(('yes',) if label else ('no',))
    return groups


def without_sentinel(text: str) -> str:
    """Remove the sentinel at the beginning of a text, if there is one, and the space around the rest."""
    if text.startswith(SENTINEL):
        return text.removeprefix(SENTINEL).strip()
    return text
