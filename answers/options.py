"""The options of decoding, each with its default, range and help. Imports no jax."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.setting import FRACTION, SIZE, Range, Setting, check_allowed
from messages import Refused

Text = str | Sequence[int] | NDArray  # or its ids
TEXTS = ('bad_words', 'allowed', 'stop')


def option(default: Any, help: str, limits: Range | None = None) -> Any:
    """Return a field of `Decoding`. `limits` hold for each value of a tuple."""
    setting = Setting(default, limits)
    return dataclasses.field(default=default, metadata={'help': help, 'setting': setting})


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How answers are found: the options of `infer.T5.generate`, and the settings config.decode.

    Filters, from `repetition_penalty` on, change the choice in transformers' order: of the most likely token, of
    drawn tokens and of beams. They change the scores of beams, but no others.
    """

    max_length: int = option(128, 'Most tokens of an answer, EOS included.', SIZE)
    beam_size: int = option(1, 'Beams of a beam search. 1 for none.', Range(1, 1024))
    alpha: float = option(0.6, "Beams' brevity penalty: ((5 + length) / 6)^alpha.", Range(0, 100))
    temperature: float | Sequence[float] = option(
        0.0,
        'Above 0, draw tokens. `generate` takes one number, or one for each input.',
        Range(0, 1e6),
    )
    top_k: int = option(0, 'Draw from this many most likely tokens. 0 for all.', Range(0, 2**24))
    top_p: float = option(
        0.0, 'Draw from the most likely tokens with this total probability. 0 for all.', FRACTION
    )
    min_p: float = option(
        0.0, 'Draw from tokens with this share of the largest probability. 0 for all.', FRACTION
    )
    seed: int = option(0, 'The same seed draws the same answers.', Range(0, 2**32 - 1))
    num_return: int = option(1, 'Answers per input: the best beams, or samples.', Range(1, 1024))
    return_scores: bool = option(False, 'Whether answers come with their scores.')
    repetition_penalty: float = option(
        1.0, 'Above 1, make tokens that have occurred less likely.', Range(0, 100, without=(0,))
    )
    no_repeat_ngram_size: int = option(
        0, 'Size of n-grams that may occur once. 0 for any.', Range(0, 1024)
    )
    bad_words: Sequence[Text] = option((), "Texts that no answer has, as ('foo', 'bar').")
    min_length: int = option(
        0, 'Fewest tokens of an answer after its prompt, EOS not included.', Range(0, 2**20)
    )
    allowed: Sequence = option((), "The only answers, as ('yes', 'no'). () allows all.")
    filters: Sequence[Callable] = option((), 'Your own: see decode.filtered.')
    stop: Sequence[str] = option((), 'Texts that end an answer and are not part of it.')

    def __post_init__(self):
        for name in OPTIONS:  # programs are cached by their options
            value = hashable(getattr(self, name))
            if name in TEXTS and isinstance(value, str):
                value = (value,)
            object.__setattr__(self, name, value)

    def check(self) -> None:
        """Refuse options that are wrong, each or together."""
        for name, setting in SETTINGS.items():
            given = getattr(self, name)
            if setting.range is not None:
                for value in given if isinstance(given, tuple) else [given]:
                    check_allowed(name, value, setting.default, setting.range)
        if self.beam_size > 1 and self.is_random:
            raise Refused(f'beam_size={self.beam_size} draws nothing: set temperature=0.0')
        if self.num_return > self.beam_size and not self.is_random:
            raise Refused(f'num_return={self.num_return}: also set beam_size or temperature=1.0')
        for name in ('top_k', 'top_p', 'min_p'):
            if getattr(self, name) and not self.is_random:
                raise Refused(f'{name}={getattr(self, name)} is for samples: set temperature=1.0')
        if self.min_length >= self.max_length:
            raise Refused(f'min_length={self.min_length}: must be below max_length')

    @property
    def is_random(self) -> bool:
        return bool((np.ravel(self.temperature) > 0).any())

    @property
    def num_decodes(self) -> int:
        return max(self.beam_size, self.num_return)

    @property
    def is_allowed_per_input(self) -> bool:
        """Whether `allowed` has a list for each input, of texts or of lists of ids."""
        lists = [x for x in self.allowed if isinstance(x, tuple)]
        return any(not isinstance(x, int) for x in itertools.chain(*lists))

    @property
    def program(self) -> 'Decoding':
        """The options that a program is compiled for; the others are arrays of its batch."""
        return dataclasses.replace(
            self, max_length=128, temperature=0.0, seed=0, bad_words=(), allowed=(), stop=()
        )


OPTIONS = {field.name: field.metadata for field in dataclasses.fields(Decoding)}
SETTINGS: dict[str, Setting] = {name: x['setting'] for name, x in OPTIONS.items()}  # config.decode
del SETTINGS['filters']


def hashable(value):
    """Return `value` with tuples for its lists and arrays, and Python's numbers for numpy's."""
    if hasattr(value, 'tolist'):
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        return tuple(map(hashable, value))
    return value
