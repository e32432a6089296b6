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
from ..waits.ends import CallRecord, End, EndState, parse_call_fields
from . import layout

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, MsgspecError)


FORGOTTEN = CallRecord(op="operation", name="an operation whose call is no longer kept")
"""The call of operations whose text has been overwritten in the file."""
_ISSUED, _STEP, _ENDED, _STARTED = 0, 3, 4, 5
"""Rows of `RankTable.operations`."""


@dataclass(frozen=True, slots=True)
class RankTable:
    """The last operations of one rank as an array; instants are nanoseconds since 1970."""

    rank: int  # World rank
    step: int  # The step that the rank is or was in, or -1
    left: bool  # Whether the rank's program has finished
    # (6, n), a column for each operation, in no order. Rows: issued, number, call (negative: the input does not exist
    # yet), step (-1: none), ended (0: not yet; negative: with an error), started (0: not known).
    operations: NDArray[np.int64]
    calls: Mapping[int, CallRecord]  # Calls of the process, by number
    cut: bool = False  # Whether earlier operations may have been overwritten
    saved_step: int = -1  # Newest step whose state or checkpoint is on the disk, or -1

    @property
    def last_step(self) -> int:
        """Number of the last step that the rank is known to have begun, or -1."""
        return max(self.step, int(self.operations[_STEP].max(initial=-1)))

    @property
    def last_ns(self) -> int:
        """Last recorded instant of the rank, in nanoseconds since 1970, or 0 without operations."""
        # The absolute value: the end of a failed operation is negative.
        return int(np.abs(self.operations[[_ISSUED, _ENDED, _STARTED]]).max(initial=0))

    def ends(self, until_ns: int | None = None) -> list[End]:
        """Return the operations in the order of issue, each with its state.

        Args:
            until_ns: Operations that ended at this instant or later count as unfinished. None: as recorded.
        """
        ends = []
        for issued, number, call, step, ended, started in self.operations.T.tolist():
            of, ended_ns = self.calls.get(abs(call), FORGOTTEN), abs(ended)
            if ended and (until_ns is None or ended_ns < until_ns):
                state = EndState.DONE if ended > 0 else EndState.FAILED
            elif of.meets:  # a collective or message; a negative call has no input yet
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
    rank: int | None  # The rank at fault; None if unknown
    line: str  # The error in one line
    here: bool  # Whether the error began in the process that wrote this
    at_ns: int = field(name="clock_ns")  # Instant, in nanoseconds since 1970; in the file by the process's clock


class Flight(Struct, frozen=True, kw_only=True, eq=False):
    """The flight record of one process."""

    path: str = ""  # The file
    job: str  # Name of the job
    attempt: int  # Number of restarts of the job before this one
    world: int  # Number of this world among those of the process, from 0
    process: int  # Index of the process
    processes: int  # Number of processes of the world
    world_size: int  # Ranks in the world
    host: str  # Name of the process's machine
    pid: int  # Id of the process
    born: str  # When the process began, as its system counts; "" if unknown
    started_ns: int = field(name="unix_ns")  # When the world began, in nanoseconds since 1970
    clock_ns: int = 0  # The same instant by `perf_counter_ns` of the process
    script: str = ""  # Path of the program
    folder: str = ""  # Working directory in which the world began, or the last part of a long path; "" if unknown
    ranks: Sequence[RankTable] = ()  # Ranks of this process
    ending: WorldEnd | None = None  # None: the world still runs, or the process ended before it


class OpenRecord:
    """A flight record that is open for reading, while its process may go on writing it.

    Attributes:
        path: The file.
        start: The start of the record: the job, its program, the process, and the sizes of the world.
        calls: Calls read so far, by number.
        since_ns: Added to an instant of the file (`perf_counter_ns` of its process), gives nanoseconds since 1970.

    Args:
        path: The file.

    Raises:
        UsageError: The file cannot be read, or is no flight record. The message names the file and the fault.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: str = os.fspath(path)
        self.calls: dict[int, CallRecord] = {}
        try:
            with open(path, "rb") as file:
                self._memory = mmap(file.fileno(), 0, access=ACCESS_READ)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; name a record that can be read") from None
        except ValueError:  # `mmap` refuses an empty file
            raise UsageError(f"{path}: is empty, so it is no flight record; leave it out") from None
        try:
            self._ranks = layout.check_layout(self._memory)
        except ValueError as error:
            self.close()
            raise UsageError(f"{path}: {error}") from None
        try:
            fields = json.loads(layout.read_text(self._memory, layout.START_AT))
            start = convert({**fields, "ranks": (), "ending": None}, Flight)
        except _DAMAGE as error:
            self.close()
            raise _damage_error(path, error) from None
        self.start: Flight = replace(start, path=self.path)
        self.since_ns: int = start.started_ns - start.clock_ns

    @property
    def has_ended(self) -> bool:
        """Whether the record has the end of its world."""
        return bool(layout.read_text(self._memory, layout.ENDING_AT))

    def read_ending(self) -> WorldEnd | None:
        """Return the end of the world, or None if the process has not recorded it."""
        text = layout.read_text(self._memory, layout.ENDING_AT)
        if not text:
            return None
        end = convert(json.loads(text), WorldEnd)
        return replace(end, at_ns=end.at_ns + self.since_ns)

    def read_ranks(self) -> list[RankTable]:
        """Return the last operations of each rank of the process, and read calls that are new into `calls`."""
        tables = []
        for index in range(self._ranks):
            rank, step, left, kept = layout.RANK.unpack_from(self._memory, layout.rank_offset(index))
            begin = layout.records_offset(index, self._ranks)
            words = np.frombuffer(self._memory[begin : begin + layout.RECORDS_BYTES], np.int64)
            table = words.reshape(layout.RECORDS, 6).T
            # A record that was never used has 0 for the instant of issue.
            known = self._read_operations(table[:, table[_ISSUED] > 0])
            tables.append(RankTable(rank, step, bool(left), known, self.calls, len(known[0]) == layout.RECORDS, kept))
        return tables

    def _read_operations(self, table: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert (6, n) records of a file to `RankTable.operations`, and read calls that are new into `calls`."""
        issued, number, call, step, ended, started = table
        # Without an input yet, call 7 is 15 in the file and -7 here; with an input it is 14 and 7.
        call_number, lacks_input = call >> 1, call & 1
        call = np.where(lacks_input, -call_number, call_number)
        for new_number in set(np.unique(np.abs(call)).tolist()) - self.calls.keys():
            with suppress(
                ValueError, TypeError, AttributeError, KeyError, MsgspecError
            ):  # read while it was written: the next look reads it again
                stored_number, text = layout.read_call(self._memory, new_number)
                if stored_number == new_number:  # otherwise it is being written, or another call has overwritten it
                    self.calls[new_number] = parse_call_fields(json.loads(text))
        ended_at = np.abs(ended)  # a negative end: with an error
        # An instant before the issue is left from the operation that had this record before.
        ended = np.where(ended_at > issued, np.sign(ended) * (ended_at + self.since_ns), 0)
        started = np.where(started > issued, started + self.since_ns, 0)
        return np.stack([issued + self.since_ns, number, call, step, ended, started])

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()


def read_flight(path: str | os.PathLike[str]) -> Flight:
    """Read the flight record in a file.

    Raises:
        UsageError: The file cannot be read, is damaged, or is no flight record. The message names file and fault.
    """
    with closing(OpenRecord(path)) as record:
        try:
            return replace(record.start, ranks=record.read_ranks(), ending=record.read_ending())
        except _DAMAGE as error:
            raise _damage_error(path, error) from None


def _damage_error(path: str | os.PathLike[str], error: Exception) -> UsageError:
    return UsageError(f"{path}: is damaged: {type(error).__name__}: {error}; leave it out")
