"""Gzipped files, which can only be read from their beginning."""

import gzip
import itertools
import zlib
from collections.abc import Iterator

import sources.files
from sources import Part, Record, Share
from sources.files import EMPTY_FILE, FileRecord
from sources.heads import open_unzipped
from sources.tables import LineParser, numbered_lines, whole_rows

POOL_LINES = 100_000  # in the pools of all lanes together
MIN_POOL_LINES = 256  # in the pool of one lane
MIN_OPEN_SHARDS = 16  # by all lanes together
# The pools of round r are numbered from r * POOLS_PER_ROUND on; a round has far fewer.
POOLS_PER_ROUND = 1 << 32


class GzippedFiles(Part):
    """Gzipped files, each a shard.

    An epoch permutes the shards and divides them among the lanes. A lane reads rounds of some
    shards, interleaved line by line, in pools with equal numbers of lines. With fewer shards than
    lanes, adjacent lanes share a shard: each decompresses all of it and skips the others' lines.
    """

    def __init__(self, files: list[FileRecord], parse: LineParser):
        self.files = files
        self.names = [file.path for file in files]
        self.parse = parse
        self.bad_lines = parse.bad_lines

    def pools(self, share: Share, first: int) -> Iterator[tuple[int, list[Record | None]]]:
        pool_lines = max(POOL_LINES // share.num_lanes, MIN_POOL_LINES)
        round_number, pool = divmod(first, POOLS_PER_ROUND)
        while round_number < self.num_rounds(share):
            lines = self.lines_of_round(share, round_number)
            remaining_lines = itertools.islice(lines, pool * pool_lines, None)
            while True:
                pool_of_lines = itertools.islice(remaining_lines, pool_lines)
                records = list(itertools.starmap(self.parse, pool_of_lines))
                if not records:
                    break
                yield round_number * POOLS_PER_ROUND + pool, records
                pool += 1
            round_number += 1
            pool = 0

    def in_order(self) -> Iterator[Record | None]:
        for name in self.names:
            yield from itertools.starmap(self.parse, self.lines(name))

    def num_rounds(self, share: Share) -> int:
        """Return the number of rounds of shards that a lane reads in an epoch."""
        if len(self.names) < share.num_lanes:
            return 1
        num_shards = len(range(share.slot, len(self.names), share.num_lanes))
        return -(-num_shards // shards_per_round(share.num_lanes))

    def lines_of_round(self, share: Share, round_number: int) -> Iterator[tuple[str, int, bytes]]:
        """Yield (name, number, line) of the lines that a lane reads in one round."""
        num_shards = len(self.names)
        num_lanes = share.num_lanes
        order = self.order(num_shards, share.seed, share.epoch)
        if num_shards < num_lanes:
            index = share.slot * num_shards // num_lanes
            first_slot = -(-index * num_lanes // num_shards)
            next_shards_slot = -(-(index + 1) * num_lanes // num_shards)
            num_sharing = next_shards_slot - first_slot
            lines = self.lines(self.names[order[index]])
            return itertools.islice(lines, share.slot - first_slot, None, num_sharing)
        num_open = shards_per_round(num_lanes)
        lane_shards = order[share.slot :: num_lanes]
        shards = lane_shards[round_number * num_open : (round_number + 1) * num_open]
        rows = itertools.zip_longest(*[self.lines(self.names[shard]) for shard in shards])
        return (line for row in rows for line in row if line is not None)

    def lines(self, name: str) -> Iterator[tuple[str, int, bytes]]:
        """Yield (name, number, line) of the lines of a shard."""
        number = 1
        try:
            with open_unzipped(name, sources.files.SEQUENTIAL_READ_AHEAD) as file:
                for number, line in whole_rows(numbered_lines(file), self.parse.kind_of(name)):
                    yield name, number, line
                    number += 1
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.bad_lines.add(name, number, f'broken gzip ({error}); copy the file again')
            return
        if number == 1:
            self.bad_lines.add(name, 0, EMPTY_FILE)


def shards_per_round(num_lanes: int) -> int:
    """Return the number of shards that a lane interleaves."""
    return -(-MIN_OPEN_SHARDS // num_lanes)
