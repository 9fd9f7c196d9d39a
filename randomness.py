"""Random numbers drawn from keys, a function of the seed and of a position in the data. Imports no jax."""

import hashlib
import math
import threading

import numpy as np
from numpy.typing import NDArray


def random_bits(shape: tuple[int, ...], *key: int | str) -> NDArray:
    """Return uint64 of a shape, the same on every machine: Philox, keyed by a hash of `key`.

    A key is the purpose, then the seed and the position in the data.
    """
    philox = random_generator.keyed(int(digest(list(key)), base=16))
    return philox.random_raw(math.prod(shape)).reshape(shape)


class RandomGenerator(threading.local):
    """One Philox generator per thread: setting its key is faster than making another."""

    def __init__(self):
        self._philox = np.random.Philox(key=0)
        self._state = self._philox.state  # before the first number

    def keyed(self, key: int) -> np.random.Philox:
        """Return the generator, reset, with a key of 128 bits."""
        high, low = divmod(key, 1 << 64)
        self._state['state']['key'][:] = (low, high)
        self._philox.state = self._state
        return self._philox


random_generator = RandomGenerator()


def permutation(length: int, *key: int | str) -> NDArray:
    return np.argsort(random_bits((length,), *key), kind='stable')


def digest(content: list) -> str:
    """Return a hash of the text that `content` prints as."""
    return hashlib.blake2b(str(content).encode(), digest_size=16).hexdigest()


def random_fractions(shape: tuple[int, ...], *key: int | str) -> NDArray:
    """Return float64 from 0 to below 1."""
    return (random_bits(shape, *key) >> 11) * 2.0**-53


def random_integers(
    shape: tuple[int, ...], low: int, high: int | NDArray, *key: int | str
) -> NDArray:
    """Return int64 from `low` to below `high`."""
    return low + (random_fractions(shape, *key) * (high - low)).astype(np.int64)
