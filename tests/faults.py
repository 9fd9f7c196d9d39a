"""Faults of files: what disks, copies and people do to them; `older` is an earlier version of a file."""

import os


def flip(rng, file, older):
    content = bytearray(file.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)


def truncate(rng, file, older):
    os.truncate(file, rng.randrange(max(file.stat().st_size, 1)))


def delete(rng, file, older):
    file.unlink()


def stale(rng, file, older):
    file.write_bytes(older.read_bytes())


FAULTS = [flip, truncate, delete, stale]


def contents(folder):
    """Return {path below a folder: content} of its files."""
    files = [file for file in folder.rglob('*') if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}
