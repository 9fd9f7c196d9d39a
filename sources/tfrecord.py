"""TFRecord files: for each record its length (uint64), the length's checksum, the content and its checksum.

Numbers are little-endian.
"""

import abc
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import google_crc32c
import numpy as np

import paths
from messages import Refused
from sources import BadLines, Record
from sources.deal import Blocks
from sources.files import SEQUENTIAL_READ_AHEAD

MASK_DELTA = 0xA282EAD8
HEADER_BYTES = 12  # a record's length and its checksum
FOOTER_BYTES = 4  # the checksum of the content
HIGH_BYTES = bytes(4)  # the upper half of every length: records are smaller than 4 GiB


class StoredRecord(NamedTuple):
    """A record as it is stored, or the error of reading it."""

    path: str
    position: int  # offset in bytes; in ArrayRecord the number of the record
    content: bytes | Refused


def record_offsets(path: str | Path) -> np.ndarray:
    """Return the offsets of the records of a file, int64 [records]. Reads only their lengths."""
    size = paths.status_of(path).num_bytes
    offsets = []
    offset = 0
    with paths.open_file(str(path), SEQUENTIAL_READ_AHEAD, size) as file:
        while offset < size:
            offsets.append(offset)
            file.seek(offset)
            offset += HEADER_BYTES + length_in(file.read(HEADER_BYTES), path, offset) + FOOTER_BYTES
    if offset > size:
        raise damaged(path, offsets[-1])
    return np.array(offsets, np.int64)


def read_record(file: IO[bytes], path: str | Path) -> bytes | None:
    """Return the record at the position of `file`; None at its end."""
    offset = file.tell()
    header = file.read(HEADER_BYTES)
    if not header:
        return None
    length = length_in(header, path, offset)
    content_and_footer = file.read(length + FOOTER_BYTES)
    content = content_and_footer[:length]
    if checksum(content) != content_and_footer[length:]:
        raise damaged(path, offset)
    return content


def find_record(file: IO[bytes], start: int, end: int) -> int | None:
    """Return the first byte in [start, end) at which a record begins, None if there is none.

    A record begins with a length and the length's checksum; elsewhere, four bytes match by chance once in four
    billion times.
    """
    file.seek(start)
    window = file.read(end - start + HEADER_BYTES - 1)
    high = window.find(HIGH_BYTES, 4)
    while high >= 0:
        header = window[high - 4 : high - 4 + HEADER_BYTES]
        if checksum(header[:8]) == header[8:]:
            return start + high - 4
        high = window.find(HIGH_BYTES, high + 1)
    return None


class StoredRecords(Blocks):
    """Records that `stored` yields and `parse` turns into fields."""

    bad_lines: BadLines

    @abc.abstractmethod
    def stored(self, block: int) -> Iterator[StoredRecord]:
        """Yield the records of a block, including those with a fault."""

    @abc.abstractmethod
    def parse(self, content: bytes) -> dict | None:
        """Return the fields of a record; None for a blank one. Raises Refused for a bad one."""

    def fields_of(self, content: bytes | Refused) -> dict | None:
        if isinstance(content, Refused):
            raise content
        return self.parse(content)

    def read(self, block: int) -> list[Record | None]:
        records = []
        for path, position, content in self.stored(block):
            records.append(self.bad_lines.record(path, position, self.fields_of, content))
        return records


class ByteRange(NamedTuple):
    """A part of a file that begins and ends with a record."""

    path: str
    num_bytes: int  # the file's
    first: int
    last: int


class ByteRanges(StoredRecords):
    """Records of TFRecord files, without an index. A block has the records that begin in its bytes."""

    def divide_ranges(self, ranges: list[ByteRange], block_bytes: int) -> None:
        """Divide the ranges into blocks of `block_bytes`."""
        self.ranges = ranges
        self.block_bytes = block_bytes
        self.divide(-(-(last - first) // block_bytes) for _, _, first, last in ranges)

    def stored(self, block: int) -> Iterator[StoredRecord]:
        """Yield the records of a block.

        A damaged record is a fault. So is the record after the block if its length is damaged, because
        the next block cannot find it.
        """
        index, number = self.locate(block)
        path, num_bytes, first, last = self.ranges[index]
        start = first + number * self.block_bytes
        end = min(start + self.block_bytes, last)
        with paths.open_file(path, self.block_bytes, num_bytes) as file:
            offset: int | None = start
            if number:
                offset = find_record(file, start, end)
            while offset is not None and offset < end:
                file.seek(offset)
                try:
                    content = read_record(file, path) or b''
                except Refused as fault:
                    yield StoredRecord(path, offset, fault)
                    offset = find_record(file, offset + 1, end)
                else:
                    yield StoredRecord(path, offset, content)
                    offset = file.tell()
            if offset is not None and offset < last:
                file.seek(offset)
                try:
                    length_in(file.read(HEADER_BYTES), path, offset)
                except Refused as fault:
                    yield StoredRecord(path, offset, fault)


def length_in(header: bytes, path: str | Path, offset: int) -> int:
    """Return the length in the header of a record, which begins at `offset`."""
    if len(header) < HEADER_BYTES or checksum(header[:8]) != header[8:]:
        raise damaged(path, offset)
    return int.from_bytes(header[:8], 'little')


def damaged(path: str | Path, offset: int) -> Refused:
    return Refused(f'{path}: the record at byte {offset} is damaged: copy the file again')


def write_record(file: IO[bytes], content: bytes) -> None:
    """Append a record to a file."""
    length = len(content).to_bytes(8, 'little')
    file.write(length + checksum(length) + content + checksum(content))


def checksum(content: bytes) -> bytes:
    """Return TFRecord's masked CRC-32C, four bytes."""
    crc = google_crc32c.value(content)
    masked = ((crc >> 15 | crc << 17) + MASK_DELTA) % 2**32
    return masked.to_bytes(4, 'little')
