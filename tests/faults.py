"""Faults of files: what disks, copies and people do to them. Each is drawn from `rng`.

`others` are files whose content may be swapped with that of `file`; `older` is an earlier version of it.
"""

import os


def flip(rng, file, others, older):
    content = bytearray(file.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)


def truncate(rng, file, others, older):
    os.truncate(file, rng.randrange(max(file.stat().st_size, 1)))


def delete(rng, file, others, older):
    file.unlink()


def zero(rng, file, others, older):
    content = bytearray(file.read_bytes())
    if content:
        start = rng.randrange(len(content))
        end = rng.randint(start + 1, len(content))
        content[start:end] = bytes(end - start)
        file.write_bytes(content)


def swap(rng, file, others, older):
    other = rng.choice(others)
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def stale(rng, file, others, older):
    file.write_bytes(older.read_bytes())


FAULTS = [flip, truncate, delete, zero, swap, stale]


def contents(folder):
    """Return {path below a folder: content} of its files."""
    files = [file for file in folder.rglob('*') if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}
