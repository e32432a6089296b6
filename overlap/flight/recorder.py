"""Writes the flight record: one store into mapped memory when an operation is issued, one when it ends.

It costs an operation 0.3 us in all (`python -m tests.benchmarks span`), because it writes five numbers. The text of a
call (its name, group and line) is written once, when it is new. From then on records refer to it by a number.
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
from . import layout
from .layout import CALLS, KEPT, RECORD, RECORDS


class Known(dict[object, "tuple[tuple[CodeType, int], int]"]):
    """Indexes of calls that are in the file already: a cache of `_CallTable` for one port, or the computes of a rank.

    A value is (place of the call in the program, index of the call). Each call has two keys. The call alone gives the
    place where it was issued last, which is quick to look up. (Code, instruction, call) gives the value again after the
    same call was issued at another place.
    """


_MOST_STEPS = 1 << 62  # larger step numbers, which may not fit into a word, are recorded as -1
_WORD = 8  # bytes
_RECORD_WORDS, _CALL, _ENDED, _STARTED = RECORD.size // _WORD, 2, 4, 5
_pack_issue = layout.ISSUE.pack_into
# Newest calls whose numbers are used again. The file keeps twice as many, so that older records still find their call.
_FRESH = CALLS // 2
_LONGEST_LINE_BYTES = 1000  # of the error
# Longest text of one field of a call, and longest list of its members: all fields together fit into `CALL_BYTES`.
_LONGEST_BYTES, _LONGEST_MEMBERS_BYTES = 80, 300


class Recordable(Protocol):
    """An operation, as the recorder sees it."""

    place: tuple[CodeType, int]  # Code object and index of the instruction that issued it

    def flight_fields(self) -> Mapping[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all operations of one call at one place share."""


class Writer:
    """Writer of one process's flight record.

    Attributes:
        ended: Whether the end of the world has been written.

    Args:
        memory: Memory of `file_bytes(len(ranks))` bytes, all zero.
        ranks: World ranks of this process.
        start: Facts on the job, the world and the process: fields of `reading.Flight`.
    """

    def __init__(self, memory: mmap, ranks: Sequence[int], start: Mapping[str, object]) -> None:
        self._memory = cast("bytearray", memory)
        self._calls = _CallTable(self._memory)
        offsets = [(layout.rank_offset(index), layout.records_offset(index, len(ranks))) for index in range(len(ranks))]
        self._places = dict(zip(ranks, offsets, strict=True))
        self._ranks: list[RankFlight] = []
        self.ended: bool = False
        clocks = {"unix_ns": time_ns(), "clock_ns": perf_counter_ns()}
        layout.write_text(self._memory, layout.START_AT, _json({**start, **clocks}))
        for rank, (at, _) in self._places.items():
            layout.RANK.pack_into(self._memory, at, rank, -1, 0, -1)
        layout.HEAD.pack_into(self._memory, 0, layout.MAGIC, layout.VERSION, len(ranks), RECORDS, CALLS)

    def begin_rank(self, rank: int, spans: Recorder) -> RankFlight:
        """Begin the record of a rank of this process, and return it. Call it once for each rank.

        Args:
            rank: World rank.
            spans: Recorder of the timeline, which gets the rank's spans.

        Raises:
            KeyError: The rank is not in this process.
        """
        self._ranks.append(RankFlight(self._memory, *self._places[rank], self._calls, spans))
        return self._ranks[-1]

    def record_world_end(self, how: str, *, rank: int | None, line: str, began_here: bool) -> None:
        """Write how the world ended; later calls change nothing.

        Args:
            how: "failed", "stalled" or "interrupted".
            rank: The rank at fault; None if unknown.
            line: The error in one line.
            began_here: Whether the error began in this process.
        """
        if self.ended:
            return
        self.ended = True
        end = {"how": how, "rank": rank, "line": _cut_to_plain_text(line, _LONGEST_LINE_BYTES), "here": began_here}
        layout.write_text(self._memory, layout.ENDING_AT, _json({**end, "clock_ns": perf_counter_ns()}))

    def close(self) -> None:
        """Stop writing into the file: later calls of its ranks write into memory that nobody reads."""
        nowhere = bytearray(len(self._memory))
        self._calls.memory = nowhere
        for rank in self._ranks:
            rank.write_to(nowhere)


class _CallTable:
    """Table of distinct calls (name, group, line) in the file; records refer to a call by its index.

    The index is 2 * the number of the call, plus 1 for operations whose input does not exist yet.

    Args:
        memory: The file, mapped.

    Attributes:
        oldest: Lowest index that may be used: the texts of calls with lower ones may be overwritten soon.
    """

    def __init__(self, memory: bytearray) -> None:
        self.memory: bytearray = memory
        self.oldest: int = 0
        self._next = 1
        self._by_text: dict[str, int] = {}

    def find_index(self, operation: Recordable, known: Known, call: object) -> int:
        """Return the index of the call of an operation, and store it in `known`; a new call is written into the file.

        Args:
            operation: The operation, which has the place in the program and the fields of the call.
            known: Cache of indexes; the index is stored under `call`, and under the place and `call`.
            call: The call, as a key; None: the input of the operation does not exist yet.
        """
        code, instruction = operation.place
        # The value in `known` refers to the code object, so that no other object can get its id.
        key = (id(code), instruction, call)
        found = known.get(key)
        if found is None or found[1] < self.oldest:
            if len(known) >= CALLS:  # the cache is full of calls that occurred once
                known.clear()
            number = self._find_or_write(_encode_call_fields(operation.flight_fields()))
            found = known[key] = operation.place, 2 * number + (call is None)
        known[call] = found
        return found[1]

    def _find_or_write(self, text: str) -> int:
        """Return the number of a call; a new text is written over that of the call `CALLS` numbers before."""
        number = self._by_text.get(text)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._by_text[text] = number
            layout.write_call(self.memory, number, text)
            if len(self._by_text) > _FRESH:
                del self._by_text[next(iter(self._by_text))]
                self.oldest = 2 * (self._next - _FRESH)
        return number


def _encode_call_fields(fields: Mapping[str, object]) -> str:
    """Return the fields of a call as JSON, cut to fit into `CALL_BYTES`; too long a list of members is left out."""
    plain = {
        name: _cut_to_plain_text(value, _LONGEST_BYTES) if isinstance(value, str) and name != "members" else value
        for name, value in fields.items()
    }
    members = str(fields.get("members", ""))
    return _json({**plain, "members": members if len(members) <= _LONGEST_MEMBERS_BYTES else ""})


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut_to_plain_text(text: str, limit_bytes: int) -> str:
    """Return a text in at most `limit_bytes` of UTF-8, with characters that JSON would escape replaced by ' or ?."""
    plain = "".join(c if c.isprintable() and c != "\\" else "?" for c in text.replace('"', "'"))
    return plain.encode(errors="replace")[:limit_bytes].decode(errors="ignore")


class _RecordQueue:
    """Operations of a rank that wait for a free record; the oldest one gets the next record.

    A program may issue its operations far ahead. The file then shows the oldest, which are those in flight. An
    operation in the queue has a ticket, a number below -1, in place of a record. A lock guards the queue, as threads
    end computes too.

    Attributes:
        waiting: By ticket, the fields (instant of issue, number, call, step) of each operation without a record.

    Args:
        free: The free records, as indexes of their first words, in the order in which they are taken.
        write: Called with the first word of a record and its fields, to write them.
    """

    def __init__(self, free: deque[int], write: Callable[[int, tuple[int, ...]], None]) -> None:
        self._free, self._write = free, write
        self._lock = Lock()
        self._next = -2  # next ticket; -1 stands for an operation that has no record
        self.waiting: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._taken: dict[int, int] = {}  # by ticket, the records of operations that have waited for one

    def queue_operation(self, fields: tuple[int, ...]) -> int:
        """Queue an operation with its fields (instant of issue, number, call, step), and return its ticket."""
        with self._lock:
            ticket, self._next = self._next, self._next - 1  # downwards: records have the numbers from 0 on
            self.waiting[ticket] = fields
        self.fill_free_records()  # a thread may have freed a record since the caller looked
        return ticket

    def fill_free_records(self) -> None:
        """Write the operations that have waited longest into free records. Call it after a record was freed.

        The last `KEPT` free records are not taken: they still show operations that have ended.
        """
        with self._lock:
            while self.waiting and len(self._free) > KEPT:
                ticket, fields = self.waiting.popitem(last=False)
                self._taken[ticket] = record = self._free.popleft()
                self._write(record, fields)

    def find_record(self, ticket: int) -> int:
        """Return the record that an operation has received, or -1 if it still waits. It takes no lock."""
        # One look into a dict is atomic.
        return self._taken.get(ticket, -1)

    def set_call(self, ticket: int, call: int) -> int:
        """Set the call of an operation that still waits.

        Args:
            ticket: The result of `queue_operation`.
            call: The index of the call.

        Returns:
            The record of the operation, into which the caller writes the call, or -1 if it still waits.
        """
        with self._lock:
            if ticket in self.waiting:
                instant, number, _, step = self.waiting[ticket]
                self.waiting[ticket] = instant, number, call, step
            return self.find_record(ticket)

    def remove_operation(self, ticket: int) -> int:
        """Forget an operation that has ended, and return the record that it used, or -1 if it never received one."""
        with self._lock:
            self.waiting.pop(ticket, None)
            return self._taken.pop(ticket, -1)


class RankFlight:
    """Writer of one rank's operations. Any thread may call `record_start` and `record_end`.

    Only the event loop's thread may call the rest.

    A record is identified by the index of its first 8-byte word in the file, as items of a memoryview are quick to set.
    If no record may be taken, an operation gets a ticket instead, a number below -1, until `_RecordQueue` has one.

    Args:
        memory: The file, mapped.
        base: Offset in bytes of the rank's `layout.RANK`.
        begin: Offset in bytes of the rank's first record.
        calls: Table of the calls of the process.
        spans: Recorder of the timeline, which gets the span of each operation in the same call.
    """

    __slots__ = (
        "_calls", "_count_span", "_free", "_head", "_memory", "_push_span", "_queue", "_step", "_waiting", "_words",
    )  # fmt: skip

    def __init__(self, memory: bytearray, base: int, begin: int, calls: _CallTable, spans: Recorder) -> None:
        first = begin // _WORD
        # Free records, the next one to take first; at the start all.
        self._free = deque(range(first, first + RECORDS * _RECORD_WORDS, _RECORD_WORDS))
        self._head = base // _WORD  # word of the file at which the rank's `layout.RANK` begins
        self._step = -1  # present step, -1: none
        self._calls, self._count_span, self._push_span = calls, spans.count, spans.push
        self._queue = _RecordQueue(self._free, self._write_record)
        self._waiting = self._queue.waiting
        self.write_to(memory)

    def write_to(self, memory: bytearray) -> None:
        """Write into other memory of the same layout from now on."""
        self._memory, self._words = memory, memoryview(memory).cast("q")

    def _write_record(self, first_word: int, fields: tuple[int, ...]) -> None:
        """Write an operation that has waited in the queue into its record; its end and its start are 0 for now."""
        RECORD.pack_into(self._memory, first_word * _WORD, *fields, 0, 0)

    def record_issue(self, operation: Recordable, known: Known, call: object, number: int, now_ns: int) -> int:
        """Record that an operation is issued.

        Args:
            operation: The operation.
            known: Cache of indexes of calls; operations of one port share it.
            call: The call of the operation, as a key of `known`; None: the input does not exist yet.
            number: Number of the operation among those of its group and stream, the same on all ranks.
            now_ns: The present, by `perf_counter_ns`.

        Returns:
            The record of the operation, or a ticket below -1 if no record may be taken. Pass it to the other methods.
        """
        hit, calls, free = known.get(call), self._calls, self._free
        # The index is looked up again if this call was last issued at another line, or if its text may be overwritten.
        if hit is None or hit[0] != operation.place or hit[1] < calls.oldest:
            index = calls.find_index(operation, known, call)
        else:
            index = hit[1]
        if len(free) <= KEPT:
            return self._queue.queue_operation((now_ns, number, index, self._step))
        record = free.popleft()
        _pack_issue(self._memory, record * _WORD, now_ns, number, index, self._step)
        return record

    def record_end(self, record: int, now_ns: int) -> None:
        """Record the end of an operation, and free its record. Any thread may call it.

        Args:
            record: The result of `record_issue`; -1: there is no record, and nothing happens.
            now_ns: The instant of the end by `perf_counter_ns`, negative if the operation failed.
        """
        if record < 0:
            record = self._queue.remove_operation(record)
        if record >= 0:
            self._words[record + _ENDED] = now_ns
            self._free.append(record)
            if self._waiting:
                self._queue.fill_free_records()

    def record_success(self, record: int, began_ns: int, now_ns: int, span: RawSpan | None) -> None:
        """Record that an operation, such as a collective, has ended without error: its start, its end, and its span.

        Args:
            record: The result of `record_issue`; the record is freed.
            began_ns: When it began, by `perf_counter_ns`.
            now_ns: When it ended, by `perf_counter_ns`.
            span: Span for the timeline; None: the timeline gets none.
        """
        if span is not None:
            # What `Recorder.append` does, in this order, without the cost of calling it.
            self._count_span()
            self._push_span(span)
        if record < 0:
            record = self._queue.remove_operation(record)
        if record >= 0:
            words = self._words
            words[record + _STARTED] = began_ns
            words[record + _ENDED] = now_ns
            self._free.append(record)
            if self._waiting:
                self._queue.fill_free_records()

    def record_start(self, record: int, now_ns: int) -> None:
        """Record that a thread has begun to run a compute; any thread may call it.

        Args:
            record: The result of `record_issue`; -1: there is no record, and nothing happens.
            now_ns: When it began, by `perf_counter_ns`.
        """
        if record < 0:
            record = self._queue.find_record(record)
        if record >= 0:
            self._words[record + _STARTED] = now_ns

    def record_call(self, record: int, operation: Recordable, known: Known, call: object) -> None:
        """Record the call of an operation that was issued before its input existed, now that the input is known.

        Args:
            record: The result of `record_issue`.
            operation: The operation, with the fields of its call.
            known: Cache of indexes of calls, as for `record_issue`.
            call: The call of the operation, as a key of `known`.
        """
        index = self._calls.find_index(operation, known, call)
        if record < 0:
            record = self._queue.set_call(record, index)
        if record >= 0:
            self._words[record + _CALL] = index

    def record_step(self, index: int) -> int:
        """Record that step `index` begins. Return the previous step.

        -1: there was none, or its number was negative or too large.
        """
        before, self._step = self._step, index if 0 <= index < _MOST_STEPS else -1
        # The head of a rank is `layout.RANK`: rank, step, whether its program has finished, newest step on the disk.
        self._words[self._head + 1] = self._step
        return before

    def record_finished(self) -> None:
        """Record that the rank's program has finished."""
        self._words[self._head + 2] = 1  # "whether its program has finished", see `record_step`

    def record_saved_step(self, index: int) -> None:
        """Record that the state or checkpoint of step `index` is on the disk; too large a number is recorded as -1."""
        # "newest step on the disk", see `record_step`
        self._words[self._head + 3] = index if 0 <= index < _MOST_STEPS else -1


class SpansOnly(RankFlight):
    """Stand-in for `RankFlight` in simulations: it passes on spans, and writes no flight record.

    Args:
        append: Called with each span.
    """

    __slots__ = ("_append",)

    def __init__(self, append: Callable[[RawSpan], None]) -> None:
        self._append = append

    def record_issue(self, operation: Recordable, known: Known, call: object, number: int, now_ns: int) -> int:
        """Record nothing, and return -1: the operation has no record."""
        return -1

    def record_success(self, record: int, began_ns: int, now_ns: int, span: RawSpan | None) -> None:
        """Pass on the span of an operation that has ended without error, if there is one."""
        if span is not None:
            self._append(span)

    def record_step(self, index: int) -> int:
        """Record nothing, and return -1: no step."""
        return -1

    def _record_nothing(self, *facts: object, **named: object) -> None:
        """Do nothing."""

    record_end = record_start = record_call = record_finished = record_saved_step = _record_nothing
