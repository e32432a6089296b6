"""Autopsy of a world: the culprit, its place and the operation it waited in, in three lines; and a table of the ranks.

The verdict goes by cause, not by clock: an error that began in a process beats a process that vanished without a word,
and that beats errors that others only noticed. Pure, but for `last_signs_of_process`, which reads files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import UsageError
from ..timeline.ranklist import listed, named_ranks
from ..units import columns
from .folder import ENDING, default_folder
from .reading import Flight, Operation, RankRecord, read_flight
from .waits import (
    absent_members,
    is_elsewhere,
    oldest_unfinished,
    reopen_ended_by_leaver,
    runs_compute,
    stall_in_records,
)

MOST_ROWS = 64  # of the table, unless all are asked for
_MOST_SIGNS = 4  # ranks of one process, of which a launcher tells
# Processes begin their records when all have met, within milliseconds; clocks of machines that nobody sets differ more.
_TOGETHER_NS = {True: 5 * 10**9, False: 300 * 10**9}


@dataclass(frozen=True)
class RecordedWorld:
    """The flight records of the processes of one world."""

    flights: Sequence[Flight]  # By process
    runs: Callable[[Flight], bool]  # Tells whether the process of a record still runs

    @cached_property
    def ranks(self) -> dict[int, RankRecord]:
        """Record of each rank; operations that failed because a member had left count as unfinished."""
        return reopen_ended_by_leaver({record.rank: record for flight in self.flights for record in flight.ranks})

    @property
    def end_ns(self) -> int:
        """The last instant, in nanoseconds since 1970, that any of the records has."""
        endings = [flight.ending.at_ns for flight in self.flights if flight.ending is not None]
        return max([record.last_ns for flight in self.flights for record in flight.ranks] + endings)

    def find_flight(self, rank: int | None) -> Flight | None:
        """Return the flight record that has a rank; None if it is not here."""
        return next((f for f in self.flights if any(record.rank == rank for record in f.ranks)), None)


def newest_world(
    flights: Sequence[Flight], runs: Callable[[Flight], bool], nearness: Callable[[Flight], int] = lambda flight: 0
) -> tuple[RecordedWorld, int]:
    """Return the world that began last, and the number of other worlds in the records.

    Args:
        flights: The records.
        runs: Tells whether the process of a record still runs.
        nearness: Of a record to the reader: the newest of the nearest worlds is returned.
    """
    left, worlds = sorted(flights, key=lambda flight: flight.started_ns), []
    while left:
        worlds.append(flights_of_world(left[-1], left))
        taken = set(map(id, worlds[-1]))
        left = [flight for flight in left if id(flight) not in taken]
    nearest = max(worlds, key=lambda world: max(map(nearness, world)))  # the first of several, which is the newest
    return RecordedWorld(nearest, runs), len(worlds) - 1


def flights_of_world(own: Flight, flights: Iterable[Flight]) -> list[Flight]:
    """Return the records of the world of `own`, one for each process; of equal names, the nearest in time."""
    nearest = {own.process: own}
    for flight in sorted(flights, key=lambda flight: _start_gap_ns(flight, own)):
        if _world_key(flight) == _world_key(own) and _start_gap_ns(flight, own) < _TOGETHER_NS[flight.host == own.host]:
            nearest.setdefault(flight.process, flight)
    return [nearest[process] for process in sorted(nearest)]


def _world_key(flight: Flight) -> tuple[object, ...]:
    """Return the facts that all flight records of one world have in common."""
    return flight.job, flight.attempt, flight.world, flight.processes, flight.world_size


def _start_gap_ns(flight: Flight, own: Flight) -> int:
    return abs(flight.started_ns - own.started_ns)


# -- the verdict ---------------------------------------------------------------------------------------------------


def verdict(world: RecordedWorld) -> list[str]:
    """Return three lines: the culprit, its place, and the operation it waited in."""
    who, rank = _find_culprit(world)
    if rank is None:
        return [
            f"who:        {who}",
            f"where:      {_summarize(world)}",
            f"waited for: {_name_longest_operation(world)}",
        ]
    return [
        f"who:        {who}",
        f"where:      {_describe_place(world, rank)}",
        f"waited for: {_describe_wait(world, rank)}",
    ]


def sentence(world: RecordedWorld) -> str:
    """Return one sentence: the culprit, its last operation, and the ranks that it waited for, or that waited for it."""
    culprit, rank = _find_culprit(world)
    if rank is None:
        longest = _name_longest_operation(world)
        return f"{culprit.removeprefix('nobody: ')}; {_summarize(world)}" + f", the {longest}" * (longest != "nothing")
    record, waiters = world.ranks.get(rank), _describe_waiters(world, [rank])
    if record is None:
        return "; ".join([culprit, *waiters[:1]])
    operation = oldest_unfinished(record)
    if operation is None:
        did = _describe_place(world, rank) if record.operations else "had issued nothing yet"
        verb = "" if did.startswith(("its", "had")) else "was "
        subject = f"of rank {rank}, " if did.startswith("its") else f"rank {rank} "
        return "; ".join([culprit, f"{subject}{verb}{did}", *waiters[:1]])
    verb = "was " if operation.words.kind == "compute" else "was in "
    awaited = _name_awaited(operation, rank, world)
    rest = f", waiting for {awaited}" if awaited else "".join(f"; {line}" for line in waiters[:1])
    return f"{culprit}; rank {rank} {verb}{_describe_place(world, rank)}{rest}"


def last_signs(world: RecordedWorld, pid: int) -> list[str]:
    """Return the last operations of a process that ended without a word, and the ranks that waited for it.

    Args:
        world: The records of all processes, as far as they are here.
        pid: The process.
    """
    own = [world.ranks[record.rank] for flight in world.flights if flight.pid == pid for record in flight.ranks]
    lines = [_describe_last_operation(record) for record in own[:_MOST_SIGNS]]
    more = [f"and {len(own) - _MOST_SIGNS} ranks more"] if len(own) > _MOST_SIGNS else []
    return [*lines, *more, *_describe_waiters(world, [record.rank for record in own])]


def _describe_last_operation(record: RankRecord) -> str:
    """Return the operation that a rank was in, else the last one that it finished, as a sentence."""
    operation = oldest_unfinished(record)
    if operation is not None:
        verb = "was" if operation.words.kind == "compute" else "was in"
        return f"rank {record.rank} {verb} {_describe_operation(operation)}{_in_step(operation.step)}"
    if not record.operations:
        return f"rank {record.rank} had issued nothing yet"
    last = max(record.operations, key=lambda op: op.ended_ns or 0)
    state = "had finished its program" if record.left else f"was in its program{_in_step(record.step)}"
    return f"rank {record.rank} {state}, after {_name_operation(last)} ({last.words.site})"


def _describe_waiters(world: RecordedWorld, ranks: Sequence[int]) -> list[str]:
    """Return a line on other ranks that waited for some ranks, and their operation; [] if none waited."""
    pending = [
        (peer, op)
        for rank in ranks
        for peer, record in sorted(world.ranks.items())
        if peer not in ranks
        for op in _operations_without(record, rank, world.ranks)
    ]
    waiting = [(peer, op) for peer, op in pending if not is_elsewhere(world.ranks[peer], ranks, world.ranks)]
    if not pending:
        return []
    blocked = sorted({peer for peer, _ in waiting or pending})
    first = min((op for _, op in waiting or pending), key=lambda op: op.issued_ns)
    names, operation = (named_ranks(blocked), f"{_name_operation(first)} ({first.words.site})")
    if waiting:
        return [f"{names} waited for it in {operation}"]
    before = {
        _name_operation(op)
        for rank in blocked
        if not runs_compute(world.ranks[rank]) and (op := oldest_unfinished(world.ranks[rank])) is not None
    }
    still = f"waited in {', '.join(sorted(before))}" if before else "computed"
    return [f"{names} had issued {operation} with it, and still {still}"]


def _find_culprit(world: RecordedWorld) -> tuple[str, int | None]:
    """Return the probable cause of the end as a clause, and its rank; None: no single rank."""
    for find in (_find_failed_rank, _find_vanished_process, _find_accused_rank, _find_awaited_rank):
        if culprit := find(world):
            return culprit
    return "nobody: no rank waits for another, and no process says that it failed", None


def _find_failed_rank(world: RecordedWorld) -> tuple[str, int | None] | None:
    """Return the first rank that failed with an error of its own; None if there is none."""
    own = [f.ending for f in world.flights if f.ending is not None and f.ending.here and f.ending.rank is not None]
    first = min(own, key=lambda ending: ending.at_ns, default=None)
    return (f"{_name_rank(world, first.rank)} failed: {first.line}", first.rank) if first else None


def _find_vanished_process(world: RecordedWorld) -> tuple[str, int | None] | None:
    """Return the process that was killed or left by `os._exit`: it has ended, and recorded no end of its world."""
    silent = [flight for flight in world.flights if flight.ending is None and not world.runs(flight)]
    if not silent:
        return None
    if len(silent) == len(world.flights) > 1:
        pids = ", ".join(f"process {flight.process}: pid {flight.pid}" for flight in silent[:_MOST_SIGNS])
        more = ", ..." if len(silent) > _MOST_SIGNS else ""
        who = f"{len(silent)} processes ({pids}{more})"
        sentence = f"{who} ended together without a word: by their launcher, the machine or the scheduler"
        stall = stall_in_records(world.ranks)
        return sentence, stall.odd[0] if stall is not None and not stall.hopeless and len(stall.odd) == 1 else None
    flight = min(silent, key=lambda flight: max((record.last_ns for record in flight.ranks), default=0))
    rank = _rank_to_blame(world, flight)
    return f"{_name_process(flight)} ended without a word: killed, or by os._exit", rank


def _rank_to_blame(world: RecordedWorld, flight: Flight) -> int:
    """Return the rank of a process that other ranks wait for, else one whose program had not finished."""
    stall = stall_in_records(world.ranks)
    odd = (stall.circle or stall.odd) if stall is not None else []
    own = [record.rank for record in flight.ranks]
    waited = [rank for rank in odd if rank in own]
    return next(iter([*waited, *(record.rank for record in flight.ranks if not record.left), *own]))


def _find_accused_rank(world: RecordedWorld) -> tuple[str, int | None] | None:
    """Return the rank that the first recorded end of the world blames; None if no end names one."""
    endings = [(f.ending, f) for f in world.flights if f.ending is not None and f.ending.rank is not None]
    first, witness = min(endings, key=lambda pair: pair[0].at_ns, default=(None, None))
    if first is None:
        return None
    source = "" if world.find_flight(first.rank) is witness else ", as another process tells"
    return f"{_name_rank(world, first.rank)}{source}: {first.line}", first.rank


def _find_awaited_rank(world: RecordedWorld) -> tuple[str, int | None] | None:
    """Return the first rank that others wait for, or of ranks that wait in a circle; None if none waits."""
    stall = stall_in_records(world.ranks)
    if stall is None:
        return None
    if stall.hopeless:
        return f"ranks {listed(stall.circle)} wait for each other", stall.circle[0]
    odd = stall.odd
    others = f", as for rank {listed(odd[1:])}" if len(odd) > 1 else ""
    return f"{_name_rank(world, odd[0])}: the others wait for it{others}", odd[0]


def _name_rank(world: RecordedWorld, rank: int | None) -> str:
    """Return a rank with its process, pid and host, for messages."""
    flight = world.find_flight(rank)
    if flight is None:
        return f"rank {rank} (of a process whose file is not here)"
    return f"rank {rank} (process {flight.process}, pid {flight.pid} on {flight.host})"


def _name_process(flight: Flight) -> str:
    """Return a process with its ranks, pid and host, for messages."""
    ranks = [record.rank for record in flight.ranks]
    return f"process {flight.process} ({named_ranks(ranks)}, pid {flight.pid} on {flight.host})"


def _describe_place(world: RecordedWorld, rank: int) -> str:
    """Return what a rank was doing at the end, and for how long, for the line "where" of the verdict."""
    record = world.ranks.get(rank)
    if record is None:
        return "its file is not here; those of the others are in the table"
    operation = oldest_unfinished(record)
    if operation is not None:
        duration = _format_duration(world.end_ns - _begin_ns(operation))
        return f"{_describe_operation(operation)}{_in_step(operation.step)}, for {duration}"
    if not record.operations:
        return "it had issued nothing yet"
    last = max(record.operations, key=lambda op: op.ended_ns or 0)
    ago = _format_duration(world.end_ns - (last.ended_ns or 0))
    state = "its program had finished" if record.left else f"in its program{_in_step(record.step)}"
    return f"{state}, with nothing unfinished; {_name_operation(last)} had ended {ago} before"


def _describe_wait(world: RecordedWorld, rank: int) -> str:
    """Return what a rank waited for at the end, or the ranks that waited for it."""
    record = world.ranks.get(rank)
    operation = oldest_unfinished(record) if record is not None else None
    if operation is not None and (awaited := _name_awaited(operation, rank, world)):
        return awaited
    waiters = _describe_waiters(world, [rank])
    return f"nobody; {waiters[0]}" if waiters else "nobody, and nobody waited for it"


def _name_awaited(operation: Operation, rank: int, world: RecordedWorld) -> str:
    """Return what an unfinished operation waits for, for messages; "" for a running compute."""
    if operation.words.kind == "compute":
        return "" if operation.started_ns else "the computes before it, or its arguments"
    if not operation.words.what:
        return "its input, which was not there yet"
    others = [other for other in absent_members(operation, world.ranks) if other != rank]
    if not others:
        return "its bytes: every rank of the group had come" if operation.words.members else "whoever sends"
    more = f" (rank {others[0]}: {_describe_state(world.ranks.get(others[0]))})"
    return f"{named_ranks(others)}, which had not called it{more}"


def _operations_without(record: RankRecord, rank: int, ranks: dict[int, RankRecord]) -> Iterator[Operation]:
    """Yield the unfinished operations of a rank at which another rank, `rank`, has not arrived."""
    if record.rank != rank:
        yield from (op for op in record.unfinished if rank in absent_members(op, ranks))


def _summarize(world: RecordedWorld) -> str:
    """Return how many ranks had finished, and how many operations had not, for messages."""
    left = sum(record.left for record in world.ranks.values())
    unfinished = sum(len(record.unfinished) for record in world.ranks.values())
    known = len(world.ranks)
    return f"{left} of {known} ranks had finished their programs, {unfinished} operations were unfinished"


def _name_longest_operation(world: RecordedWorld) -> str:
    """Return the operation that has been unfinished for longest, for messages; "nothing" if all had ended."""
    unfinished = [(_begin_ns(op), rank, op) for rank, record in world.ranks.items() for op in record.unfinished]
    if not unfinished:
        return "nothing"
    since_ns, rank, operation = min(unfinished, key=lambda each: each[:2])
    duration = _format_duration(world.end_ns - since_ns)
    return f"longest in {_name_operation(operation)} ({operation.words.site}), rank {rank} for {duration}"


# -- the table -----------------------------------------------------------------------------------------------------

_HEADS = ("rank", "process", "step", "for", "doing", "waits for")


def table(world: RecordedWorld, *, most_rows: int = MOST_ROWS) -> list[str]:
    """Return a line for each rank, under a line of heads."""
    rows = [_table_row(world, flight, world.ranks[record.rank]) for flight in world.flights for record in flight.ranks]
    lines = columns(_HEADS, rows[:most_rows], words=[4, 5])
    more = [f"and {len(rows) - most_rows} ranks more (--all)"] if len(rows) > most_rows else []
    return [*lines, *more, *_name_missing_processes(world)]


def _table_row(world: RecordedWorld, flight: Flight, record: RankRecord) -> tuple[str, ...]:
    """Return the cells of a rank, in the order of `_HEADS`."""
    operation = oldest_unfinished(record)
    step = record.step if operation is None or operation.step is None else operation.step
    head = (str(record.rank), str(flight.process), "-" if step is None else str(step))
    if operation is None:
        lasting = _format_duration(world.end_ns - record.last_ns) if record.operations else "-"
        return (*head, lasting, _describe_state(record), "")
    others = [other for other in absent_members(operation, world.ranks) if other != record.rank]
    return (
        *head,
        _format_duration(world.end_ns - _begin_ns(operation)),
        _describe_operation(operation),
        listed(others),
    )


def _name_missing_processes(world: RecordedWorld) -> list[str]:
    """Name the processes without a file here."""
    processes = world.flights[0].processes
    lacking = sorted(set(range(processes)) - {flight.process for flight in world.flights})
    named = f"process{'es' * (len(lacking) > 1)} {listed(lacking)}"
    return [f"no file of {named}: see the folder for flight records on its machine"] if lacking else []


def _describe_state(record: RankRecord | None) -> str:
    """Return what a rank is doing, for messages; None: its record is not here."""
    if record is None:
        return "its file is not here"
    operation = oldest_unfinished(record)
    if operation is not None:
        return _describe_operation(operation)
    return "its program had finished" if record.left else "in its program"


def _describe_operation(operation: Operation) -> str:
    """Return an operation with its place in the program, and for a compute whether it runs."""
    verb = "" if operation.words.kind != "compute" else "running " if operation.started_ns else "waiting to run "
    return f"{verb}{_name_operation(operation)} ({operation.words.site})"


def _name_operation(operation: Operation) -> str:
    """Return an operation with its number, peer and group, for messages."""
    if operation.words.kind == "compute":
        return f"compute '{operation.words.name}'"
    number = f" #{operation.number}" if operation.words.key else ""
    group = f" on group '{operation.words.group}'" if operation.words.group else ""
    return f"{operation.words.name}{number}{operation.words.towards}{group}"


def _begin_ns(operation: Operation) -> int:
    """Return when an operation was started, or issued if it has not been started."""
    return operation.started_ns or operation.issued_ns


def _in_step(step: int | None) -> str:
    return "" if step is None else f" in step {step}"


def _format_duration(duration_ns: int) -> str:
    """Return a duration as text; clocks of machines differ, so it is never negative."""
    seconds = max(duration_ns, 0) / 1e9
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def last_signs_of_process(pid: int, folder: str | os.PathLike[str] | None) -> list[str]:
    """Return lines on the last operations of a process that has ended; none without a record on this machine.

    Args:
        pid: The process, which has ended a moment ago.
        folder: Where flight records lie; None: in the default folder.
    """
    where = Path(folder) if folder is not None else default_folder()
    own = max(_read_flights(where, f"*-{pid}{ENDING}"), key=lambda flight: flight.started_ns, default=None)
    if own is None:
        return []
    name = Path(own.path).name.rpartition(f"-process{own.process}-")[0]  # the same of all processes of a world
    return last_signs(
        RecordedWorld(flights_of_world(own, _read_flights(where, f"{name}-*{ENDING}")), lambda _: False), pid
    )


def _read_flights(folder: Path, pattern: str) -> Iterator[Flight]:
    """Yield the flight records in a folder that match a pattern and can be read."""
    for path in folder.glob(pattern):
        with suppress(UsageError):  # damaged, or gone meanwhile: its process has ended well
            yield read_flight(path)
