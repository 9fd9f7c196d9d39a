"""transformers' Flax weights, flax_model.msgpack, with the names and shapes of its safetensors.

Source: Flax flax/serialization.py for msgpack's extensions; transformers 4.57 models/t5/modeling_flax_t5.py.
"""

from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np

from messages import Refused

IS_CHUNKED = '__msgpack_chunked_array__'  # the key of an array above 1 GiB
UNPACK_ERRORS = (ValueError, TypeError, KeyError, AttributeError)  # from damaged content


def read_file(file: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by transformers' names. Reads all of it. Raises Refused."""
    try:
        tree = msgpack.unpackb(file.read_bytes(), object_hook=join_chunks, ext_hook=array_of)
        return dict(named_arrays('', tree))
    except UNPACK_ERRORS as error:
        raise Refused(f'{file} cannot be read ({error}): copy it again') from error


def array_of(code: int, payload: bytes) -> np.ndarray:
    shape, dtype, content = msgpack.unpackb(payload)
    return np.frombuffer(content, dtype).reshape(shape)  # jax registers 'bfloat16' with numpy


def join_chunks(node: dict) -> dict | np.ndarray:
    """Return the array of a node that stores it in chunks; return another node unchanged."""
    if IS_CHUNKED not in node:
        return node
    chunks = [node['chunks'][str(i)] for i in range(len(node['chunks']))]
    shape = [node['shape'][str(i)] for i in range(len(node['shape']))]
    return np.concatenate(chunks).reshape(shape)


def named_arrays(name: str, node: dict | np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of the arrays below a node of the tree. Flax's kernel is torch's weight transposed."""
    if not isinstance(node, np.ndarray):
        for part, child in node.items():
            yield from named_arrays(f'{name}.{part}' if name else part, child)
        return
    module, _, last = name.rpartition('.')
    yield f'{module}.weight', node.T if last == 'kernel' else node
