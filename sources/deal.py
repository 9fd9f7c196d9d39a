"""The division of an epoch among lanes: records in blocks that can be read in any order."""

import abc
import bisect
import itertools
from collections.abc import Iterable, Iterator

from sources import Part, Record, Share

# A pool holds the records that a lane has in memory and shuffles.
MAX_BLOCK_BYTES = 1 << 16
MIN_BLOCKS = 4096  # a small corpus has smaller blocks
BLOCKS_PER_POOL = 8


class Blocks(Part):
    """Records in `num_blocks` blocks, which `read` returns.

    An epoch permutes the blocks and divides them among the lanes. A lane reads pools of
    BLOCKS_PER_POOL blocks.
    """

    num_blocks: int

    def divide(self, blocks_per_file: Iterable[int]) -> None:
        """Number the blocks of files, or of other parts, one file after another."""
        self.first_blocks = [0, *itertools.accumulate(map(int, blocks_per_file))]  # [files + 1]
        self.num_blocks = self.first_blocks[-1]

    def locate(self, block: int) -> tuple[int, int]:
        """Return the index of the file that a block is in, and the number of the block there."""
        index = bisect.bisect(self.first_blocks, block) - 1
        return index, block - self.first_blocks[index]

    @abc.abstractmethod
    def read(self, block: int) -> list[Record | None]:
        """Return the records of a block; None for a line that holds none."""

    def in_order(self) -> Iterator[Record | None]:
        for block in range(self.num_blocks):
            yield from self.read(block)

    def read_all(self, blocks: list[int]) -> Iterable[list[Record | None]]:
        """Return the records of each of the blocks of a pool."""
        return map(self.read, blocks)

    def has_share(self, share: Share) -> bool:
        return share.slot < self.num_blocks

    def pools(self, share: Share, first: int) -> Iterator[tuple[int, list[Record | None]]]:
        order = self.order(self.num_blocks, share.seed, share.epoch)
        blocks = order[share.slot :: share.num_lanes].tolist()
        for start in range(first * BLOCKS_PER_POOL, len(blocks), BLOCKS_PER_POOL):
            records = self.read_all(blocks[start : start + BLOCKS_PER_POOL])
            yield start // BLOCKS_PER_POOL, [*itertools.chain.from_iterable(records)]


class RecordsInMemory(Blocks):
    """Each record is a block."""

    def __init__(self, records: list[Record]):
        self.records = records
        self.num_blocks = len(records)
        self.num_records = len(records)

    def read(self, block: int) -> list[Record | None]:
        return [self.records[block]]
