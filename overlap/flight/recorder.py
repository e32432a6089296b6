"""Writes the flight record: one store into mapped memory when an operation is issued, one when it ends.

It costs an operation 0.3 us in all (`python -m tests.benchmarks span`), because it writes five numbers. Words
(the call, the group, the line) are written once, when they are new, and have a number from then on.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from threading import Lock
from time import perf_counter_ns, time_ns
from types import CodeType
from typing import Protocol, cast

from ..timeline.recording import RawSpan, Recorder
from .layout import (
    CALL_BYTES,
    CALL_HEAD,
    CALLS,
    ENDING_AT,
    HEAD,
    ISSUE,
    KEPT,
    MAGIC,
    RANK,
    RECORD,
    RECORDS,
    START_AT,
    TEXT_LIMIT_BYTES,
    VERSION,
    call_offset,
    rank_offset,
    records_offset,
    write_text,
)


class Known(dict[object, "tuple[tuple[CodeType, int], int]"]):
    """The calls of a port, or the computes of a rank, that have a number: where each was issued, and the number."""


_MOST_STEPS = 1 << 62  # a larger one is not kept: it may not fit
_WORD = 8  # bytes
_RECORD_WORDS, _CALL, _ENDED, _STARTED = RECORD.size // _WORD, 2, 4, 5
_pack_issue = ISSUE.pack_into
_FRESH = CALLS // 2  # numbers that are still given out: a record in the ring should find its call for a while
_LONGEST_LINE_BYTES = 1000  # of the error
# Longest word of a call, and longest list of its members: all of them fit into `CALL_BYTES`.
_LONGEST_BYTES, _LONGEST_MEMBERS_BYTES = 80, 300


class Recordable(Protocol):
    """An operation, as the recorder sees it."""

    place: tuple[CodeType, int]  # Where it was issued, as code and instruction

    def flight_fields(self) -> Mapping[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all operations of one call at one place share."""


class Writer:
    """One process's flight record.

    Attributes:
        ended: Whether it says how the world ended.

    Args:
        memory: Memory of `file_bytes(len(ranks))` bytes, all zero.
        ranks: World ranks of this process.
        start: The start of the record, for `reading.Flight`.
    """

    def __init__(self, memory: mmap, ranks: Sequence[int], start: Mapping[str, object]) -> None:
        self._memory = cast("bytearray", memory)
        self._calls = _Calls(self._memory)
        self._places = {rank: (rank_offset(i), records_offset(i, len(ranks))) for i, rank in enumerate(ranks)}
        self._ranks: list[RankFlight] = []
        self.ended: bool = False
        clocks = {"unix_ns": time_ns(), "clock_ns": perf_counter_ns()}
        write_text(self._memory, START_AT, _json({**start, **clocks}), TEXT_LIMIT_BYTES)
        for rank, (at, _) in self._places.items():
            RANK.pack_into(self._memory, at, rank, -1, 0, -1)
        HEAD.pack_into(self._memory, 0, MAGIC, VERSION, len(ranks), RECORDS, CALLS)

    def rank(self, rank: int, spans: Recorder) -> RankFlight:
        """Return the record of a rank of this process, whose spans go into `spans`."""
        self._ranks.append(RankFlight(self._memory, *self._places[rank], self._calls, spans))
        return self._ranks[-1]

    def end(self, how: str, *, rank: int | None, line: str, began_here: bool) -> None:
        """Write how the world ended; later calls change nothing.

        Args:
            how: "failed", "stalled" or "interrupted".
            rank: The rank at fault, as far as is known.
            line: The error.
            began_here: Whether it began in this process.
        """
        if self.ended:
            return
        self.ended = True
        end = {"how": how, "rank": rank, "line": _cut_plain(line, _LONGEST_LINE_BYTES), "here": began_here}
        write_text(self._memory, ENDING_AT, _json({**end, "clock_ns": perf_counter_ns()}), TEXT_LIMIT_BYTES)

    def close(self) -> None:
        """Stop writing into the file: later calls write to memory that is never read."""
        nowhere = bytearray(len(self._memory))
        self._calls.memory = nowhere
        for rank in self._ranks:
            rank.write_to(nowhere)


class _Calls:
    """Numbers of calls, under which the record has their words: name, group, place in the program.

    Attributes:
        oldest: Index from which on calls are known: the words of earlier ones may be overwritten.
    """

    def __init__(self, memory: bytearray) -> None:
        self.memory: bytearray = memory
        self.oldest: int = 0
        self._next = 1
        self._by_text: dict[str, int] = {}

    def find(self, operation: Recordable, known: Known, call: object) -> int:
        """Return the index of a call at a place of the program, a new one for a new call; store it in `known`.

        The index is twice the number, and 1 more if the input of the operation does not exist yet.
        """
        code, instruction = operation.place
        key = (id(code), instruction, call)
        found = known.get(key)
        if found is None or found[1] < self.oldest:
            if len(known) >= CALLS:  # calls that come once and never again
                known.clear()
            number = self._number_of_words(_encode_words(operation.flight_fields()))
            found = known[key] = operation.place, 2 * number + (call is None)  # and with it the code
        known[call] = found
        return found[1]

    def _number_of_words(self, text: str) -> int:
        """Return the number of these words; new words take the place of the words `CALLS` numbers before."""
        number = self._by_text.get(text)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._by_text[text] = number
            at = call_offset(number)
            CALL_HEAD.pack_into(self.memory, at, 0)
            write_text(self.memory, at + CALL_HEAD.size, text, CALL_BYTES - CALL_HEAD.size - 4)
            CALL_HEAD.pack_into(self.memory, at, number)
            if len(self._by_text) > _FRESH:
                del self._by_text[next(iter(self._by_text))]
                self.oldest = 2 * (self._next - _FRESH)
        return number


def _encode_words(fields: Mapping[str, object]) -> str:
    """Return the fields of a call as JSON, cut to fit; a list of members that is too long is left out as a whole."""
    plain = {
        name: _cut_plain(value, _LONGEST_BYTES) if isinstance(value, str) and name != "members" else value
        for name, value in fields.items()
    }
    members = str(fields.get("members", ""))
    return _json({**plain, "members": members if len(members) <= _LONGEST_MEMBERS_BYTES else ""})


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut_plain(text: str, limit_bytes: int) -> str:
    """Shorten a text to `limit_bytes`, without characters that JSON escapes."""
    plain = "".join(c if c.isprintable() and c not in '"\\' else "'" if c == '"' else "?" for c in text)
    return plain.encode(errors="replace")[:limit_bytes].decode(errors="ignore")


class _RecordQueue:
    """Operations of a rank that wait for a free record; the oldest one gets the next record.

    A program may issue its operations far ahead. The record then still shows those in flight, which are the oldest.
    Threads end computes too, therefore the lock.

    Attributes:
        waiting: The instant, number, call and step of each, by its name.

    Args:
        free: The records that are free, the first to be taken first.
        write: Takes a record and what to write there.
    """

    def __init__(self, free: deque[int], write: Callable[[int, tuple[int, ...]], None]) -> None:
        self._free, self._write = free, write
        self._lock = Lock()
        self._next = -2  # -1 is the record of an operation that was never issued
        self.waiting: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._taken: dict[int, int] = {}  # the records of those that waited, by name

    def add(self, values: tuple[int, ...]) -> int:
        """Queue an operation, with its instant, number, call and step; return its name, a number below -1."""
        with self._lock:
            name, self._next = self._next, self._next - 1
            self.waiting[name] = values
        self.go_on()  # a thread may have given one back meanwhile
        return name

    def go_on(self) -> None:
        """Move the operations that have waited longest into free records; `KEPT` records stay with ended operations."""
        with self._lock:
            while self.waiting and len(self._free) > KEPT:
                name, values = self.waiting.popitem(last=False)
                self._taken[name] = record = self._free.popleft()
                self._write(record, values)

    def find(self, name: int) -> int:
        """Return the record of an operation that has waited, or -1."""
        return self._taken.get(name, -1)

    def describe(self, name: int, call: int) -> int:
        """Set the call of a queued operation; return its record if it has got one, else -1."""
        with self._lock:
            if name in self.waiting:
                instant, number, _, step = self.waiting[name]
                self.waiting[name] = instant, number, call, step
            return self.find(name)

    def end(self, name: int) -> int:
        """Remove an operation that has ended; return its record, or -1 if it has got none."""
        with self._lock:
            self.waiting.pop(name, None)
            return self._taken.pop(name, -1)


class RankFlight:
    """Records one rank; the loop's thread only, but for `started` and `ended`.

    The index of its first word identifies a record: an item of a memoryview is cheaper to set than by `pack_into`.

    Args:
        memory: The file, mapped.
        base: Offset of the rank's head in bytes.
        begin: Offset of its first record in bytes.
        calls: Calls of the process, which records name by index.
        spans: Spans of the rank, which are recorded in the same call.
    """

    __slots__ = (
        "_calls", "_count_span", "_free", "_head", "_memory", "_push_span", "_queue", "_step", "_waiting", "_words",
    )  # fmt: skip

    def __init__(self, memory: bytearray, base: int, begin: int, calls: _Calls, spans: Recorder) -> None:
        first = begin // _WORD
        self._free = deque(range(first, first + RECORDS * _RECORD_WORDS, _RECORD_WORDS))
        self._head, self._step = base // _WORD, -1
        self._calls, self._count_span, self._push_span = calls, spans.count, spans.push
        self._queue = _RecordQueue(self._free, self._write)
        self._waiting = self._queue.waiting
        self.write_to(memory)

    def write_to(self, memory: bytearray) -> None:
        """Write to other memory from now on."""
        self._memory, self._words = memory, memoryview(memory).cast("q")

    def _write(self, record: int, values: tuple[int, ...]) -> None:
        """Write a queued operation into its record."""
        RECORD.pack_into(self._memory, record * _WORD, *values, 0, 0)

    def issued(self, operation: Recordable, known: Known, call: object, number: int, now_ns: int) -> int:
        """Record an operation that is issued; return its record, or its name in the queue without a free record.

        Args:
            known: Calls known to operations like it.
            call: Its own call; None: its input does not exist yet.
            number: Its position where its ends meet.
        """
        hit, calls, free = known.get(call), self._calls, self._free
        if hit is None or hit[0] != operation.place or hit[1] < calls.oldest:
            index = calls.find(operation, known, call)
        else:
            index = hit[1]
        if len(free) <= KEPT:
            return self._queue.add((now_ns, number, index, self._step))
        record = free.popleft()
        _pack_issue(self._memory, record * _WORD, now_ns, number, index, self._step)
        return record

    def ended(self, record: int, now_ns: int) -> None:
        """Record the end of an operation, negative if it failed, and free its record; the thread that runs it."""
        if record < 0:
            record = self._queue.end(record)
        if record >= 0:
            self._words[record + _ENDED] = now_ns
            self._free.append(record)
            if self._waiting:
                self._queue.go_on()

    def carried(self, record: int, began_ns: int, now_ns: int, span: RawSpan | None) -> None:
        """Record the start and the good end of a collective on this rank, and its span in the timeline."""
        if span is not None:
            self._count_span()
            self._push_span(span)
        if record < 0:
            record = self._queue.end(record)
        if record >= 0:
            words = self._words
            words[record + _STARTED] = began_ns
            words[record + _ENDED] = now_ns
            self._free.append(record)
            if self._waiting:
                self._queue.go_on()

    def started(self, record: int, now_ns: int) -> None:
        """Record that a thread has begun to run a compute; any thread."""
        if record < 0:
            record = self._queue.find(record)
        if record >= 0:
            self._words[record + _STARTED] = now_ns

    def described(self, record: int, operation: Recordable, known: Known, call: object) -> None:
        """Record the call of an operation that was issued before its input existed."""
        index = self._calls.find(operation, known, call)
        if record < 0:
            record = self._queue.describe(record, index)
        if record >= 0:
            self._words[record + _CALL] = index

    def step(self, index: int) -> int:
        """Record the step that begins; return the one before it; -1 is none."""
        before, self._step = self._step, index if 0 <= index < _MOST_STEPS else -1
        self._words[self._head + 1] = self._step
        return before

    def left(self) -> None:
        """Record that the rank's program has finished."""
        self._words[self._head + 2] = 1

    def kept(self, index: int) -> None:
        """Record a step whose state or checkpoint is on the disk."""
        self._words[self._head + 3] = index if 0 <= index < _MOST_STEPS else -1


class SpansOnly(RankFlight):
    """Records the spans of a rank in simulated time: nothing is lost when its process ends."""

    __slots__ = ("_append",)

    def __init__(self, append: Callable[[RawSpan], None]) -> None:
        self._append = append

    def issued(self, operation: Recordable, known: Known, call: object, number: int, now_ns: int) -> int:
        """Return -1: no record."""
        return -1

    def carried(self, record: int, began_ns: int, now_ns: int, span: RawSpan | None) -> None:
        """Record the span of a collective."""
        if span is not None:
            self._append(span)

    def step(self, index: int) -> int:
        """Return -1: no step."""
        return -1

    def ended(self, record: int, now_ns: int) -> None:
        """Record nothing."""

    def started(self, record: int, now_ns: int) -> None:
        """Record nothing."""

    def described(self, record: int, operation: Recordable, known: Known, call: object) -> None:
        """Record nothing."""

    def left(self) -> None:
        """Record nothing."""

    def kept(self, index: int) -> None:
        """Record nothing."""
