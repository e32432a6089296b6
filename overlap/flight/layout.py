"""Layout of a flight record. Every part has a fixed place and size, so that nothing but stores is written.

======================  ========================================================================
offset                  content
======================  ========================================================================
0                       `HEAD`: magic, version, how many ranks, records a rank, calls
512                     a text: JSON of the start of the world (`Flight` in `reading`)
4096                    a text: JSON of the end of the world; empty as long as it has not
8192                    calls: `CALLS` of `CALL_BYTES`, each a number and a text; new ones replace the oldest
then, for each rank     `RANK`, together: they are set at the start, and a page that is touched costs 15 us
then, for each rank     `RECORDS` of `RECORD`
======================  ========================================================================

A text is its length in 4 bytes, written last, and UTF-8. Instants are nanoseconds of the process's `perf_counter_ns`.
The record of an operation is taken when it is issued and given back when it ends: the oldest of those that have ended
is the next to be overwritten, and one that is unfinished never is. Where more are unfinished than records may be taken,
the newest wait until older ones end.
"""

from __future__ import annotations

from mmap import mmap
from struct import Struct
from typing import TypeAlias

MAGIC, VERSION = b"OVFLIGHT", 4
HEAD = Struct("=8sIIII")  # magic, version, ranks, RECORDS, CALLS
START_AT, ENDING_AT, CALLS_AT = 512, 4096, 8192
TEXT_LIMIT_BYTES = 3500  # of the two texts at the beginning: fits into either's place

# 24 KiB a rank: the steps before the end, and what a rank may well have in flight.
RECORDS = 512
KEPT = RECORDS // 4
"""Of them, those of the last operations that have ended: they stay, however many others are unfinished."""
RECORD = Struct("=qqqqqq")
"""issued, number, call (twice its number, and 1 more without its input), step (-1: none); then ended (negative: badly)
and started (of collectives only with the end).

The last two are not set when an operation is issued, as stores cost time: they count if they are later than that.
"""
ISSUE = Struct("=qqqq")
"""The part that is set when an operation is issued."""

# Different (call, group, line) of a program: mostly some dozens. 256 KiB.
CALLS = 256
CALL_BYTES = 1024
CALL_HEAD = Struct("=q")  # its number; then a text
_CALL_TEXT_BYTES = CALL_BYTES - CALL_HEAD.size - 4

RANK = Struct("=qqqq")
"""rank, step (-1: none), whether its program has finished, newest step whose state or checkpoint is on the disk (-1:
none)."""
RECORDS_BYTES = RECORDS * RECORD.size  # of one rank

_LENGTH = Struct("=I")
_MOST_RANKS = 1 << 16  # of one process: more is damage

RecordMemory: TypeAlias = bytes | mmap
"""Of a process: the whole file, as it was or as it is."""


def call_offset(number: int) -> int:
    """Return the offset of a call in the file, in bytes; calls reuse places after `CALLS` numbers."""
    return CALLS_AT + number % CALLS * CALL_BYTES


def rank_offset(index: int) -> int:
    """Return the offset of the head of a rank in the file, in bytes, by the index of the rank in this process."""
    return CALLS_AT + CALLS * CALL_BYTES + index * RANK.size


def records_offset(index: int, ranks: int) -> int:
    """Return the offset of the operations of a rank, in bytes, in a file of `ranks` ranks."""
    return rank_offset(ranks) + index * RECORDS_BYTES


def file_bytes(ranks: int) -> int:
    """Return the size of a file with that many ranks."""
    return records_offset(ranks, ranks)


def check_layout(record: RecordMemory) -> int:
    """Check the head and the size of a flight record, and return its number of ranks.

    Raises:
        ValueError: It is no flight record, or its version or size is wrong.
    """
    if len(record) < HEAD.size or record[: len(MAGIC)] != MAGIC:
        raise ValueError("is no flight record; leave it out")
    _, version, ranks, records, calls = HEAD.unpack_from(record)
    if version != VERSION or (records, calls) != (RECORDS, CALLS):
        raise ValueError(
            f"was written by another version of overlap (format {version}, this reads {VERSION}); "
            "read it with that version"
        )
    expected = file_bytes(min(ranks, _MOST_RANKS))
    if len(record) < expected:
        raise ValueError(f"is cut off: it has {len(record)} of {expected} bytes; leave it out")
    if len(record) > expected:
        raise ValueError(f"is damaged: it has {len(record)} bytes, and should have {expected}; leave it out")
    return int(ranks)


def read_call(record: RecordMemory, slot: int) -> tuple[int, str]:
    """Return the number of the call in a slot, 0 if the slot is empty, and the words of the call as JSON."""
    at = call_offset(slot)
    return CALL_HEAD.unpack_from(record, at)[0], read_text(record, at + CALL_HEAD.size, _CALL_TEXT_BYTES)


def write_text(memory: bytearray, at: int, text: str, limit_bytes: int) -> None:
    """Write a text, cut to `limit_bytes`; its length is written last, so that a reader never sees a part of it."""
    data = text.encode(errors="replace")[:limit_bytes]
    _LENGTH.pack_into(memory, at, 0)
    memory[at + 4 : at + 4 + len(data)] = data
    _LENGTH.pack_into(memory, at, len(data))


def read_text(memory: RecordMemory, offset: int, limit_bytes: int) -> str:
    """Return the text at an offset.

    Raises:
        ValueError: The text is longer than `limit_bytes`.
    """
    (length,) = _LENGTH.unpack_from(memory, offset)
    if length > limit_bytes:
        raise ValueError(f"a text of {length} bytes")
    return memory[offset + 4 : offset + 4 + length].decode(errors="replace")
