"""Writes TensorBundles, Mesh-TF's checkpoints; shares nothing but Snappy with the reader in mesh_tf.py."""

import itertools
import os
from pathlib import Path

import google_crc32c
import pyarrow


def varint(number):
    low, high = number % 128, number // 128
    return bytes([low | 128]) + varint(high) if high else bytes([low])


def proto(*fields):
    """(number, value): int as varint, bytes with their length, ('fixed32', int)."""
    content = b''
    for number, value in fields:
        if isinstance(value, bytes):
            content += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, tuple):
            content += varint(number << 3 | 5) + value[1].to_bytes(4, 'little')
        else:
            content += varint(number << 3) + varint(value)
    return content


def masked(content):
    crc32c = google_crc32c.value(content)
    rotated = (crc32c >> 15) | (crc32c << 17) & 0xFFFFFFFF
    return (rotated + 0xA282EAD8) & 0xFFFFFFFF


def block(pairs, interval=4):
    content, restarts, last = b'', [], b''
    for i, (key, value) in enumerate(pairs):
        shared = len(os.path.commonprefix([last, key])) if i % interval else 0
        if i % interval == 0:
            restarts.append(len(content))
        rest, last = key[shared:], key
        content += varint(shared) + varint(len(rest)) + varint(len(value)) + rest + value
    numbers = [*(restarts or [0]), len(restarts or [0])]
    return content + b''.join(n.to_bytes(4, 'little') for n in numbers)


def table(pairs, compress=(0, 1), pairs_a_block=6):
    """A LevelDB table whose blocks are plain (0) and compressed (1) in turn."""
    content, handles, kinds = b'', [], itertools.cycle(compress)

    def add(entries):
        nonlocal content
        kind, body = next(kinds), block(entries)
        if kind:
            body = pyarrow.compress(body, 'snappy', asbytes=True)
        body += bytes([kind])
        handle = varint(len(content)) + varint(len(body) - 1)
        content += body + masked(body).to_bytes(4, 'little')
        return handle

    for i in range(0, len(pairs), pairs_a_block):
        part = pairs[i : i + pairs_a_block]
        handles.append((part[-1][0], add(part)))
    footer = add([]) + add(handles)
    return content + footer.ljust(40, b'\0') + bytes.fromhex('57fb808b247547db')


DTYPES = {'float32': 1, 'int32': 3, 'int64': 9, 'bfloat16': 14}


def bundle(prefix, arrays, num_shards=3, **options):
    """Writes it: array i into shard i % num_shards."""
    shards, pairs = [b''] * num_shards, {b'': proto((1, num_shards), (3, proto((1, 1))))}
    for i, (name, x) in enumerate(arrays.items()):
        shard, content = i % num_shards, x.tobytes()
        shape = proto(*((2, proto((1, n))) for n in x.shape))
        fields = {1: DTYPES[x.dtype.name], 2: shape, 3: shard, 4: len(shards[shard])}
        fields |= {5: len(content), 6: ('fixed32', masked(content))}
        shards[shard] += content
        fields = {n: value for n, value in fields.items() if value != 0}
        pairs[name.encode()] = proto(*fields.items())
    for i, content in enumerate(shards):
        Path(f'{prefix}.data-{i:05d}-of-{num_shards:05d}').write_bytes(content)
    Path(f'{prefix}.index').write_bytes(table(sorted(pairs.items()), **options))
    return Path(prefix)
