"""The first bytes of a file, and whether they match its kind."""

import contextlib
import gzip
import io
import re
import zlib
from collections.abc import Iterator

import paths
from messages import Refused
from sources.files import is_gzipped

HEAD_BYTES = 1 << 16  # read to recognize the format of a file
PARQUET = b'PAR1'
# The first bytes of files that are not text: {pattern: (format, remedy)}.
FORMATS = {
    b'\x1f\x8b': ('gzipped', 'gunzip it, or add .gz to its name'),
    PARQUET: ('Parquet', "let its name end in .parquet, or set data.kind='parquet'"),
    paths.LFS_HEADER: ('a pointer of git-lfs', 'run `git lfs pull` in its repository'),
    b'PK\x03\x04': ('a zip archive, as .xlsx is', 'unzip it, or save the spreadsheet as CSV'),
    b'%PDF-': ('PDF', 'convert it to text'),
    rb'BZh[1-9](1AY|\x17rE)|\xfd7zXZ|\]\0\0|\x28\xb5\x2f\xfd': (
        'compressed by bzip2, xz, lzma or zstd',
        'decompress it, or gzip it',
    ),
    b'ARROW1|\xff\xff\xff\xff': (
        'Arrow',
        "write it as Parquet, as datasets.Dataset.from_file(FILE).to_parquet('x.parquet') does",
    ),
    b'\xff\xfe|\xfe\xff': ('UTF-16 or UTF-32', 'convert it to UTF-8'),
}


@contextlib.contextmanager
def open_unzipped(
    path: str, read_ahead: int = HEAD_BYTES, num_bytes: int | None = None
) -> Iterator[io.BufferedIOBase]:
    """Open a file for reading, decompressed if it is gzipped. `num_bytes`: see `paths.open_file`."""
    with paths.open_file(path, read_ahead, num_bytes) as file:
        if is_gzipped(path):
            with gzip.open(file) as unzipped:
                yield unzipped
        else:
            yield file


def read_head(path: str, num_bytes: int | None = None) -> bytes:
    """Return the first bytes of a file, decompressed; if its gzip is broken, the bytes before the damage."""
    head = b''
    with (
        contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile),
        open_unzipped(path, num_bytes=num_bytes) as file,
    ):
        while part := file.read1(HEAD_BYTES - len(head)):
            head += part
    return head


def check_head(title: str, kind: str, head: bytes) -> None:
    """Raise Refused if `head` shows that a file is not of this kind."""
    for mark, (file_format, remedy) in FORMATS.items():
        is_match = re.match(mark, head, re.DOTALL) is not None
        if is_match and not (kind == 'parquet' and mark == PARQUET):
            raise Refused(f'{title} is {file_format}, not {kind}: {remedy}')
    if kind == 'parquet':
        return
    if head.count(b'\0') > len(head) / 4:
        raise Refused(f'{title} holds zero bytes: convert it to UTF-8')
    if b'\r' in head.strip() and b'\n' not in head:
        raise Refused(f"{title} has line ends of old Macs (CR): use `tr '\\r' '\\n'`")
    if kind == 'jsonl' and re.match(rb'(\xef\xbb\xbf)?\s*(\[\s*\{|[\[{][ \t\r]*\n)', head):
        raise Refused(f'{title} is multi-line JSON: write one record per line, as `jq -c .` does')
