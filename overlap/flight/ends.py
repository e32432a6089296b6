"""Flight records as views for the judge of waits, and the verdict on a recorded world."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from msgspec.structs import replace

from ..ranklist import named_ranks
from ..waits.ends import Call, End, EndState, RankView, Seen, call_of
from ..waits.judge import Verdict, judge
from ..waits.signs import Evidence, Sign, culprit
from ..waits.wording import last_signs
from .reading import CallWords, Flight, Operation, RankRecord
from .records import RecordedWorld, world_of_process

_SILENT = "ended without a word: killed, or by os._exit"


def judge_records(world: RecordedWorld) -> tuple[list[RankView], Verdict, list[str]]:
    """Return the views of the ranks of a world, the verdict, and notes.

    An error that began in a process counts before a process that vanished without a word, that before waits, and those
    before errors that others only noticed.
    """
    silent = [flight for flight in world.flights if flight.ending is None and not world.runs(flight)]
    together = len(silent) == len(world.flights) > 1  # by a common cause, which says nothing about the ranks
    size = world.flights[0].world_size
    views = rank_views(world, [] if together else silent)
    first = culprit(sign for sign in signs_of(world) if sign.evidence is Evidence.OWN_ERROR)
    if first is not None:
        views = [replace(view, error=first.text) if view.rank == first.rank else view for view in views]
    verdict = judge(views, size)
    report = culprit(signs_of(world))
    if report is not None and report.rank is not None and not verdict.is_certain:
        lost = RankView(rank=report.rank, seen=Seen.ENDED, how=f"is lost, as another process reported: {report.text}")
        others = [replace(view, error=report.text) if view.rank == report.rank else view for view in views]
        known = any(view.rank == report.rank for view in views)
        verdict = judge(others if known else [*views, lost], size)
    return views, verdict, [_together(silent)] if together else []


def signs_of(world: RecordedWorld) -> list[Sign]:
    """Return the signs in the recorded ends of a world that name a rank."""
    return [
        Sign(
            process=flight.process, rank=end.rank, text=end.line, at_ns=end.at_ns,
            evidence=Evidence.OWN_ERROR if end.here else Evidence.REPORTED,
        )
        for flight in world.flights
        if (end := flight.ending) is not None and end.rank is not None
    ]  # fmt: skip


def _together(silent: list[Flight]) -> str:
    processes = ", ".join(f"process {flight.process}: pid {flight.pid}" for flight in silent[:4])
    more = ", ..." if len(silent) > 4 else ""
    return (
        f"{len(silent)} processes ({processes}{more}) ended together without a word: by their launcher, the machine or "
        "the scheduler"
    )


def rank_views(world: RecordedWorld, ended: list[Flight]) -> list[RankView]:
    """Return the views of the recorded ranks; `ended` are the records of processes that have ended without a word."""
    records = {record.rank: (flight, record) for flight in world.flights for record in flight.ranks}
    newest: dict[int, dict[str, int]] = {}  # of ranks that have finished: number of the last operation, by key
    for rank, (_, record) in records.items():
        if record.left:
            numbers = newest.setdefault(rank, {})
            for operation in record.operations:
                numbers[operation.words.key] = max(operation.number, numbers.get(operation.words.key, -1))
    return [_view(flight, record, newest, is_dead=flight in ended) for flight, record in records.values()]


def _view(flight: Flight, record: RankRecord, newest: Mapping[int, Mapping[str, int]], *, is_dead: bool) -> RankView:
    """Return the view of one rank."""
    calls: dict[CallWords, Call] = {}
    last_ns = max((operation.issued_ns for operation in record.operations), default=0)
    stop_ns = flight.ending.at_ns if flight.ending is not None else None
    # what ended with the world was unfinished until then
    operations = [
        dataclasses.replace(op, ended_ns=None, failed=False) if stop_ns and (op.ended_ns or 0) >= stop_ns else op
        for op in record.operations
    ]
    ends = tuple(_end(op, record.rank, flight.world_size, last_ns, newest, calls) for op in operations)
    view = RankView(
        rank=record.rank, ends=ends, step=record.step, process=flight.process, pid=flight.pid, host=flight.host,
        how=_SILENT if is_dead else "",
    )  # fmt: skip
    is_open = any(end.is_open for end in ends)
    seen = Seen.WAITS if is_open else Seen.LEFT if record.left else Seen.ELSEWHERE
    if view.running is not None:
        seen = Seen.GOES_ON
    return replace(view, seen=Seen.ENDED if is_dead and not (record.left and not is_open) else seen)


def _end(
    operation: Operation, rank: int, size: int, last_ns: int, newest: Mapping[int, Mapping[str, int]],
    calls: dict[CallWords, Call],
) -> End:  # fmt: skip
    """Return one operation of a rank as an end.

    A failed one is open if the rank has issued nothing since, or if it failed because a member has finished: a program
    learns of that only where it awaits the operation.
    """
    words = operation.words
    if words not in calls:
        calls[words] = call_of(_fields(words), words.members, rank, size)
    call = calls[words]
    members = [other for other in words.members if other in newest and other != rank]
    lacks = any(newest[other].get(words.key, -1) < operation.number for other in members)
    if operation.ended_ns is not None:
        is_open = operation.failed and (operation.ended_ns > last_ns or lacks)
        state = EndState.FAILED if is_open else EndState.DONE
    elif not call.meets:
        state = EndState.MOVING if operation.started_ns is not None else EndState.QUEUED
    else:
        state = EndState.WAITING if words.what else EndState.BLOCKED
    return End(
        rank=rank, call=call, seq=operation.number, state=state, issued_ns=operation.issued_ns,
        begun_ns=operation.started_ns, done_ns=operation.ended_ns, step=operation.step,
    )  # fmt: skip


def _fields(words: CallWords) -> dict[str, str]:
    """Return the recorded words as fields, without the members."""
    return {
        field.name: str(getattr(words, field.name)) for field in dataclasses.fields(words) if field.name != "members"
    }


def last_signs_of_process(pid: int, folder: str | os.PathLike[str] | None) -> list[str]:
    """Return lines on the last operations of a process that has ended without a word, and on ranks that wait for it.

    Args:
        pid: The process, which has ended a moment ago.
        folder: Where flight records lie; None: in the default folder.
    """
    world = world_of_process(pid, folder)
    if world is None:
        return []
    own = [flight for flight in world.flights if flight.pid == pid]
    views = rank_views(world, own)
    return last_signs(views, world.flights[0].world_size, [record.rank for flight in own for record in flight.ranks])


def name_missing_processes(world: RecordedWorld) -> list[str]:
    """Name the processes without a file here."""
    lacking = sorted(set(range(world.flights[0].processes)) - {flight.process for flight in world.flights})
    names = named_ranks(lacking).replace("rank", "process", 1) if lacking else ""
    return [f"no file of {names}: see the folder for flight records on its machine"] if lacking else []
