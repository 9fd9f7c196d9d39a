"""The files of a corpus: their kinds, digests of their content, and their changes."""

import collections
import concurrent.futures
import glob
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import paths
from messages import Refused, first_ten
from run import buckets, hub

# A longer line of plain text is bad: a text without newlines would be one document.
MAX_LINE_BYTES = 1 << 20
# Files in buckets. A lane holds SEQUENTIAL_READ_AHEAD bytes of each gzipped shard that it reads.
SEQUENTIAL_READ_AHEAD = 2 << 20
NUM_THREADS = 16  # for files that are opened with a source
# The digest covers all of a small file, and some blocks of a larger one.
MAX_BYTES_DIGESTED_WHOLE = 1 << 20
DIGEST_BLOCKS = 16
DIGEST_BLOCK_BYTES = 1 << 12
# The kinds of files by the suffix before .gz; others are plain text.
KIND_OF_SUFFIX = {
    '.json': 'jsonl',
    '.jsonl': 'jsonl',
    '.ndjson': 'jsonl',
    '.csv': 'csv',
    '.tsv': 'tsv',
    '.parquet': 'parquet',
}
EMPTY_FILE = 'the file is empty; copy it again, or remove it'


class FileRecord(NamedTuple):
    """A file of a corpus. `digest` identifies its content, whatever its name."""

    split: str  # 'train' or 'validation'
    path: str
    num_bytes: int
    digest: str

    @property
    def content(self) -> tuple[str, int, str]:
        return self.split, self.num_bytes, self.digest


def is_gzipped(path: str) -> bool:
    return path.lower().endswith('.gz')


def kind_of(path: str) -> str:
    """Return 'jsonl', 'csv', 'tsv', 'parquet' or 'text': how a file is read, by its name."""
    suffix = os.path.splitext(path.lower().removesuffix('.gz'))[1]
    return KIND_OF_SUFFIX.get(suffix, 'text')


def describe_changes(old: Sequence[FileRecord], new: Sequence[FileRecord]) -> str:
    """Describe in one line how a run's files differ from today's, with the remedy. pydoc has no files."""
    if not old:
        return "the run learned from a Python's documentation: name no files"
    paths_of = {file.content: file.path for file in [*new, *old]}
    counts = collections.Counter(file.content for file in old)
    counts.subtract(file.content for file in new)
    changes = []
    for content, count in counts.items():
        if count > 0:
            changes.append(f'{paths_of[content]} (missing or changed)')
        elif count < 0:
            changes.append(f'{paths_of[content]} (new or changed)')
    if not changes:
        return 'tasks or rates of data.module changed: restore them'
    return f"the files differ from the run's: {first_ten(changes)}: restore those files"


def matching_files(name: str) -> dict[str, paths.FileStatus]:
    """Return the files that a path or a glob matches: absolute paths, or URLs."""
    files = {}
    if hub.is_name(name):
        from run import hub_client  # late: the client is large

        files = hub_client.matching_files(name)
    elif paths.is_in_bucket(name):
        files = buckets.matching_files(name)
    else:
        path = paths.disk_path(name)
        # The part of a path that exists is taken literally: [1] in its name is not a pattern.
        literal = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        pattern = os.path.join(glob.escape(str(literal)), *path.relative_to(literal).parts)
        for match in glob.glob(pattern, recursive=True):  # ** is any number of folders
            file = paths.disk_path(match)
            if file.is_file():
                files[match] = paths.status_of(match)
            elif not file.is_dir():
                raise Refused(f'{match} is not a regular file: restore it, or leave it out')
    if not files:
        raise Refused(f'{name!r} matches no file: correct it; for all files of a folder, FOLDER/*')
    return files


def read_records(split: str, files: Mapping[str, paths.FileStatus]) -> list[FileRecord]:
    """Return the records of files, in the order in which the files are read."""

    def read(path: str) -> FileRecord:
        return FileRecord(split, path, files[path].num_bytes, content_digest(path, files[path]))

    with concurrent.futures.ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
        return sorted(threads.map(read, files), key=lambda file: (file.num_bytes, file.digest))


def content_digest(path: str, status: paths.FileStatus) -> str:
    """Return a hash of a file's kind, size and content.

    A file above 1 MiB is sampled in sixteen blocks of 4 KiB, so that terabytes open in seconds. A change
    between these blocks that keeps the size goes unnoticed, except in a gzipped file, which ends with a
    checksum of all. In a bucket, the hash covers the bucket's checksum instead of the content, so a run that
    began in a bucket continues there, and not on a disk.
    """
    kind = kind_of(path)
    kind = {'text': 'False', 'jsonl': 'True'}.get(kind, kind)  # as the first runs named them
    content = hashlib.blake2b(f'{kind} {status.num_bytes}'.encode(), digest_size=16)
    if status.checksum is not None:
        content.update(status.checksum.encode())
        return content.hexdigest()
    with paths.open_file(path, num_bytes=status.num_bytes) as file:
        if status.num_bytes <= MAX_BYTES_DIGESTED_WHOLE:
            content.update(file.read(status.num_bytes))
            return content.hexdigest()
        last = status.num_bytes - DIGEST_BLOCK_BYTES
        for i in range(DIGEST_BLOCKS):
            file.seek(i * last // (DIGEST_BLOCKS - 1))
            content.update(file.read(DIGEST_BLOCK_BYTES))
    return content.hexdigest()


def check_disjoint(train: list[FileRecord], validation: list[FileRecord]) -> None:
    """Raise Refused if both splits have the same file or a copy of it, under any name."""
    in_train = {(file.num_bytes, file.digest): file for file in train}
    for file in validation:
        twin = in_train.get((file.num_bytes, file.digest))
        if twin:
            raise Refused(f'{twin.path} of data.files and {file.path} hold the same: leave one out')


def count_newlines(path: str, num_bytes: int) -> int:
    """Return the number of newlines in the first bytes of a file."""
    count = 0
    with paths.open_file(path, SEQUENTIAL_READ_AHEAD) as file:
        while file.tell() < num_bytes:
            chunk = file.read(min(1 << 20, num_bytes - file.tell()))
            count += chunk.count(b'\n')
            if not chunk:
                break
    return count
