"""A user's texts and ids as arrays for the model, and the text of an answer."""

from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from answers.batches import Numbers, Question, next_size
from answers.options import Decoding, Text
from messages import Refused
from vocabulary import EOS_ID, UNK_ID, Vocabulary

Array = NDArray | jax.Array
Inputs = Sequence[str] | Sequence[Sequence[int]] | Sequence[Array] | Array
Prompts = Sequence[str | Sequence[int] | None] | Array
NO_WORD = -2  # pads lists of words; equals no token


def ids_of(
    name: str,
    examples: Inputs | Prompts,
    vocabulary: Vocabulary | None,
    vocab_size: int,
    is_prompt: bool = False,
) -> list[NDArray]:
    """Return the ids of each example, with the special ids of a text. A prompt has no end; it may be empty or None."""
    if is_prompt and isinstance(examples, list | tuple):
        nothing = '' if any(isinstance(example, str) for example in examples) else ()
        examples = [nothing if example is None else example for example in examples]
    if are_texts(examples):
        texts = list(map(str, examples))
        ''.join(texts).encode()  # raises an error that names a surrogate, unlike SentencePiece's
        examples = encode(vocabulary, texts)
        if vocabulary is not None and is_prompt:
            examples = [[*vocabulary.begin_ids, *ids] for ids in examples]
        elif vocabulary is not None:
            begin, end = getattr(vocabulary.ends, name)
            examples = [[*begin, *ids, *end] for ids in examples]
    if isinstance(examples, str) or not len(examples):
        raise Refused(f'{name}={shortened(examples)}: must be a list of texts or of ids')
    encoded = []
    # Check texts last: the error should name an example that is neither text nor ids.
    for i, example in sorted(enumerate(examples), key=lambda item: isinstance(item[1], str)):
        ids = np.asarray(example)
        is_list = ids.ndim == 1 and (ids.dtype.kind in 'iu' or not ids.size)
        if not is_list or not (is_prompt or ids.any()):
            raise Refused(f'{name}[{i}]={shortened(example)}: must be ids, or all must be texts')
        check_ids(f'{name}[{i}]', ids, vocab_size)
        encoded.append(ids)
    return encoded


def check_ids(name: str, ids: NDArray, end: int) -> None:
    """Raise Refused for ids outside of [0, end): they have no embedding."""
    if ids.size and not 0 <= ids.min() <= ids.max() < end:
        raise Refused(f'{name} has ids {ids.min()} to {ids.max()}: must be 0 to {end - 1}')


def check_one_each(name: str, values: Sequence, inputs: Sequence) -> None:
    if len(values) != len(inputs):
        raise Refused(f'{name} has {len(values)} for {len(inputs)} inputs: give one for each')


def are_texts(examples: Inputs | Prompts) -> bool:
    """Return whether `examples` is a list of one or more texts."""
    is_list = isinstance(examples, list | tuple) or getattr(examples, 'ndim', 0) == 1
    return is_list and len(examples) > 0 and all(isinstance(x, str) for x in examples)


def shortened(value: object) -> str:
    """Return `value` for an error message, in one line of at most 60 characters."""
    return f'{" ".join(repr(value).split()):.60}'


def encode(vocabulary: Vocabulary | None, texts: list[str]) -> list[list[int]]:
    if vocabulary is None:
        raise Refused("the checkpoint has no vocabulary: load it with vocabulary=PATH or 'bytes'")
    return vocabulary.encode(texts, glued_sentinels=True)


# The texts of `Decoding`.


def words_of(
    decoding: Decoding, vocabulary: Vocabulary | None, vocab_size: int
) -> dict[str, NDArray]:
    """Return the texts of `decoding` as arrays of a batch, int32 [b, n, W]; b is 1 if all inputs share them.

    bad_words_bnW and stop_bnW are padded with -1 on the left. allowed_bnA ends with EOS and is padded on the right.
    """
    begin = getattr(vocabulary, 'begin_ids', ())
    eos_id = getattr(vocabulary, 'eos_id', EOS_ID)
    unk_id = getattr(vocabulary, 'unk_id', UNK_ID)

    def word(name: str, text: Text, may_be_unknown: bool = False) -> list[int]:
        ids = encode(vocabulary, [text])[0] if isinstance(text, str) else text
        is_list = isinstance(ids, tuple | list) and all(isinstance(i, int) for i in ids)
        if not is_list or not ids or not 0 < min(ids) <= max(ids) < vocab_size:
            raise Refused(f'{name} has {text!r}: must be text or ids, 1 to {vocab_size - 1}')
        if isinstance(text, str) and unk_id in ids and not may_be_unknown:
            unknown = [x for x in dict.fromkeys(text) if unk_id in encode(vocabulary, [x])[0]]
            raise Refused(f'{name} has {text!r}: the vocabulary lacks {unknown}: use another text')
        return [*ids]

    arrays: dict[str, NDArray] = {}
    if decoding.bad_words:
        bad_words = [word('bad_words', text) for text in decoding.bad_words]
        arrays['bad_words_bnW'] = padded([bad_words], on_left=True)
    if decoding.stop:
        stop = []
        for text in decoding.stop:
            ids = word('stop', text, may_be_unknown=True)
            assert vocabulary is not None, 'stop has ids: it must be text'
            # Stop at the text's ids, unless the vocabulary changes the text, and at each token that contains it.
            # `before_stop` finds other occurrences.
            if vocabulary.decode(ids) == text:
                stop.append(ids)
            stop += [[k] for k in range(vocabulary.size) if text in vocabulary.decode([k])]
        arrays['stop_bnW'] = padded([stop], on_left=True)
    if decoding.allowed:
        lists = decoding.allowed if decoding.is_allowed_per_input else [decoding.allowed]
        allowed = []
        for texts in lists:
            if isinstance(texts, str):
                texts = (texts,)
            rows = []
            for text in texts:
                ids = word('allowed', text)
                if isinstance(text, str):
                    ids = [*begin, *ids]
                rows.append([*ids, eos_id])
            allowed.append(rows)
        longest = max(len(ids) for rows in allowed for ids in rows)
        if longest > decoding.max_length:
            raise Refused(
                f'allowed has answers of {longest} tokens: set max_length={longest} or more'
            )
        arrays['allowed_bnA'] = padded(allowed, on_left=False)
    return arrays


def padded(lists: Sequence[Sequence[Sequence[int]]], on_left: bool) -> NDArray:
    """Return lists of ids as int32 [b, n, W]: ids padded with -1, lists with rows of NO_WORD, to compiled sizes."""
    num_words = next_size(max(map(len, lists)), 1)
    width = next_size(max((len(ids) for rows in lists for ids in rows), default=1), 1)
    words = np.full((len(lists), num_words, width), NO_WORD, np.int32)
    for b, rows in enumerate(lists):
        for n, ids in enumerate(rows):
            start = (width - len(ids)) * on_left
            words[b, n] = -1
            words[b, n, start : start + len(ids)] = ids
    return words


def before_stop(
    vocabulary: Vocabulary, tokens: list[int], prompt: Sequence[int] | NDArray, stop: Sequence[str]
) -> tuple[str, list[int]]:
    """Return the text of an answer up to the first stop text after its prompt, and its tokens."""
    is_ended = bool(tokens) and tokens[-1] in vocabulary.ends.answers
    text = vocabulary.decode(tokens[: len(tokens) - is_ended])
    start = len(vocabulary.decode(prompt))
    ends = [text.index(end, start) for end in stop if end in text[start:]]
    if ends:
        text = text[: min(ends)]
        while tokens and vocabulary.decode(tokens[:-1]).startswith(text):
            tokens = tokens[:-1]
    return text, tokens


def with_numbers(questions: Sequence[Question], numbers: Numbers) -> list[Question]:
    """Return the questions with their `numbers`."""
    numbers = numbers or {}
    for name, values in numbers.items():
        check_one_each(f'numbers[{name!r}]', values, questions)
    results = []
    for i, question in enumerate(questions):
        row = {name: float(values[i]) for name, values in numbers.items()}
        results.append(question._replace(numbers=row))
    return results
