"""Reads a flight record back, of a process that has ended or of one that runs, and refuses what is none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..timeline.ranklist import unlisted
from .layout import (
    CALLS,
    ENDING_AT,
    RANK,
    RECORD,
    RECORDS_BYTES,
    START_AT,
    TEXT_LIMIT_BYTES,
    call_of,
    rank_at,
    ranks_of,
    read_text,
    records_at,
)

__all__ = ["Flight", "Operation", "RankRecord", "WorldEnd", "read_flight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a rank has issued. Instants are nanoseconds since 1970.

    Attributes:
        name: As given by the caller, or that of the operation or function.
        what: The call in full; "" if its input was not there yet.
        kind: "compute", or what else it is.
        group: Name of its group; "" for a compute.
        towards: The peer of a message, for people to read.
        members: World ranks that meet in it; () if they are not known.
        key: What names the place where they meet, the same on all of them.
        number: Its position there.
        site: Where it was called.
        step: The step in which it was issued, or None.
        issued_ns: When it was issued.
        started_ns: When it was begun, of a compute; None if not yet, or not known.
        ended_ns: When it ended; None if it has not.
        failed: Whether it ended badly.
    """

    name: str
    what: str
    kind: str
    group: str
    towards: str
    members: tuple[int, ...]
    key: str
    number: int
    site: str
    step: int | None
    issued_ns: int
    started_ns: int | None
    ended_ns: int | None
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What is known of one rank.

    Attributes:
        rank: World rank.
        step: The step that it was in, or None.
        left: Whether its program had finished.
        lost: How many operations found no room.
        operations: The last ones, in the order in which they were issued.
    """

    rank: int
    step: int | None
    left: bool
    lost: int
    operations: tuple[Operation, ...]

    @property
    def unfinished(self) -> list[Operation]:
        """Those that have not ended, oldest first; also those with whose failure the rank's program ended."""
        last_ns = max((operation.issued_ns for operation in self.operations), default=0)
        return [op for op in self.operations if op.ended_ns is None or (op.failed and op.ended_ns > last_ns)]

    @property
    def last_ns(self) -> int:
        """The last instant of which anything is known."""
        return max((max(op.issued_ns, op.started_ns or 0, op.ended_ns or 0) for op in self.operations), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldEnd:
    """How a world ended, as one process saw it.

    Attributes:
        how: "failed", "stalled" or "interrupted".
        rank: Who is at fault, as far as is known.
        line: The error.
        here: Whether it began in that process.
        at_ns: When.
    """

    how: str
    rank: int | None
    line: str
    here: bool
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """The flight record of one process.

    Attributes:
        path: The file.
        job: Name of the job.
        attempt: How often the job had been started again.
        world: Which of the program's worlds, from 0.
        process: Index of the process.
        processes: How many there were.
        world_size: Ranks in the world.
        host: Where it ran.
        pid: The process.
        born: When the process began, as its system counts; "" if that is not known.
        started_ns: When the world began.
        ranks: Those of this process.
        ending: How the world ended; None: the process did not live to see that, or it still runs.
    """

    path: str
    job: str
    attempt: int
    world: int
    process: int
    processes: int
    world_size: int
    host: str
    pid: int
    born: str
    started_ns: int
    ranks: tuple[RankRecord, ...]
    ending: WorldEnd | None


def read_flight(path: str | os.PathLike[str]) -> Flight:
    """Read one file.

    Raises:
        UsageError: Naming the file and what is wrong with it.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    try:
        ranks = ranks_of(data)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    try:
        return _flight(path, data, ranks)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UsageError(f"{path}: is damaged: {type(error).__name__}: {error}") from None


def _flight(path: str | os.PathLike[str], data: bytes, ranks: int) -> Flight:
    start = json.loads(read_text(data, START_AT, TEXT_LIMIT_BYTES))
    since_ns = int(start["unix_ns"]) - int(start["clock_ns"])
    calls = dict(_calls(data))
    return Flight(
        path=os.fspath(path),
        job=str(start["job"]),
        attempt=int(start["attempt"]),
        world=int(start["world"]),
        process=int(start["process"]),
        processes=int(start["processes"]),
        world_size=int(start["world_size"]),
        host=str(start["host"]),
        pid=int(start["pid"]),
        born=str(start["born"]),
        started_ns=int(start["unix_ns"]),
        ranks=tuple(_rank(data, rank_at(index), records_at(index, ranks), calls, since_ns) for index in range(ranks)),
        ending=_ending(read_text(data, ENDING_AT, TEXT_LIMIT_BYTES), since_ns),
    )


def _ending(text: str, since_ns: int) -> WorldEnd | None:
    if not text:
        return None
    told = json.loads(text)
    rank = told["rank"]
    return WorldEnd(
        how=str(told["how"]),
        rank=None if rank is None else int(rank),
        line=str(told["line"]),
        here=bool(told["here"]),
        at_ns=int(told["clock_ns"]) + since_ns,
    )


def _calls(data: bytes) -> list[tuple[int, Mapping[str, str]]]:
    found: list[tuple[int, Mapping[str, str]]] = []
    for slot in range(CALLS):
        number, text = call_of(data, slot)
        if number > 0:
            found.append((number, {str(name): str(value) for name, value in json.loads(text).items()}))
    return found


def _rank(data: bytes, at: int, begin: int, calls: Mapping[int, Mapping[str, str]], since_ns: int) -> RankRecord:
    rank, step, left, lost = RANK.unpack_from(data, at)
    records = RECORD.iter_unpack(data[begin : begin + RECORDS_BYTES])
    operations = [_operation(record, calls, since_ns) for record in records if record[0] > 0]
    operations.sort(key=lambda operation: (operation.issued_ns, operation.key, operation.number))
    return RankRecord(
        rank=rank, step=_step(step), left=bool(left), lost=lost, operations=tuple(operations)
    )  # fmt: skip


def _operation(record: tuple[int, ...], calls: Mapping[int, Mapping[str, str]], since_ns: int) -> Operation:
    issued, number, call, step, ended, started = record
    told = calls.get(call, {"name": "an operation whose call is no longer kept"})
    return Operation(
        name=told.get("name", ""),
        what=told.get("what", ""),
        kind=told.get("kind", ""),
        group=told.get("group", ""),
        towards=told.get("towards", ""),
        members=unlisted(told["members"]) if told.get("members") else (),
        key=told.get("key", ""),
        number=number,
        site=told.get("site", ""),
        step=_step(step),
        issued_ns=issued + since_ns,
        started_ns=started + since_ns if started > issued else None,
        ended_ns=abs(ended) + since_ns if abs(ended) > issued else None,
        failed=ended < -issued,
    )


def _step(step: int) -> int | None:
    return None if step < 0 else step
