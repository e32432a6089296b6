"""Reader of flight records, of a process that runs or has ended: operations as arrays, or as objects."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap

import numpy as np
from msgspec import MsgspecError, Struct, convert, field
from msgspec.structs import replace
from numpy.typing import NDArray

from ..errors import UsageError
from ..waits.ends import CallRecord, End, EndState, call_of
from .layout import (
    ENDING_AT,
    RANK,
    RECORDS,
    RECORDS_BYTES,
    START_AT,
    TEXT_LIMIT_BYTES,
    check_layout,
    rank_offset,
    read_call,
    read_text,
    records_offset,
)

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, MsgspecError)


FORGOTTEN = CallRecord(op="operation", name="an operation whose call is no longer kept")


@dataclass(frozen=True, slots=True)
class RankTable:
    """The last operations of one rank as an array; instants are nanoseconds since 1970."""

    rank: int  # World rank
    step: int  # The step that it is or was in, or -1
    left: bool  # Whether its program has finished
    # (6, n), in no order: issued, number, call (negative: its input is not there yet), step (-1: none), ended (0: not
    # yet; negative: badly), started (0: not known).
    operations: NDArray[np.int64]
    calls: Mapping[int, CallRecord]  # By number, those of its process
    cut: bool = False  # Whether operations before these are no longer known
    kept: int = -1  # Newest step whose state or checkpoint is on the disk, or -1

    @property
    def last_step(self) -> int:
        """Number of the last step that the rank is known to have begun; -1: none."""
        return max(self.step, int(self.operations[3].max(initial=-1)))

    @property
    def last_ns(self) -> int:
        """Last recorded instant of the rank, in nanoseconds since 1970; 0 without operations."""
        return int(np.abs(self.operations[[0, 4, 5]]).max(initial=0))

    def ends(self, until_ns: int | None = None) -> list[End]:
        """Return the operations in the order of issue; operations that ended at `until_ns` or later are unfinished."""
        ends = []
        for issued, number, call, step, ended, started in self.operations.T.tolist():
            of, ended_ns = self.calls.get(abs(call), FORGOTTEN), abs(ended)
            if ended and (until_ns is None or ended_ns < until_ns):
                state = EndState.DONE if ended > 0 else EndState.FAILED
            elif of.meets:
                state, ended_ns = EndState.WAITING if call > 0 else EndState.BLOCKED, 0
            else:
                state, ended_ns = EndState.MOVING if started else EndState.QUEUED, 0
            end = End(
                rank=self.rank, call=of, seq=number, state=state, issued_ns=issued, begun_ns=started or None,
                done_ns=ended_ns or None, step=None if step < 0 else step,
            )  # fmt: skip
            ends.append(end)
        return sorted(ends, key=lambda end: (end.issued_ns, end.meeting))


class WorldEnd(Struct, frozen=True, kw_only=True):
    """The end of a world, as one process saw it."""

    how: str  # "failed", "stalled" or "interrupted"
    rank: int | None  # The rank at fault, as far as is known
    line: str  # The error
    here: bool  # Whether it began in that process
    at_ns: int = field(name="clock_ns")  # When; in a record by the clock of its process


class Flight(Struct, frozen=True, kw_only=True, eq=False):
    """The flight record of one process."""

    path: str = ""  # The file
    job: str  # Name of the job
    attempt: int  # How often the job had been started again
    world: int  # Number among the program's worlds, from 0
    process: int  # Index of the process
    processes: int  # How many there were
    world_size: int  # Ranks in the world
    host: str  # Where it ran
    pid: int  # The process
    born: str  # When the process began, as its system counts; "" if that is not known
    started_ns: int = field(name="unix_ns")  # When the world began
    clock_ns: int = 0  # The same by the clock of its process
    script: str = ""  # The program
    folder: str = ""  # The working directory in which the world began, or its end; "" if that is not known
    ranks: Sequence[RankTable] = ()  # Ranks of this process
    ending: WorldEnd | None = None  # None: the process did not live to see the end of the world, or it still runs


class OpenRecord:
    """A flight record that is open for reading: its process may go on writing it.

    Attributes:
        path: The file.
        about: The start of the record.
        calls: Calls by number.
        since_ns: The difference between its instants in nanoseconds since 1970 and by its `perf_counter_ns`.

    Raises:
        UsageError: Naming the file and the fault.
    """

    path: str
    calls: dict[int, CallRecord]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self.calls = os.fspath(path), dict[int, CallRecord]()
        try:
            with open(path, "rb") as file:
                self._memory = mmap(file.fileno(), 0, access=ACCESS_READ)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; name a record that can be read") from None
        except ValueError:  # nothing is in it
            raise UsageError(f"{path}: is no flight record; leave it out") from None
        try:
            self._ranks = check_layout(self._memory)
        except ValueError as error:
            self.close()
            raise UsageError(f"{path}: {error}") from None
        try:
            start = convert({**json.loads(self._read_text_at(START_AT)), "ranks": (), "ending": None}, Flight)
        except _DAMAGE as error:
            self.close()
            raise _damage_error(path, error) from None
        self.about: Flight = replace(start, path=self.path)
        self.since_ns: int = start.started_ns - start.clock_ns

    @property
    def has_ended(self) -> bool:
        """Whether the record has the end of its world."""
        return bool(self._read_text_at(ENDING_AT))

    def ending(self) -> WorldEnd | None:
        """Return the end of the world, or None if the process has not recorded it."""
        text = self._read_text_at(ENDING_AT)
        if not text:
            return None
        end = convert(json.loads(text), WorldEnd)
        return replace(end, at_ns=end.at_ns + self.since_ns)

    def ranks(self) -> list[RankTable]:
        """Return the last operations of each rank, and read the calls that are new."""
        tables = []
        for index in range(self._ranks):
            rank, step, left, kept = RANK.unpack_from(self._memory, rank_offset(index))
            begin = records_offset(index, self._ranks)
            table = np.frombuffer(self._memory[begin : begin + RECORDS_BYTES], np.int64).reshape(RECORDS, 6).T
            known = self._decode_operations(table[:, table[0] > 0])
            tables.append(RankTable(rank, step, bool(left), known, self.calls, len(known[0]) == RECORDS, kept))
        return tables

    def _decode_operations(self, table: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return operations with instants in nanoseconds since 1970, 0 for instants that have not come yet."""
        issued, number, call, step, ended, started = table  # rows of the table, one element for each operation
        call = np.where(call & 1, -(call >> 1), call >> 1)
        for each in set(np.unique(np.abs(call)).tolist()) - self.calls.keys():
            self._read_call(each)
        ended_at = np.abs(ended)  # the sign says whether it failed
        # an older instant is left from the operation that had this record before
        ended = np.where(ended_at > issued, np.sign(ended) * (ended_at + self.since_ns), 0)
        started = np.where(started > issued, started + self.since_ns, 0)
        return np.stack([issued + self.since_ns, number, call, step, ended, started])

    def _read_call(self, number: int) -> None:
        """Store a call in `calls`, unless it is being written, or another one has taken its place."""
        with suppress(ValueError, TypeError, AttributeError, KeyError, MsgspecError):  # torn: the next look finds it
            stored_number, text = read_call(self._memory, number)
            if stored_number == number:
                self.calls[number] = call_of(json.loads(text))

    def _read_text_at(self, at: int) -> str:
        return read_text(self._memory, at, TEXT_LIMIT_BYTES)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()


def read_flight(path: str | os.PathLike[str]) -> Flight:
    """Read one file.

    Raises:
        UsageError: Naming the file and the fault.
    """
    with closing(OpenRecord(path)) as record:
        try:
            return replace(record.about, ranks=record.ranks(), ending=record.ending())
        except _DAMAGE as error:
            raise _damage_error(path, error) from None


def _damage_error(path: str | os.PathLike[str], error: Exception) -> UsageError:
    return UsageError(f"{path}: is damaged: {type(error).__name__}: {error}; leave it out")
