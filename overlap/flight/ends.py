"""Flight records as views for the judge of waits, and the verdict on a recorded world."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ..ranklist import named_ranks
from ..waits.ends import End, EndState, RankView, Seen
from ..waits.judge import WaitVerdict, judge
from ..waits.signs import Evidence, Sign, culprit
from ..waits.wording import last_signs
from .reading import Flight, RankTable
from .records import RecordedWorld, world_of_process

_SILENT = "ended without a word: killed, or by os._exit"


def judge_records(world: RecordedWorld) -> tuple[list[RankView], WaitVerdict, list[str]]:
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
    tables = {table.rank: (flight, table) for flight in world.flights for table in flight.ranks}
    newest = {rank: _newest(table.ends()) for rank, (_, table) in tables.items() if table.left}
    return [_view(flight, table, newest, is_dead=flight in ended) for flight, table in tables.values()]


def _newest(ends: Sequence[End]) -> dict[str, int]:
    """Return the number of the last operation, by key."""
    return {end.call.key: end.seq for end in sorted(ends, key=lambda end: end.seq)}


def _view(flight: Flight, table: RankTable, newest: Mapping[int, Mapping[str, int]], *, is_dead: bool) -> RankView:
    """Return the view of one rank; `newest` are the numbers of the last operations of ranks that have finished."""
    # what ended with the world was unfinished until then
    ends = table.ends(flight.ending.at_ns if flight.ending is not None else None)
    last_ns = ends[-1].issued_ns if ends else 0
    ends = [end if _counts(end, last_ns, newest) else replace(end, state=EndState.DONE) for end in ends]
    view = RankView(
        rank=table.rank, ends=tuple(ends), step=None if table.step < 0 else table.step, process=flight.process,
        pid=flight.pid, host=flight.host, how=_SILENT if is_dead else "",
    )  # fmt: skip
    is_open = any(end.is_open for end in ends)
    seen = Seen.WAITS if is_open else Seen.LEFT if table.left else Seen.ELSEWHERE
    if view.running is not None:
        seen = Seen.GOES_ON
    return replace(view, seen=Seen.ENDED if is_dead and not (table.left and not is_open) else seen)


def _counts(end: End, last_ns: int, newest: Mapping[int, Mapping[str, int]]) -> bool:
    """Whether an end is as its record says; a failed one is over if its program has learned of that and gone on.

    A program learns only where it awaits the operation that a member has finished, so it counts whatever it issued.
    """
    if end.state is not EndState.FAILED or (end.done_ns or 0) > last_ns:
        return True
    others = [rank for rank in end.call.members if rank in newest and rank != end.rank]
    return any(newest[rank].get(end.call.key, -1) < end.seq for rank in others)


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
