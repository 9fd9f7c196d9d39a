"""The parts of the denoising objectives: noise masks and token functions.

A mask is bool [rows, length], True for noise. A token function takes the ids int32 [rows, length]
and a mask, and returns ids of the same shape, with DROPPED for each removed token. Names are
as in t5/data/preprocessors.py. All randomness is a function of a key. Imports no jax.
"""

import numpy as np

from data import first_of_spans
from randomness import random_bits, random_fractions, random_integers

NUM_RESERVED_IDS = 3  # pad, EOS and unknown are never drawn
RANDOM_PROB = 0.1  # as in BERT


# Noise masks.


def iid_noise_mask(shape: tuple[int, int], density: float, *key: int | str) -> np.ndarray:
    """Return a mask in which each token is noise with probability `density`."""
    return random_fractions(shape, 'iid', shape[1], *key) < density


def random_prefix_noise_mask(shape: tuple[int, int], density: float, *key: int | str) -> np.ndarray:
    """Return a mask whose noise is a prefix of each row, of uniformly random length.

    At a density of 0.5 it has 1 to length - 1 tokens; at a lower density, its shortest length is greater.
    A single token is not noise. `density` is at most 0.5.
    """
    num_rows, length = shape
    longest = length - 1
    shortest = min(longest, max(1, round((1 - 2 * density) * longest)))
    prefixes = random_integers((num_rows, 1), shortest, longest + 1, 'prefix', length, *key)
    return np.arange(length) < prefixes


def without_spans_after(mask: np.ndarray, num_spans: int) -> np.ndarray:
    """Return a mask with only the first `num_spans` spans of each row."""
    return mask & (np.cumsum(first_of_spans(mask), axis=1) <= num_spans)


# Token functions.


def permute_tokens(tokens: np.ndarray, *key: int | str) -> np.ndarray:
    bits = random_bits(tokens.shape, 'permute', tokens.shape[1], *key) >> 1
    return np.take_along_axis(tokens, np.argsort(bits, axis=1, kind='stable'), axis=1)


def noise_token_to_random_token_or_sentinel(
    tokens: np.ndarray,
    mask: np.ndarray,
    vocabulary_size: int,
    sentinel_ids: np.ndarray,
    *key: int | str,
) -> np.ndarray:
    """Replace each token of noise by a random id, with probability RANDOM_PROB, or the first sentinel."""
    shape = tokens.shape
    ids = random_integers(shape, NUM_RESERVED_IDS, vocabulary_size, 'token', shape[1], *key)
    is_random = random_fractions(shape, 'token or sentinel', shape[1], *key) < RANDOM_PROB
    return np.where(mask, np.where(is_random, ids.astype(np.int32), sentinel_ids[0]), tokens)
