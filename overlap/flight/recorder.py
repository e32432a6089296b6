"""Writes the flight record: one store into mapped memory when an operation is issued, one when it ends.

It costs an operation 0.3 us in all (`python -m tests.benchmarks span`), because it writes five numbers. Words
(the call, the group, the line) are written once, when they are new, and have a number from then on.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from threading import Lock
from time import perf_counter_ns, time_ns
from types import CodeType
from typing import Protocol, TypeAlias, cast
from weakref import ref

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

_Found: TypeAlias = "tuple[tuple[CodeType, int], int]"  # a place, and the number of the call there


class Known(dict[object, _Found]):
    """The calls of a port, or the computes of a rank, that have a number already."""

    __slots__ = ("__weakref__",)  # ports of messages come and go


_MOST_STEPS = 1 << 62  # a larger one is not kept: it may not fit
_WORD = 8  # bytes
_RECORD_WORDS, _CALL, _ENDED, _STARTED = RECORD.size // _WORD, 2, 4, 5
_FRESH = CALLS // 2  # numbers that are still given out: a record in the ring should find its call for a while
_LONGEST_LINE_BYTES = 1000  # of the error
# Longest word of a call, and longest list of its members: all of them fit into `CALL_BYTES`.
_LONGEST_BYTES, _LONGEST_MEMBERS_BYTES = 80, 300


class Recordable(Protocol):
    """An operation, as the recorder sees it."""

    place: tuple[CodeType, int]  # Where it was issued, as code and instruction

    def flight_fields(self) -> Mapping[str, object]:
        """Return the fields of `waits.ends.CallRecord`, which all operations of one call at one place share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFlight:
    """Functions that record one rank; the loop's thread only, but for `started` and `ended`."""

    # Takes an operation, the calls known to those like it, its own call (None: its input is not there yet), its number
    # and the instant; returns its record, or a number below -1 to name it by until it has one.
    issued: Callable[[Recordable, Known, object, int, int], int]
    # Takes the record and the instant, negative if it failed; the thread that runs it.
    ended: Callable[[int, int], None]
    # Takes the record, the instants at which a collective began on this rank and ended well, and its span in the
    # timeline, None for none: one call for both, at the end of every operation.
    carried: Callable[[int, int, int, RawSpan | None], None]
    # Takes the record and the instant at which a thread began to run it; any thread.
    started: Callable[[int, int], None]
    # Takes the record, the operation, and what `issued` took before the number: the call is known now.
    described: Callable[[int, Recordable, Known, object], None]
    step: Callable[[int], int]  # Takes the step that begins, and returns the one before it; -1 is none
    left: Callable[[], None]  # The rank's program has finished
    kept: Callable[[int], None]  # Takes a step whose state or checkpoint is on the disk


def without_record(append: Callable[[RawSpan], None]) -> RankFlight:
    """Return functions that record spans only, for ranks in simulated time: nothing is lost when their process ends."""
    return RankFlight(
        issued=lambda operation, known, call, number, now_ns: -1,
        ended=lambda record, now_ns: None,
        carried=lambda record, began_ns, now_ns, span: None if span is None else append(span),
        started=lambda record, now_ns: None,
        described=lambda record, operation, known, call: None,
        step=lambda index: -1,
        left=lambda: None,
        kept=lambda index: None,
    )


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
        self._redirects: list[Callable[[bytearray], None]] = []  # each rank to other memory
        self.ended: bool = False
        clocks = {"unix_ns": time_ns(), "clock_ns": perf_counter_ns()}
        write_text(self._memory, START_AT, _json({**start, **clocks}), TEXT_LIMIT_BYTES)
        for rank, (at, _) in self._places.items():
            RANK.pack_into(self._memory, at, rank, -1, 0, -1)
        HEAD.pack_into(self._memory, 0, MAGIC, VERSION, len(ranks), RECORDS, CALLS)

    def rank(self, rank: int, spans: Recorder) -> RankFlight:
        """Return the functions that record a rank of this process, and its spans in `spans`."""
        flight, write_to = _recording_functions(self._memory, *self._places[rank], self._calls, spans)
        self._redirects.append(write_to)
        return flight

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
        self._calls.write_to(nowhere)
        for write_to in self._redirects:
            write_to(nowhere)


class _Calls:
    """Numbers of calls, under which the record has their words: name, group, place in the program."""

    def __init__(self, memory: bytearray) -> None:
        self._memory = memory
        self._next = 1
        self._by_text: dict[str, int] = {}
        self._kept: dict[int, dict[int, tuple[ref[Known], set[object]]]] = {}  # by number, and id of who knows it

    def write_to(self, memory: bytearray) -> None:
        """Write to other memory from now on."""
        self._memory = memory

    def find(self, operation: Recordable, numbers: Known, call: object) -> int:
        """Return the number of a call at a place of the program, negative without its input; store it in `numbers`."""
        code, instruction = operation.place
        key = (id(code), instruction, call)
        numbered = numbers.get(key)
        if numbered is None:
            number = self._number_of_words(_encode_words(operation.flight_fields()))
            numbered = operation.place, number if call is not None else -number
            self._store_number(numbers, key, numbered)
        self._store_number(numbers, call, numbered)
        return numbered[1]

    def _store_number(self, known: Known, key: object, found: _Found) -> None:
        """Store the number of a call in `known`, and note it, so that `_forget` can remove it."""
        known[key] = found  # and with it the code, whose id is in some keys
        kept, own = self._kept.setdefault(abs(found[1]), {}), id(known)
        if own not in kept:
            kept[own] = ref(known, lambda _: kept.pop(own, None)), set()
        kept[own][1].add(key)

    def _number_of_words(self, text: str) -> int:
        """Return the number of these words; new words take the place of the words `CALLS` numbers before."""
        number = self._by_text.get(text)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._by_text[text] = number
            at = call_offset(number)
            CALL_HEAD.pack_into(self._memory, at, 0)
            write_text(self._memory, at + CALL_HEAD.size, text, CALL_BYTES - CALL_HEAD.size - 4)
            CALL_HEAD.pack_into(self._memory, at, number)
            self._forget(number - _FRESH)
        return number

    def _forget(self, number: int) -> None:
        """Remove a number everywhere: its words are about to be overwritten. The call gets a new one next time."""
        for known_by, keys in self._kept.pop(number, {}).values():
            known = known_by()
            for key in keys if known is not None else ():
                if known is not None and abs(known.get(key, (None, 0))[1]) == number:
                    del known[key]
        for text in [text for text, own in self._by_text.items() if own == number][:1]:
            del self._by_text[text]


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


def _recording_functions(
    memory: bytearray, base: int, begin: int, calls: _Calls, spans: Recorder
) -> tuple[RankFlight, Callable[[bytearray], None]]:
    """Return the functions that record a rank, and one that redirects them; closures are faster than methods.

    The index of its first word identifies a record: an item of a memoryview is cheaper to set than by `pack_into`.
    """
    words = memoryview(memory).cast("q")
    first = begin // _WORD
    free = deque(range(first, first + RECORDS * _RECORD_WORDS, _RECORD_WORDS))
    count_span, push_span = spans.count, spans.push
    take, give, pack = free.popleft, free.append, ISSUE.pack_into
    step_at, left_at, kept_at = (base // _WORD + index for index in (1, 2, 3))
    current = -1

    def write(record: int, values: tuple[int, ...]) -> None:
        """Write a queued operation into its record."""
        RECORD.pack_into(memory, record * _WORD, *values, 0, 0)

    queue = _RecordQueue(free, write)
    waiting = queue.waiting

    def record_issue(operation: Recordable, numbers: Known, call: object, number: int, now_ns: int) -> int:
        """Record an operation that is issued; return its record, or its name in the queue without a free record."""
        hit = numbers.get(call)
        index = hit[1] if hit is not None and hit[0] == operation.place else calls.find(operation, numbers, call)
        if len(free) <= KEPT:
            return queue.add((now_ns, number, index, current))
        record = take()
        pack(memory, record * _WORD, now_ns, number, index, current)
        return record

    def record_end(record: int, now_ns: int) -> None:
        """Record the end of an operation, and free its record."""
        if record < 0:
            record = queue.end(record)
        if record >= 0:
            words[record + _ENDED] = now_ns
            give(record)
            if waiting:
                queue.go_on()

    def record_collective_end(record: int, began_ns: int, now_ns: int, span: RawSpan | None) -> None:
        """Record the start and the end of a collective, free its record, and record its span."""
        if span is not None:
            count_span()
            push_span(span)
        if record < 0:
            record = queue.end(record)
        if record >= 0:
            words[record + _STARTED] = began_ns
            words[record + _ENDED] = now_ns
            give(record)
            if waiting:
                queue.go_on()

    def record_start(record: int, now_ns: int) -> None:
        """Record that a thread has begun to run a compute."""
        if record < 0:
            record = queue.find(record)
        if record >= 0:
            words[record + _STARTED] = now_ns

    def record_call(record: int, operation: Recordable, numbers: Known, call: object) -> None:
        """Record the call of an operation that was issued before its input was there."""
        call_number = calls.find(operation, numbers, call)
        if record < 0:
            record = queue.describe(record, call_number)
        if record >= 0:
            words[record + _CALL] = call_number

    def record_step(index: int) -> int:
        """Record the step that begins; return the one before it."""
        nonlocal current
        before, current = current, index if 0 <= index < _MOST_STEPS else -1
        words[step_at] = current
        return before

    def record_leave() -> None:
        words[left_at] = 1

    def record_saved_step(index: int) -> None:
        words[kept_at] = index if 0 <= index < _MOST_STEPS else -1

    def write_to(new_memory: bytearray) -> None:
        """Write to other memory from now on."""
        nonlocal memory, words
        words.release()
        memory, words = new_memory, memoryview(new_memory).cast("q")

    flight = RankFlight(
        issued=record_issue,
        ended=record_end,
        carried=record_collective_end,
        started=record_start,
        described=record_call,
        step=record_step,
        left=record_leave,
        kept=record_saved_step,
    )
    return flight, write_to
