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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a rank has issued. Instants are nanoseconds since 1970."""

    name: str  # As given by the caller, or that of the operation or function
    what: str  # The call in full; "" if its input was not there yet
    kind: str  # "compute", or what else it is
    group: str  # Name of its group; "" for a compute
    towards: str  # The peer of a message, for people to read
    members: tuple[int, ...]  # World ranks that meet in it; () if they are not known
    key: str  # What names the place where they meet, the same on all of them
    number: int  # Its position there
    site: str  # Where it was called
    step: int | None  # The step in which it was issued, or None
    issued_ns: int  # When it was issued
    started_ns: int | None  # When it was begun, of a compute; None if not yet, or not known
    ended_ns: int | None  # When it ended; None if it has not
    failed: bool  # Whether it ended badly


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What is known of one rank."""

    rank: int  # World rank
    step: int | None  # The step that it was in, or None
    left: bool  # Whether its program had finished
    lost: int  # How many operations found no room
    operations: tuple[Operation, ...]  # The last ones, in the order in which they were issued

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
    """How a world ended, as one process saw it."""

    how: str  # "failed", "stalled" or "interrupted"
    rank: int | None  # Who is at fault, as far as is known
    line: str  # The error
    here: bool  # Whether it began in that process
    at_ns: int  # When


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """The flight record of one process."""

    path: str  # The file
    job: str  # Name of the job
    attempt: int  # How often the job had been started again
    world: int  # Which of the program's worlds, from 0
    process: int  # Index of the process
    processes: int  # How many there were
    world_size: int  # Ranks in the world
    host: str  # Where it ran
    pid: int  # The process
    born: str  # When the process began, as its system counts; "" if that is not known
    started_ns: int  # When the world began
    ranks: tuple[RankRecord, ...]  # Those of this process
    ending: WorldEnd | None  # How the world ended; None: the process did not live to see that, or it still runs


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
