"""The options of decoding, with their defaults, ranges and help. Imports no jax."""

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
    """Return a field of `Decoding`. `limits` apply to each value of a tuple."""
    setting = Setting(default, limits)
    return dataclasses.field(default=default, metadata={'help': help, 'setting': setting})


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Options of decoding: the arguments of `infer.T5.generate`, and the settings config.decode.

    The options from `repetition_penalty` on are filters, applied in transformers' order to greedy decoding, sampling and
    beam search. They change the scores of beams, but no others.
    """

    max_length: int = option(128, 'Maximum tokens of an answer, with EOS.', SIZE)
    beam_size: int = option(1, 'Number of beams. 1 for no beam search.', Range(1, 1024))
    alpha: float = option(0.6, "Beams' brevity penalty: ((5 + length) / 6)^alpha.", Range(0, 100))
    temperature: float | Sequence[float] = option(
        0.0,
        'Above 0, draw tokens. `generate` takes one number, or one per input.',
        Range(0, 1e6),
    )
    top_k: int = option(0, 'Draw from the k most likely tokens. 0 for all.', Range(0, 2**24))
    top_p: float = option(
        0.0, 'Draw from the most likely tokens with this total probability. 0 for all.', FRACTION
    )
    min_p: float = option(
        0.0, 'Draw from tokens of at least this share of the top probability. 0 for all.', FRACTION
    )
    seed: int = option(0, 'The same seed draws the same answers.', Range(0, 2**32 - 1))
    num_return: int = option(1, 'Answers per input: the best beams, or samples.', Range(1, 1024))
    return_scores: bool = option(False, 'Whether to return scores with the answers.')
    repetition_penalty: float = option(
        1.0, 'Above 1, make repeated tokens less likely.', Range(0, 100, without=(0,))
    )
    no_repeat_ngram_size: int = option(
        0, 'Size of n-grams that may not repeat. 0 for none.', Range(0, 1024)
    )
    bad_words: Sequence[Text] = option((), "Texts that no answer may have, such as ('foo', 'bar').")
    min_length: int = option(
        0, 'Minimum tokens of an answer, without prompt and EOS.', Range(0, 2**20)
    )
    allowed: Sequence = option((), "The only answers, such as ('yes', 'no'). () allows all.")
    filters: Sequence[Callable] = option((), 'Your own filters: see decode.filtered.')
    stop: Sequence[str] = option((), 'Texts that end an answer and are not part of it.')

    def __post_init__(self):
        for name in OPTIONS:  # programs are cached by their options
            value = hashable(getattr(self, name))
            if name in TEXTS and isinstance(value, str):
                value = (value,)
            object.__setattr__(self, name, value)

    def check(self) -> None:
        """Raise Refused for invalid options and combinations."""
        for name, setting in SETTINGS.items():
            values = getattr(self, name)
            if setting.range is not None:
                for value in values if isinstance(values, tuple) else [values]:
                    check_allowed(name, value, setting.default, setting.range)
        if self.beam_size > 1 and self.is_random:
            raise Refused(f'beam_size={self.beam_size} does not draw tokens: set temperature=0.0')
        if self.num_return > self.beam_size and not self.is_random:
            raise Refused(f'num_return={self.num_return}: also set beam_size or temperature=1.0')
        for name in ('top_k', 'top_p', 'min_p'):
            if getattr(self, name) and not self.is_random:
                raise Refused(f'{name}={getattr(self, name)} needs samples: set temperature=1.0')
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
    """Return `value` with its lists and arrays as tuples, and numpy's numbers as Python's."""
    if hasattr(value, 'tolist'):
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        return tuple(map(hashable, value))
    return value
