"""Plain files of lines, in blocks that are read in any order."""

import concurrent.futures
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

import paths
import sources.files
from messages import Refused
from sources import Record, deal
from sources.deal import Blocks
from sources.files import FileRecord, count_newlines
from sources.tables import LineParser, numbered_lines, whole_rows

LINE_READ_AHEAD = 1 << 14  # after a block, for the end of its last line
CUT_BYTES = 1 << 11
NEWLINE = ord('\n')
MAX_SMALL_BYTES = 1 << 22  # the lines of a smaller corpus are counted when it is opened


class PlainFiles(Blocks):
    """Files that are not compressed. A line is in the block in which it starts.

    Blocks in a bucket are fetched together; a corpus of small blocks is fetched at once, and kept.
    """

    def __init__(self, files: list[FileRecord], parse: LineParser):
        self.files = files
        self.names = [file.path for file in files]
        self.parse = parse
        self.sizes = {file.path: file.num_bytes for file in files}
        num_bytes = sum(self.sizes.values())
        block_bytes = max(num_bytes // deal.MIN_BLOCKS, 1)
        self.block_bytes = min(block_bytes, deal.MAX_BLOCK_BYTES, sources.files.MAX_LINE_BYTES // 2)
        in_buckets = [name for name in self.names if paths.is_in_bucket(name)]
        self.reads_buckets = bool(in_buckets)
        self.contents: dict[str, bytes] = {}
        if self.block_bytes < deal.MAX_BLOCK_BYTES:
            with concurrent.futures.ThreadPoolExecutor(sources.files.NUM_THREADS) as threads:
                contents = threads.map(read_file, in_buckets)
                self.contents = dict(zip(in_buckets, contents, strict=True))
        self.starts: list[Sequence[int]] = []  # the blocks' in each file
        self.readers: list[Callable] = []
        for file in files:
            starts: Sequence[int] = range(0, file.num_bytes, self.block_bytes)
            if num_bytes <= MAX_SMALL_BYTES:
                starts = self.blocks_with_lines(file.path)
            self.starts.append(starts)
            kind = parse.kind_of(file.path)
            if kind == 'text':
                self.readers.append(TextReader(file.num_bytes, self.block_bytes).lines)
            elif kind == 'csv':
                self.readers.append(CsvReader(file.path, starts, file.num_bytes).lines)
            else:
                self.readers.append(lines_that_start_in)
        self.divide(map(len, self.starts))

    def open_file(self, name: str) -> io.BufferedIOBase:
        """Open a file for reading a block."""
        if name in self.contents:
            return io.BytesIO(self.contents[name])
        read_ahead = self.block_bytes + LINE_READ_AHEAD
        return paths.open_file(name, read_ahead, self.sizes[name])

    def read_all(self, blocks: list[int]) -> Iterable[list[Record | None]]:
        if self.contents or not self.reads_buckets:
            return map(self.read, blocks)
        with concurrent.futures.ThreadPoolExecutor(max_workers=len(blocks)) as threads:
            return threads.map(self.read, blocks)

    def count_records(self) -> int | None:
        """Return about how many records there are: lines, blank ones and those of quoted fields, too."""
        if self.reads_buckets:
            return None
        total = 0
        for name in self.names:
            total += count_newlines(name, os.path.getsize(name))
            with open(name, 'rb') as file:
                file.seek(-1, os.SEEK_END)
                total += file.read() != b'\n'
            total -= self.parse.kind_of(name) in ('csv', 'tsv')  # the header
        return total

    def blocks_with_lines(self, name: str) -> list[int]:
        """Return where the blocks start in which a line starts, or a line that is cut continues.

        In a small corpus most blocks lie within a line.
        """
        with self.open_file(name) as file:
            content = np.frombuffer(file.read(), np.uint8)
        starts = np.flatnonzero(content == NEWLINE) + 1
        starts = np.concatenate([[0], starts[starts < len(content)]])
        lengths = np.diff(starts, append=len(content))
        is_found = np.zeros(-(-len(content) // self.block_bytes), bool)
        is_found[starts // self.block_bytes] = True
        for start, length in zip(starts, lengths, strict=True):
            if length > sources.files.MAX_LINE_BYTES:
                last = start + length - 1
                is_found[start // self.block_bytes : last // self.block_bytes + 1] = True
        return (np.flatnonzero(is_found) * self.block_bytes).tolist()

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


def read_file(name: str) -> bytes:
    with paths.open_file(name) as file:
        return file.read(paths.status_of(name).num_bytes)


def lines_that_start_in(
    file: io.BufferedIOBase, start: int, end: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that start in [start, end)."""
    offset = start
    if start:
        file.seek(start - 1)
        rest = file.readline(end - start)  # the end of a line that began in an earlier block
        if not rest.endswith(b'\n'):
            return
        offset = start - 1 + len(rest)
    while offset < end:
        line = file.readline()
        if not line:
            return
        yield offset, line
        offset += len(line)


class TextReader:
    """Reads blocks of one file of plain text, and cuts lines of more than MAX_LINE_BYTES.

    A long line is cut at the ends of blocks, and the part in each block again every CUT_BYTES.
    Whether a line is long and where it is cut depends on the file alone. So blocks agree, and have
    every byte once.
    """

    def __init__(self, num_bytes: int, block_bytes: int):
        self.num_bytes = num_bytes
        self.block_bytes = block_bytes

    def lines(self, file: io.BufferedIOBase, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, line) of short lines of a block [start, end) and of parts of long ones."""
        offset = start_of_line(file, start)
        is_long = offset is None  # also if only the rest of it is read
        if offset is not None and offset < start:
            file.seek(offset)
            line = file.readline(sources.files.MAX_LINE_BYTES + 1)
            is_long = len(line) > sources.files.MAX_LINE_BYTES
            offset += len(line)  # a short line is read with the block that it starts in
        if offset is None or is_long:
            offset = self.cut_at(file, start)
        file.seek(offset)
        while offset < end:
            line = file.readline(sources.files.MAX_LINE_BYTES + 1)
            is_long |= len(line) > sources.files.MAX_LINE_BYTES
            parts = [line]
            if is_long:
                file.seek(offset)
                line = file.readline(end - offset)
                if not line.endswith(b'\n') and end < self.num_bytes:
                    line = line[: self.cut_at(file, end) - offset]
                parts = list(cut(line))
            for part in parts:
                yield offset, part
                offset += len(part)
            if not line.endswith(b'\n'):
                return
            is_long = False

    def cut_at(self, file: io.BufferedIOBase, end: int) -> int:
        """Return where a long line that continues at `end`, the end of a block, is cut in the block."""
        file.seek(end - self.block_bytes)
        block = file.read(self.block_bytes)
        line = block[block.rfind(b'\n') + 1 :]
        return end - len(line) + cut_before(line + file.read(1), len(line))


class CsvReader:
    """Reads blocks of one CSV file, in which a quoted field may hold newlines.

    The file is read once to know where the first row of each block starts.
    """

    def __init__(self, path: str, starts: Sequence[int], num_bytes: int):
        self.first_rows: dict[int, int] = {}  # {start of a block: that of the first row in it}
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


def start_of_line(file: io.BufferedIOBase, position: int) -> int | None:
    """Return the start of the line that has or begins at `position`; None if too far before."""
    for look_back in (1 << 12, 1 << 16, sources.files.MAX_LINE_BYTES):
        width = min(look_back, position, sources.files.MAX_LINE_BYTES)
        file.seek(position - width)
        newline = file.read(width).rfind(b'\n')
        if newline >= 0:
            return position - width + newline + 1
        if width == position:
            return 0
    return None


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


def cut_before(line: bytes, limit: int) -> int:
    """Return where to cut a line, `limit` at most: after the last space, else a character."""
    last_space = max(line.rfind(space, 0, limit) for space in (b' ', b'\t', b'\r', b'\v', b'\f'))
    if last_space >= 0:
        return last_space + 1
    position = limit
    while position > max(limit - 3, 0) and line[position] & 0xC0 == 0x80:  # inside of a character
        position -= 1
    if line[position] >= 0xC0:
        return position
    return limit
