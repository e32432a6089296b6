"""A timeline as it grows: what is appended to its file is there whatever becomes of the process.

After `MAGIC` comes a header as a part has one, then blocks, each of some spans of one rank. A file that ends in the
middle of a block holds all blocks before.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

from ..errors import UsageError
from .columnar import SpanColumns
from .parts import header_block, pack_columns, read_header, unpack_columns
from .spans import Timeline

MAGIC = b"OVSPANS1"
_HEAD_BYTES = 12  # of a block: the rank, and the length


def begun(timeline: Timeline, *, offset_ns: int = 0) -> bytes:
    """Return the beginning of a file: what a timeline says of the run, and none of its spans."""
    return MAGIC + header_block(timeline, offset_ns=offset_ns)


def block(columns: SpanColumns) -> bytes:
    """Return some spans of one rank, one at least."""
    data = pack_columns(columns)
    return int(columns.rank[0]).to_bytes(8, "big") + len(data).to_bytes(4, "big") + data


def grown(data: bytes) -> tuple[Timeline, bool]:
    """Return the timeline of a file, as far as it goes, and whether it ends with a block.

    Raises:
        UsageError: Not even its beginning is there, or it is damaged.
    """
    file = BytesIO(data[len(MAGIC) :])
    header = read_header(file)
    rest = file.read()
    found = list(_blocks(rest))
    whole = sum(taken for taken, _ in found) == len(rest)
    columns = SpanColumns.joined(columns for _, columns in found).shifted(header.offset_ns)
    timeline = Timeline.of_columns(
        columns, world_size=header.world_size, clock=header.clock, dropped=header.dropped, meta=dict(header.meta)
    )
    return timeline, whole


def _blocks(data: bytes) -> Iterator[tuple[int, SpanColumns]]:
    """Yield the blocks that are whole, each with its length in bytes."""
    at = 0
    while at + _HEAD_BYTES <= len(data):
        rank = int.from_bytes(data[at : at + 8], "big")
        length_bytes = int.from_bytes(data[at + 8 : at + _HEAD_BYTES], "big")
        end = at + _HEAD_BYTES + length_bytes
        if end > len(data):
            return
        if rank >= 1 << 31:
            raise UsageError(f"damaged part of a trace: rank {rank}")
        yield end - at, unpack_columns(rank, data[at + _HEAD_BYTES : end])
        at = end
