"""Layout of a flight record. Every part has a fixed place and size, so that nothing but stores is written.

======================  ========================================================================
offset                  content
======================  ========================================================================
0                       `HEAD`: magic, version, number of ranks, records per rank, number of calls
512                     a text: JSON of the start of the world (`Flight` in `reading`)
4096                    a text: JSON of the end of the world; empty while the world runs
8192                    calls: `CALLS` of `CALL_BYTES`, each a number and a text; new ones replace the oldest
then, for each rank     `RANK`, all in one place: each page of the file that is touched costs 15 us
then, for each rank     `RECORDS` of `RECORD`
======================  ========================================================================

A text is its length in 4 bytes, written last, and UTF-8. Instants are nanoseconds of the process's `perf_counter_ns`.
An operation takes a record when it is issued, and frees it when it ends. The next operation overwrites the record that
was freed first; records of unfinished operations are never overwritten. If no record may be taken, the newest
operations wait in a queue without one until older ones end.
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
"""Records that always stay with the operations that ended last, however many others are unfinished."""
RECORD = Struct("=qqqqqq")
"""Fields: issued, number, call, step, ended, started.

The call is 2 * its number, plus 1 while the input of the operation does not exist. Step -1: none. A negative end: with
an error. The start of a collective is set only with its end.

Issuing does not clear ended and started, as stores cost time: they count only if they are later than issued.
"""
ISSUE = Struct("=qqqq")
"""The first four fields of a record, which are set when an operation is issued."""

# Distinct calls (call, group and line) that a file holds; most programs have some dozens. 256 KiB.
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
"""The whole file of a process: a copy, or mapped."""


def call_offset(number: int) -> int:
    """Return the offset of a call in the file, in bytes. With 256 calls, call 257 overwrites call 1."""
    return CALLS_AT + number % CALLS * CALL_BYTES


def rank_offset(index: int) -> int:
    """Return the offset in bytes of a rank's `RANK` in the file; `index` is the rank's index in its process."""
    return CALLS_AT + CALLS * CALL_BYTES + index * RANK.size


def records_offset(index: int, ranks: int) -> int:
    """Return the offset in bytes of the first `RECORD` of a rank in the file.

    Args:
        index: Index of the rank in its process.
        ranks: Number of ranks in the file.
    """
    return rank_offset(ranks) + index * RECORDS_BYTES


def file_bytes(ranks: int) -> int:
    """Return the size in bytes of a file with that many ranks."""
    return records_offset(ranks, ranks)


def check_layout(record: RecordMemory) -> int:
    """Check the head and the size of a flight record, and return its number of ranks.

    Raises:
        ValueError: The memory is no flight record, or its version or size is wrong.
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
    """Return the number and the text (JSON) of the call in a slot; the number is 0 if it is empty or being written.

    Args:
        record: The file.
        slot: The number of any call with this slot: calls 1 and 257 share one, see `call_offset`.

    Raises:
        ValueError: The text is longer than a slot.
    """
    at = call_offset(slot)
    return CALL_HEAD.unpack_from(record, at)[0], read_text(record, at + CALL_HEAD.size, _CALL_TEXT_BYTES)


def write_call(memory: bytearray, number: int, text: str) -> None:
    """Write the text of a call, and then its number, so that a reader never takes half of a text.

    Args:
        memory: The file, mapped.
        number: Number of the call, 1 or more.
        text: The call as JSON, cut here if it is too long.
    """
    at = call_offset(number)
    # No call has the number 0: it shows a reader that the slot is being written.
    CALL_HEAD.pack_into(memory, at, 0)
    write_text(memory, at + CALL_HEAD.size, text, _CALL_TEXT_BYTES)
    CALL_HEAD.pack_into(memory, at, number)


def write_text(memory: bytearray, at: int, text: str, limit_bytes: int = TEXT_LIMIT_BYTES) -> None:
    """Write the length of a text and its UTF-8 bytes. The length is written last, so that no reader sees half a text.

    Args:
        memory: The file, mapped.
        at: Offset of the 4 bytes of the length; the text follows them.
        text: The text.
        limit_bytes: Most bytes of text to write; the rest is left out.
    """
    data = text.encode(errors="replace")[:limit_bytes]
    _LENGTH.pack_into(memory, at, 0)
    memory[at + 4 : at + 4 + len(data)] = data
    _LENGTH.pack_into(memory, at, len(data))


def read_text(memory: RecordMemory, offset: int, limit_bytes: int = TEXT_LIMIT_BYTES) -> str:
    """Return the text whose length is at an offset.

    Raises:
        ValueError: The text is longer than `limit_bytes`.
    """
    (length,) = _LENGTH.unpack_from(memory, offset)
    if length > limit_bytes:
        raise ValueError(f"a text of {length} bytes")
    return memory[offset + 4 : offset + 4 + length].decode(errors="replace")
