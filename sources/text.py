"""Plain files of lines, in blocks that can be read in any order."""

import concurrent.futures
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

import paths
import sources.files
from messages import Refused
from run import hub
from sources import Record, deal
from sources.deal import Blocks
from sources.files import FileRecord, count_newlines
from sources.tables import LineParser, numbered_lines, whole_rows

LINE_READ_AHEAD = 1 << 14  # after a block, for the end of its last line
NEWLINE = ord('\n')
MAX_SMALL_BYTES = 1 << 22  # the lines of a smaller corpus are counted when it is opened


class PlainFiles(Blocks):
    """Files that are not compressed. A line is in the block in which it starts.

    The blocks of a pool in a bucket are fetched in parallel; a corpus of small blocks is fetched at once and cached.
    """

    def __init__(self, files: list[FileRecord], parse: LineParser):
        self.files = files
        self.names = [file.path for file in files]
        self.parse = parse
        self.sizes = {file.path: file.num_bytes for file in files}
        num_bytes = sum(self.sizes.values())
        self.block_bytes = min(max(num_bytes // deal.MIN_BLOCKS, 1), deal.MAX_BLOCK_BYTES)
        # Files from the hub are on a disk: opening the source has fetched them.
        self.reads_buckets = any(paths.is_in_bucket(x) and not hub.is_name(x) for x in self.names)
        self.contents: dict[str, bytes] = {}
        if self.reads_buckets and self.block_bytes < deal.MAX_BLOCK_BYTES:
            with concurrent.futures.ThreadPoolExecutor(sources.files.NUM_THREADS) as threads:
                contents = threads.map(self.read_file, self.names)
                self.contents = dict(zip(self.names, contents, strict=True))
        self.starts: list[Sequence[int]] = []  # each file's blocks
        self.readers: list[Callable] = []
        for file in files:
            starts: Sequence[int] = range(0, file.num_bytes, self.block_bytes)
            if num_bytes <= MAX_SMALL_BYTES:
                starts = self.blocks_with_lines(file.path)
            self.starts.append(starts)
            kind = parse.kind_of(file.path)
            if kind == 'csv':
                self.readers.append(CsvReader(file.path, starts, file.num_bytes).lines)
            elif kind == 'text':
                max_bytes = sources.files.MAX_LINE_BYTES + 1
                self.readers.append(functools.partial(lines_that_start_in, max_bytes=max_bytes))
            else:
                self.readers.append(lines_that_start_in)
        self.divide(map(len, self.starts))

    def open_file(self, name: str) -> io.BufferedIOBase:
        """Open a file for reading a block."""
        if name in self.contents:
            return io.BytesIO(self.contents[name])
        read_ahead = self.block_bytes + LINE_READ_AHEAD
        return paths.open_file(name, read_ahead, self.sizes[name])

    def read_file(self, name: str) -> bytes:
        with self.open_file(name) as file:
            return file.read()

    def read_all(self, blocks: list[int]) -> Iterable[list[Record | None]]:
        if self.contents or not self.reads_buckets:
            return map(self.read, blocks)
        with concurrent.futures.ThreadPoolExecutor(max_workers=len(blocks)) as threads:
            return threads.map(self.read, blocks)

    def count_records(self) -> int | None:
        """Return the approximate number of records: all lines, including blank ones and lines of quoted fields."""
        if self.reads_buckets:
            return None
        total = 0
        for name in self.names:
            total += count_newlines(name, self.sizes[name])
            with paths.open_file(name) as file:
                file.seek(-1, os.SEEK_END)
                total += file.read() != b'\n'
            total -= self.parse.kind_of(name) in ('csv', 'tsv')  # the header
        return total

    def blocks_with_lines(self, name: str) -> list[int]:
        """Return the starts of the blocks in which a line starts: in a small corpus, most blocks lie within a line."""
        content = np.frombuffer(self.read_file(name), np.uint8)
        line_starts = np.flatnonzero(content == NEWLINE) + 1
        line_starts = np.concatenate([[0], line_starts[line_starts < len(content)]])
        return (np.unique(line_starts // self.block_bytes) * self.block_bytes).tolist()

    def read(self, block: int) -> list[Record | None]:
        file_index, i = self.locate(block)
        name = self.names[file_index]
        num_bytes = self.files[file_index].num_bytes
        starts = self.starts[file_index]
        start = int(starts[i])
        end = int(starts[i + 1]) if i + 1 < len(starts) else num_bytes
        with self.open_file(name) as file:
            if file.seek(0, os.SEEK_END) < num_bytes:
                raise Refused(f'{name} no longer has {num_bytes:,} bytes: restore it')
            file.seek(start)
            lines = self.readers[file_index](file, start, end)
            return [self.parse(name, offset, line) for offset, line in lines]


def lines_that_start_in(
    file: io.BufferedIOBase, start: int, end: int, max_bytes: int = -1
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that start in [start, end), each cut at `max_bytes`."""
    offset = start
    if start:
        file.seek(start - 1)
        tail = file.readline(end - start)  # the end of a line that began in an earlier block
        if not tail.endswith(b'\n'):
            return
        offset = start - 1 + len(tail)
    while offset < end:
        line = file.readline(max_bytes)
        if not line:
            return
        yield offset, line
        if len(line) == max_bytes:
            return  # the next line starts in a later block
        offset += len(line)


class CsvReader:
    """A reader of blocks of a CSV file, in which a quoted field may hold newlines.

    The file is read once to find the start of the first row of each block.
    """

    def __init__(self, path: str, starts: Sequence[int], num_bytes: int):
        self.first_rows: dict[int, int] = {}  # {start of a block: start of the first row in it}
        with paths.open_file(path, sources.files.SEQUENTIAL_READ_AHEAD) as file:
            is_row_start = True
            in_quotes = False
            for first, last in zip(starts, [*starts[1:], num_bytes], strict=True):
                content = file.read(last - first)
                start = 0
                while not is_row_start and start < len(content):
                    end = content.find(b'\n', start) + 1 or len(content)
                    in_quotes ^= content.count(b'"', start, end) % 2 == 1
                    is_row_start = not in_quotes and content[end - 1] == NEWLINE
                    start = end
                self.first_rows[int(first)] = int(first) + start
                in_quotes ^= content.count(b'"', start) % 2 == 1
                is_row_start = not in_quotes and content.endswith(b'\n')

    def lines(self, file: io.BufferedIOBase, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, row) of the rows that start in [start, end)."""
        offset = self.first_rows[start]
        file.seek(offset)
        rows = whole_rows(numbered_lines(file), 'csv')
        while offset < end:
            _, row = next(rows, (0, b''))
            if not row:
                return
            yield offset, row
            offset += len(row)
