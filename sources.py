"""Where documents come from: files of text and JSON Lines, plain or gzipped, and this Python's documentation.

Imports no jax.
"""

import ast
import collections
import concurrent.futures
import dataclasses
import functools
import glob
import gzip
import hashlib
import importlib
import itertools
import json
import math
import os
import pathlib
import sysconfig
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np
from absl import logging

import paths

MAX_BLOCK_BYTES, MIN_BLOCKS, BLOCKS_PER_POOL = 1 << 16, 4096, 8  # a lane holds one pool of blocks
# Of gzipped shards: lines in all pools together, in one pool at least; shards open at least.
POOL_LINES, MIN_POOL_LINES, MIN_OPEN_SHARDS = 100_000, 256, 16
# A longer line of plain text is cut into documents of at most CUT_BYTES.
MAX_LINE_BYTES, CUT_BYTES = 1 << 20, 1 << 11
# Of a file's digest: a file up to DIGEST_WHOLE_BYTES counts whole, else DIGEST_BLOCKS blocks of it.
DIGEST_WHOLE_BYTES, DIGEST_BLOCKS, DIGEST_BLOCK_BYTES = 1 << 20, 16, 1 << 12


# Sources: a part is files that are read alike; `part.open` gives pools of documents, lane by lane.


class FileRecord(NamedTuple):
    """A file of a corpus. The digest, of `content_digest`, says what it holds, whatever its name."""

    split: str  # 'train' or 'validation'
    path: str
    num_bytes: int
    digest: str

    @property
    def content(self) -> tuple[str, int, str]:
        return self.split, self.num_bytes, self.digest


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus. Where `validation` is None, the hash of a document's text says which split it is in."""

    description: str
    corpus: str  # 'files', 'pydoc' or 'pydoc instead of C4'
    fingerprint: str  # a run goes on with the same corpus only
    validation_fraction: float
    bad_lines: 'BadLines'
    train: 'Blocks | Shards'
    validation: 'Blocks | Shards | None' = None
    files: tuple[FileRecord, ...] = ()  # in the order in which they are read

    def files_as_json(self) -> list[dict[str, Any]]:
        """Return `files` as `describe_changes` and JSON take them."""
        return [file._asdict() for file in self.files]

    def may_hold(self, split: str) -> bool:
        """Return False where the settings alone say that `split` has no document."""
        if self.validation is not None:
            return True
        empty_at = 0.0 if split == 'validation' else 1.0
        return self.validation_fraction != empty_at

    def open(self, split: str, num_lanes: int, seed: int, starts: dict) -> Callable:
        """-> documents(epoch, lane, unit, index), which yields (unit, index, name, text) from a pool of the
        lane on, and a document in it. `starts`: lane -> (epoch, unit) where each lane of this process begins;
        a lane asks for each of its epochs once, in order."""
        part = self.validation if split == 'validation' and self.validation else self.train

        def keep(name: str, text: str) -> tuple[str, str]:
            """No document keeps the place, in its pool, of one that is in the other split."""
            is_in_split = self.validation or split == self.split_of(text)
            return (name, text) if text and is_in_split else ('', '')

        pools = part.open(num_lanes, seed, starts, keep)

        def documents(epoch: int, lane: int, unit=0, index=0) -> Iterator[tuple]:
            for at, pool in pools(epoch, lane, unit):
                order = permutation(len(pool), 'pool', seed, epoch, lane, at)
                for i in range(index, len(pool)):
                    name, text = pool[order[i]]
                    if text:
                        yield at, i, name, text
                index = 0

        return documents

    def split_of(self, text: str) -> str:
        is_validation = zlib.crc32(text.encode()) < self.validation_fraction * 2**32
        return 'validation' if is_validation else 'train'

    def documents(
        self, split: str, epoch: int, lane: int, num_lanes: int, seed: int, unit=0, index=0
    ) -> Iterator[tuple[int, int, str, str]]:
        """Those of one lane alone."""
        documents = self.open(split, num_lanes, seed, {lane: (epoch, unit)})
        return documents(epoch, lane, unit, index)

    def faults(self) -> tuple[list[str], int]:
        """The lines left out since the last call, described (the last 10 at most), and the number of all."""
        return self.bad_lines.take()


def open_source(config) -> Source:
    """Open the files of `config.files` (globs, comma-separated), else the prose of this Python.

    Files are read in the order of their digests, so that names and folders change nothing. Raises ValueError
    for settings that do not fit together, for files that cannot be read and, unless it may skip them, for
    empty files.
    """
    if not config.text_field:
        raise ValueError("data.text_field='' names no field; C4's is 'text'")
    if not 0 <= config.validation_fraction <= 1:
        raise ValueError(
            f'data.validation_fraction={config.validation_fraction}: must lie in [0, 1]: '
            'use 0.01 for a document in a hundred'
        )
    bad_lines = BadLines(config.on_bad_line, config.max_bad_fraction)
    names = find_files('data.files', config.files, bad_lines)
    validation_names = find_files('data.validation_files', config.validation_files, bad_lines)
    if validation_names and not names:
        raise ValueError(
            f'data.validation_files={config.validation_files!r} needs data.files besides: name both'
        )
    if not names:
        what, c4 = "this Python's documentation", config.task.startswith('c4')
        source = in_memory(what, pydoc_documents(), config.validation_fraction)
        return dataclasses.replace(source, corpus='pydoc instead of C4' if c4 else 'pydoc')
    train = read_records('data.files', 'train', names)
    validation = read_records('data.validation_files', 'validation', validation_names)
    check_disjoint(train, validation)
    warn_of_json_in_text(names + validation_names)

    def documents_of(records: list[FileRecord]) -> 'Blocks | Shards':
        return text_files([record.path for record in records], config.text_field, bad_lines)

    num_bytes = sum(record.num_bytes for record in train)
    return Source(
        description=f'{len(train):,} text file(s), {num_bytes:,} bytes',
        corpus='files',
        fingerprint=digest([record.content for record in train + validation]),
        validation_fraction=config.validation_fraction,
        bad_lines=bad_lines,
        train=documents_of(train),
        validation=documents_of(validation) if validation else None,
        files=tuple(train + validation),
    )


def describe_changes(old: list[dict] | None, new: list[dict]) -> str:
    """Say in one line how the corpus of a run differs from today's, and what to do.

    `old` and `new` are what `Source.files_as_json` gave then and gives now: without entries for the
    documentation of Python. None: the run kept no list.
    """
    if old is None:
        return (
            'the corpus is another one, and the run kept no list of its files: name the files it '
            'began with, or another --workdir'
        )
    if not old and not new:
        return (
            "the run learned from another Python's documentation: use that Python, or name "
            'another --workdir'
        )
    if not old:
        return (
            "the run learned from this Python's documentation, not from files: set data.files='', "
            'or name another --workdir'
        )
    then, now = ([FileRecord(**record) for record in records] for records in (old, new))
    missing = without(then, now)
    added = without(now, then)
    changed = [file for file in missing if (file.split, file.path) in {f[:2] for f in added}]
    paths_changed = {file[:2] for file in changed}
    kinds = [('changed', file) for file in changed]
    kinds += [('missing', file) for file in missing if file[:2] not in paths_changed]
    kinds += [('new', file) for file in added if file[:2] not in paths_changed]
    if not kinds:
        return 'the files hold what they held'
    told = ', '.join(f'{file.path} ({kind})' for kind, file in kinds[:10])
    more = f' and {len(kinds) - 10:,} more' if len(kinds) > 10 else ''
    return (
        f"the files do not hold what the run's held: {told}{more}: restore those files, or name "
        'another --workdir'
    )


def without(files: list[FileRecord], others: list[FileRecord]) -> list[FileRecord]:
    """Return those of `files` whose content is not in `others`, as often as it is there."""
    left = collections.Counter(file.content for file in others)
    only = []
    for file in files:
        if left[file.content]:
            left[file.content] -= 1
        else:
            only.append(file)
    return only


# Files: a user's names become records, ordered by what the files hold.


def find_files(key: str, patterns: str, bad_lines: 'BadLines') -> list[str]:
    """Return the paths that `patterns` names, sorted, without empty files."""
    if patterns == '':
        return []
    names = [name.strip() for name in patterns.split(',')]
    if os.path.isfile(patterns):  # a name may hold a comma
        names = [patterns]
    names = [name for name in names if name]
    if not names:
        raise ValueError(f"{key}={patterns!r} names no file: name one, or set it to ''")
    found = {path for name in names for path in matching_files(key, name)}
    empty = {path for path in found if os.path.getsize(path) == 0}
    if found == empty:
        raise ValueError(f'{key}={patterns!r} matches empty files only; correct it')
    for path in sorted(empty):
        bad_lines.add(path, 0, EMPTY)
    return sorted(found - empty)


def matching_files(key: str, name: str) -> list[str]:
    """Return the absolute paths of the files that `name`, a path or a glob, stands for."""
    if '://' in name:
        raise ValueError(
            f'{key}: {name!r} is not on a disk, and data is read from disks only: download it, and '
            'name the copy'
        )
    path = disk_path(key, name)
    if path.is_dir():
        raise ValueError(f'{key}: {name!r} is a folder: name its files: {path}/*.txt')
    # What exists is taken literally, so that [1] in the name of a file or folder is no glob.
    literal = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    rest = path.relative_to(literal).parts
    matches = glob.glob(os.path.join(glob.escape(str(literal)), *rest))
    files = [match for match in matches if not os.path.isdir(match)]
    if not files:
        raise ValueError(f'{key}: {name!r} matches no file; correct it')
    for file in files:
        if not disk_path(key, file).is_file():
            raise ValueError(
                f'{key}: {file} is a link to nothing, or no regular file: restore it, copy it to a '
                'file, or leave it out'
            )
    return files


def disk_path(key: str, name: str) -> pathlib.Path:
    try:
        return paths.disk_path(name)
    except ValueError as error:
        raise ValueError(f'{key}: {error}') from error


def read_records(key: str, split: str, names: list[str]) -> list[FileRecord]:
    """Return the records of files, in the order in which they are read."""

    def record(path: str) -> FileRecord:
        try:
            paths.check_not_lfs(pathlib.Path(path))
            num_bytes = os.path.getsize(path)
            return FileRecord(
                split=split, path=path, num_bytes=num_bytes, digest=content_digest(path, num_bytes)
            )
        except OSError as error:
            raise ValueError(
                f'{key}: {path} cannot be read ({error.strerror}): correct its permissions, or '
                'leave it out'
            ) from error
        except ValueError as error:
            raise ValueError(f'{key}: {error}') from None

    with concurrent.futures.ThreadPoolExecutor(max_workers=16) as threads:
        records = list(threads.map(record, names))
    return sorted(records, key=lambda record: (record.num_bytes, record.digest))


def content_digest(path: str, num_bytes: int) -> str:
    """Return a hash of a file's kind (text or JSON Lines), size and content.

    Of a file above 1 MiB sixteen evenly spaced blocks of 4 KiB count, the first and the last among them, so
    that terabytes open in seconds. A change of the same size between them is not seen, but of a gzipped file,
    whose last bytes are the checksum of all.
    """
    starts = [0]
    length = num_bytes
    if num_bytes > DIGEST_WHOLE_BYTES:
        length = DIGEST_BLOCK_BYTES
        last = num_bytes - length
        starts = [i * last // (DIGEST_BLOCKS - 1) for i in range(DIGEST_BLOCKS)]
    content = hashlib.blake2b(f'{is_json(path)} {num_bytes}'.encode(), digest_size=16)
    with open(path, 'rb') as file:
        for start in starts:
            file.seek(start)
            content.update(file.read(length))
    return content.hexdigest()


def check_disjoint(train: list[FileRecord], validation: list[FileRecord]) -> None:
    """Raise ValueError if a file of `train` is in `validation`, too: under any name, or a copy of it."""
    in_train: dict[tuple, FileRecord] = {}
    for file in train:
        in_train[identity(file)] = file
        in_train[file.num_bytes, file.digest] = file
    for file in validation:
        same = in_train.get(identity(file)) or in_train.get((file.num_bytes, file.digest))
        if same:
            raise ValueError(
                f'{same.path} of data.files and {file.path} of data.validation_files hold the '
                'same: a file is for one split: leave one of them out'
            )


def identity(file: FileRecord) -> tuple[str, int, int]:
    stat = os.stat(file.path)
    return 'inode', stat.st_dev, stat.st_ino


def warn_of_json_in_text(names: list[str]) -> None:
    """Warn of each file of JSON Lines that is read as plain text because of its name."""
    names = [name for name in names if not is_json(name)]
    with concurrent.futures.ThreadPoolExecutor(max_workers=16) as threads:
        for name, looks_like_json in zip(names, threads.map(begins_with_json, names), strict=True):
            if looks_like_json:
                logging.warning(
                    '%s is read as plain text, but its lines are JSON objects: rename it to .jsonl '
                    'to read a field of them',
                    name,
                )


def begins_with_json(path: str) -> bool:
    """Return whether the first lines, twenty at most, are JSON objects."""
    num_lines = 0
    open_file = gzip.open if is_gzipped(path) else open
    try:
        with open_file(path, 'rb') as file:
            while num_lines < 20 and (line := file.readline(MAX_LINE_BYTES)):
                if line.strip():
                    num_lines += 1
                    if not isinstance(json.loads(line), dict):
                        return False
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return False
    return num_lines > 0


def is_gzipped(path: str) -> bool:
    return path.lower().endswith('.gz')


def is_json(path: str) -> bool:
    """Return whether the file holds JSON Lines, by its name."""
    return path.lower().removesuffix('.gz').endswith(('.json', '.jsonl', '.ndjson'))


def text_files(paths: list[str], text_field: str, bad_lines: 'BadLines') -> 'Blocks | Shards':
    """A document per line, names are path:offset; in a gzipped file path:line."""
    gzipped = [path for path in paths if is_gzipped(path)]
    if gzipped and len(gzipped) < len(paths):
        one = next(path for path in paths if path not in gzipped)
        raise ValueError(f'{gzipped[0]} is gzipped, {one} is not: gzip all files, or none')

    def parse(path: str, place: int, line: bytes) -> tuple[str, str]:
        """(name, text); '' where the line holds no document."""
        bad_lines.num_read += 1
        try:
            return f'{path}:{place}', line_text(line, text_field if is_json(path) else None)
        except ValueError as error:
            bad_lines.add(path, place, str(error))
            return f'{path}:{place}', ''

    return Shards(paths, parse, bad_lines) if gzipped else blocks_of_bytes(paths, parse)


def line_text(line: bytes, field: str | None) -> str:
    """A line, or a field of the JSON object on it; ValueError says what is wrong with it."""
    try:
        text = line.decode().strip()
        if not text or field is None:
            return text
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError(f'{text!r:.40} is no JSON object; write {{"{field}": ...}}')
        if field not in record:
            has = ', '.join(map(repr, list(record)[:10])) or 'none'
            raise ValueError(f'no field {field!r}, its fields are: {has}; set data.text_field')
        if not isinstance(record[field], str):
            value = f'field {field!r} is {record[field]!r:.40}'
            raise ValueError(f'{value}, no string; set data.text_field')
        record[field].encode()
        return record[field].strip()
    except UnicodeDecodeError as error:
        raise ValueError(f'byte {error.start + 1} is not UTF-8; convert the file') from None
    except UnicodeEncodeError:  # JSON can write half a surrogate pair, as \ud800
        raise ValueError(f'field {field!r} holds half a surrogate pair; correct it') from None
    except json.JSONDecodeError as error:
        raise ValueError(f'no JSON: {error.msg} at character {error.pos + 1}; correct it') from None
    except RecursionError:
        raise ValueError('JSON that is nested too deeply; correct it') from None


EMPTY = 'the file is empty; copy it again, or remove it'


class BadLines:
    """Lines that cannot be read. They stop the run, or are left out and counted, each once, as long as they
    are few. Threads may share it."""

    def __init__(self, action: str = 'stop', max_fraction: float = 0.0):
        if action not in ('stop', 'skip'):
            raise ValueError(f"data.on_bad_line={action!r}: must be 'stop' or 'skip'")
        if not 0 <= max_fraction <= 1:
            raise ValueError(f'data.max_bad_fraction={max_fraction}: must be in [0, 1]')
        self.action, self.max_fraction = action, max_fraction
        self.num_read = 0  # a bound's measure: two threads may lose a line
        self.places: set[tuple[str, int]] = set()
        self.untold: collections.deque[tuple] = collections.deque(maxlen=10)
        self.lock = threading.Lock()

    def add(self, path: str, place: int, why: str) -> None:
        """`place`: a byte offset, in a gzipped file the number of the line. Raises ValueError."""
        if self.action == 'stop':
            hint = 'data.on_bad_line=stop (skip leaves it out)'
            raise ValueError(f'{hint}: {self.describe(path, place, why)}')
        with self.lock:
            if (path, place) in self.places:
                return
            self.places.add((path, place))
            self.untold.append((path, place, why))
            bound = max(10, self.max_fraction * self.num_read)
            if len(self.places) > bound:
                found = f'{len(self.places):,} bad lines among the {self.num_read:,} read'
                rule = f'more than {bound:,.0f} (data.max_bad_fraction={self.max_fraction}, or 10)'
                last = self.describe(path, place, why)
                raise ValueError(f'{found}, {rule}: correct the files; the last is {last}')

    def take(self) -> tuple[list[str], int]:
        with self.lock:
            untold, num_bad = list(self.untold), len(self.places)
            self.untold.clear()
        return [self.describe(*fault) for fault in untold], num_bad

    @staticmethod
    def describe(path: str, place: int, why: str) -> str:
        if is_gzipped(path):
            line = max(place, 1)  # an empty file has none
        else:  # counted only now: that reads the file up to the place
            with open(path, 'rb') as file:
                chunks = iter(lambda: file.read(min(1 << 20, place - file.tell())), b'')
                line = 1 + sum(chunk.count(b'\n') for chunk in chunks)
        return f'line {line} of {path}: {why}'


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Documents that can be read anywhere; `read(block)` gives those of one block as (name, text).

    An epoch permutes the blocks and deals them out to the lanes, each of which reads pools of them.
    """

    num_blocks: int
    read: Callable[[int], list[tuple[str, str]]]

    def open(self, num_lanes: int, seed: int, starts: dict, keep: Callable) -> Callable:
        """-> pools(epoch, lane, unit), which yields (unit, documents), from a pool of the lane on; each
        document is what `keep(name, text)` makes of it."""

        def pools(epoch: int, lane: int, unit: int) -> Iterator[tuple[int, list]]:
            order = epoch_order(self.num_blocks, seed, epoch)
            # Where blocks are fewer than lanes, every lane has its turn.
            blocks = order[(lane + epoch) % num_lanes :: num_lanes].tolist()
            for start in range(unit * BLOCKS_PER_POOL, len(blocks), BLOCKS_PER_POOL):
                own = map(self.read, blocks[start : start + BLOCKS_PER_POOL])
                documents = itertools.chain.from_iterable(own)
                yield start // BLOCKS_PER_POOL, [keep(*document) for document in documents]

        return pools


def in_memory(what: str, documents: list[tuple[str, str]], validation_fraction: float) -> Source:
    """(name, text) of each document, each a block."""
    fingerprint = digest([text for _, text in documents])
    what = f'{len(documents):,} texts of {what}'
    blocks = Blocks(len(documents), lambda block: [documents[block]])
    return Source(what, 'memory', fingerprint, validation_fraction, BadLines(), blocks)


def blocks_of_bytes(paths: list[str], parse: Callable) -> Blocks:
    """A line is in the block where it starts; of a long line of plain text a block has its part."""
    sizes = [os.path.getsize(path) for path in paths]
    block_bytes = min(max(sum(sizes) // MIN_BLOCKS, 1), MAX_BLOCK_BYTES, MAX_LINE_BYTES // 2)
    first_blocks = np.cumsum([0] + [-(-size // block_bytes) for size in sizes])
    readers = [
        whole_lines if is_json(path) else LineCutter(size, block_bytes).lines
        for path, size in zip(paths, sizes, strict=True)
    ]

    def read(block: int) -> list[tuple[str, str]]:
        file_index = int(np.searchsorted(first_blocks, block, side='right')) - 1
        path, start = paths[file_index], (block - int(first_blocks[file_index])) * block_bytes
        with open(path, 'rb') as file:
            lines = readers[file_index](file, start, start + block_bytes)
            return [parse(path, offset, line) for offset, line in lines]

    return Blocks(int(first_blocks[-1]), read)


def whole_lines(file: IO[bytes], start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that start in [start, end)."""
    offset = start
    if start:
        file.seek(start - 1)
        skipped = file.readline(end - start)  # ends a line that began in an earlier block
        offset = start - 1 + len(skipped) if skipped.endswith(b'\n') else end
    while offset < end and (line := file.readline()):
        yield offset, line
        offset += len(line)


class LineCutter:
    """Reads blocks of a file of plain text, and cuts its long lines: of more than MAX_LINE_BYTES, newline
    included.

    A long line is cut at the ends of the blocks, and each block's part again, every CUT_BYTES. Whether a line is
    long and where it is cut depends on the file alone: blocks agree, and have every byte once.
    """

    def __init__(self, num_bytes: int, block_bytes: int):
        self.num_bytes, self.block_bytes = num_bytes, block_bytes
        self.in_long_line = np.zeros(num_bytes // block_bytes + 2, bool)  # blocks, as far as seen

    def lines(self, file: IO[bytes], start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, line) of the short lines that start in [start, end), and of the parts there of long
        lines."""
        offset, is_long = start, False
        file.seek(max(start - 1, 0))
        if start and file.read(1) != b'\n':
            end_of_line = self.end_of_short_line(file, start)
            is_long = end_of_line is None
            offset = self.cut_at(file, start) if end_of_line is None else end_of_line
        file.seek(offset)
        while offset < end:
            line = file.readline(end - offset if is_long else MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                is_long = True
                self.remember(offset, offset + len(line))
            if not is_long:
                yield offset, line
                offset += len(line)
                continue
            line = line[: end - offset]
            goes_on = not line.endswith(b'\n') and end < self.num_bytes
            if goes_on:
                line = line[: self.cut_at(file, end) - offset]
            for part in cut(line):
                yield offset, part
                offset += len(part)
            if goes_on:
                return
            is_long = False
            file.seek(offset)

    def end_of_short_line(self, file: IO[bytes], place: int) -> int | None:
        """Return where the line ends that goes on at `place`, where a block starts; None if it is long."""
        if self.in_long_line[place // self.block_bytes]:
            return None
        for look_back in (1 << 12, 1 << 16, MAX_LINE_BYTES):
            width = min(look_back, place, MAX_LINE_BYTES)
            file.seek(place - width)
            newline = file.read(width).rfind(b'\n')
            if newline >= 0 or width == place:
                break
        else:
            self.remember(place - MAX_LINE_BYTES, place + 1)
            return None
        start = place - width + newline + 1
        file.seek(start)
        line = file.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            self.remember(start, start + len(line))
            return None
        return start + len(line)

    def remember(self, start: int, end: int) -> None:
        """Note that all of [start, end) is of one long line."""
        self.in_long_line[start // self.block_bytes + 1 : (end - 1) // self.block_bytes + 1] = True

    def cut_at(self, file: IO[bytes], place: int) -> int:
        """Return where the long line is cut that goes on at `place`, the end of a block: in that block, in the
        line."""
        file.seek(place - self.block_bytes)
        before = file.read(self.block_bytes)
        line = before[before.rfind(b'\n') + 1 :]
        return place - len(line) + cut_before(line + file.read(1), len(line))


def cut(line: bytes) -> Iterator[bytes]:
    """Yield the parts of a long line, at most CUT_BYTES each."""
    start = 0
    while len(line) - start > CUT_BYTES:
        window = line[start : start + CUT_BYTES + 1]
        length = cut_before(window, CUT_BYTES) or CUT_BYTES
        yield window[:length]
        start += length
    if start < len(line):
        yield line[start:]


def cut_stream(file: IO[bytes] | gzip.GzipFile, line: bytes) -> Iterator[bytes]:
    """Yield the parts of a long line that begins with `line` and goes on in `file`."""
    while not line.endswith(b'\n') and (more := file.readline(MAX_LINE_BYTES)):
        *parts, line = cut(line)
        yield from parts
        line += more
    yield from cut(line)


def cut_before(line: bytes, limit: int) -> int:
    """Return the place of a cut at `limit` or before: after a space, else before the character there."""
    spaces = [line.rfind(space, 0, limit) for space in (b' ', b'\t', b'\r', b'\v', b'\f')]
    if max(spaces) >= 0:
        return max(spaces) + 1
    place = limit
    while place > max(limit - 3, 0) and line[place] & 0xC0 == 0x80:  # inside of a character
        place -= 1
    return place if line[place] >= 0xC0 else limit


@dataclasses.dataclass(frozen=True)
class Shards:
    """Gzipped files, read from their beginnings only. `parse(path, number, line)` gives (name, text).

    An epoch permutes the shards and deals them out to the lanes, each of which reads rounds of some shards,
    interleaved. Where shards are fewer, neighbouring lanes share one, line by line. A unit is the number of
    the round << 32 | the number of the pool in it.
    """

    paths: list[str]
    parse: Callable[[str, int, bytes], tuple[str, str]]
    bad_lines: BadLines

    def open(self, num_lanes: int, seed: int, starts: dict, keep: Callable) -> Callable:
        """As that of Blocks."""
        return ShardReader(self, num_lanes, seed, starts, keep).pools

    def lines(self, path: str) -> Iterator[tuple[str, int, bytes]]:
        """(path, number, line) of each line that can be read; of a long one each of its parts."""
        number = 1
        limit = -1 if is_json(path) else MAX_LINE_BYTES + 1
        try:
            with gzip.open(path) as file:
                while line := file.readline(limit):
                    if limit < 0 or len(line) < limit:
                        yield path, number, line
                    else:
                        for part in cut_stream(file, line):
                            yield path, number, part
                    number += 1
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.bad_lines.add(path, number, f'broken gzip ({error}); copy the file again')
            return
        if number == 1:
            self.bad_lines.add(path, 0, EMPTY)


class ShardReader:
    """Shards as the lanes of one process read them: what lanes share is decompressed once."""

    def __init__(self, shards: Shards, num_lanes: int, seed: int, starts: dict, keep: Callable):
        self.shards, self.num_lanes, self.seed, self.keep = shards, num_lanes, seed, keep
        self.starts = dict(starts)  # own lane -> (epoch, unit) where it opens a shard next
        self.shared: dict[tuple[int, int], SharedShard] = {}  # that own lanes will come to
        self.pool_lines = max(POOL_LINES // num_lanes, MIN_POOL_LINES)

    def pools(self, epoch: int, lane: int, unit: int) -> Iterator[tuple[int, list]]:
        turn, pool = divmod(unit, 1 << 32)
        while own := self.documents_of_round(epoch, lane, turn, pool * self.pool_lines):
            while documents := list(itertools.islice(own, self.pool_lines)):
                yield turn << 32 | pool, documents
                pool += 1
            turn, pool = turn + 1, 0

    def documents_of_round(self, epoch: int, lane: int, turn: int, first: int) -> Iterator | None:
        """The lane's documents from the `first` line of a round on; None after the last round."""
        num_shards, num_lanes = len(self.shards.paths), self.num_lanes
        order = epoch_order(num_shards, self.seed, epoch)
        seat = (lane + epoch) % num_lanes  # every lane has its turn
        if num_shards < num_lanes:
            k = seat * num_shards // num_lanes
            seats = range(-(-k * num_lanes // num_shards), -(-(k + 1) * num_lanes // num_shards))
            members = [(seat - epoch) % num_lanes for seat in seats]
            return None if turn else self.share(epoch, lane, members, self.shards.paths[order[k]])
        num_open = -(-MIN_OPEN_SHARDS // num_lanes)
        own = order[seat::num_lanes][turn * num_open : (turn + 1) * num_open]
        if not len(own):
            return None
        by_turns = itertools.zip_longest(*(self.shards.lines(self.shards.paths[i]) for i in own))
        lines = filter(None, itertools.chain.from_iterable(by_turns))
        return map(self.document, itertools.islice(lines, first, None))

    def document(self, line: tuple[str, int, bytes]) -> tuple[str, str]:
        return self.keep(*self.shards.parse(*line))

    def share(self, epoch: int, lane: int, members: list[int], path: str) -> Iterator:
        """The lane's documents of the shard that the lanes `members` share in this epoch."""
        firsts = {}  # member of this process that is still to come -> the first of its lines
        for member, owner in enumerate(members):
            at, unit = self.starts.get(owner, (epoch + 1, 0))
            if at <= epoch:
                firsts[member] = unit * self.pool_lines if at == epoch else 0
        opened = self.shared.pop((epoch, members[0]), None)
        open_lines = functools.partial(self.shards.lines, path)
        shard = opened or SharedShard(
            open_lines, self.document, len(members), firsts, 4 * self.pool_lines
        )
        if len(firsts) > 1:
            self.shared[epoch, members[0]] = shard
        self.starts[lane] = epoch + 1, 0
        return shard.documents(members.index(lane))


class SharedShard:
    """Deals out the lines of a shard: line j is of member j % num_members, and its document waits for those
    in `firsts`, from the first of its own lines on that each wants. A member for whom `most_waiting` texts
    wait is left behind and reads on by itself, so that little is held."""

    def __init__(self, open_lines: Callable, document: Callable, num_members, firsts, most_waiting):
        self.settings = open_lines, document, num_members
        self.next, self.most_waiting = firsts, most_waiting  # member -> the next of its lines
        self.waiting: dict[int, collections.deque] = {i: collections.deque() for i in firsts}
        self.num_texts: collections.Counter[int] = collections.Counter()  # that wait
        self.left_behind: set[int] = set()
        self.numbered = enumerate(open_lines())

    def documents(self, member: int) -> Iterator[tuple[str, str]]:
        own = self.waiting[member]
        while own or member not in self.left_behind and self.read_for(member):
            name, text = own.popleft()
            self.num_texts[member] -= bool(text)
            yield name, text
        if member in self.left_behind:
            rest = {member: self.next[member]}
            yield from SharedShard(*self.settings, rest, self.most_waiting).documents(member)

    def read_for(self, member: int) -> bool:
        """Reads until something waits for the member; False at the end."""
        _, document, num_members = self.settings
        for number, line in self.numbered:
            turn, owner = divmod(number, num_members)
            if turn == self.next.get(owner):
                if self.num_texts[owner] == self.most_waiting:
                    self.left_behind.add(owner)
                    continue
                self.waiting[owner].append(document(line))
                self.num_texts[owner] += bool(self.waiting[owner][-1][1])
                self.next[owner] += 1
                if owner == member:
                    return True
        return False


def digest(content: list) -> str:
    return hashlib.blake2b(str(content).encode(), digest_size=16).hexdigest()


def pydoc_documents() -> list[tuple[str, str]]:
    """(name, text) of the English that comes with every Python: help topics and docstrings."""
    names: dict[str, str] = {}  # text -> name; equal texts count once
    root = pathlib.Path(sysconfig.get_path('stdlib'))
    left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
    definitions = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob('*.py')):
        parts = path.relative_to(root).with_suffix('').parts
        try:
            nodes = [] if left_out & set(parts) else ast.walk(ast.parse(path.read_bytes()))
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, definitions) and (text := ast.get_docstring(node, clean=False)):
                name = '.'.join([*parts, getattr(node, 'name', '')]).rstrip('.')
                names.setdefault(' '.join(text.split()), name)
    try:
        topics = importlib.import_module('pydoc_data.topics').topics
    except ImportError:  # some distributions leave it out
        topics = {}
    for topic in sorted(topics):
        names.setdefault(' '.join(topics[topic].split()), f'topics.{topic}')
    return [(name, text) for text, name in names.items() if len(text) >= 40]


def random_bits(shape: tuple[int, ...], *key: int | str) -> np.ndarray:
    """uint64, the same everywhere: Philox, keyed by a hash of (purpose, seed, place)."""
    generator = np.random.Philox(key=int(digest(list(key)), base=16))
    return generator.random_raw(math.prod(shape)).reshape(shape)


def permutation(length: int, *key: int | str) -> np.ndarray:
    return np.argsort(random_bits((length,), *key), kind='stable')


@functools.lru_cache(maxsize=4)
def epoch_order(num_blocks: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of all blocks; kept, because every lane asks for it."""
    return permutation(num_blocks, 'epoch', seed, epoch)
