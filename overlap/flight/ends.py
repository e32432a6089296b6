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
    """Judge why a recorded world ended or is stuck.

    By precedence: an error that began in a process, a process that ended without a report, waits that cannot end, and
    errors that processes only received from others.

    Args:
        world: The records, of one process or more.

    Returns:
        The views of the ranks, the verdict, and notes for people, which may be none.
    """
    silent = [flight for flight in world.flights if flight.ending is None and not world.runs(flight)]
    # If all processes ended at once, the cause is outside of them, and no rank is to blame.
    together = len(silent) == len(world.flights) > 1
    size = world.flights[0].world_size
    views = views_of_records(world, [] if together else silent)
    # Only the first error counts: the others may follow from it.
    first = culprit(sign for sign in ending_signs(world) if sign.evidence is Evidence.OWN_ERROR)
    if first is not None:
        views = [replace(view, error=first.text) if view.rank == first.rank else view for view in views]
    verdict = judge(views, size)
    # The records show no certain cause: an error that processes have received from others counts.
    report = culprit(ending_signs(world))
    if report is not None and report.rank is not None and not verdict.is_certain:
        lost = RankView(rank=report.rank, seen=Seen.ENDED, how=f"is lost, as another process reported: {report.text}")
        others = [replace(view, error=report.text) if view.rank == report.rank else view for view in views]
        known = any(view.rank == report.rank for view in views)
        verdict = judge(others if known else [*views, lost], size)
    return views, verdict, [_ended_together_note(silent)] if together else []


def ending_signs(world: RecordedWorld) -> list[Sign]:
    """Return a sign for each process that has recorded the end of its world and the rank at fault.

    An error that began in the process is OWN_ERROR. An error that began elsewhere is REPORTED: the sign has the
    rank at fault, and the process that reported it.
    """
    return [
        Sign(
            process=flight.process, rank=end.rank, text=end.line, at_ns=end.at_ns,
            evidence=Evidence.OWN_ERROR if end.here else Evidence.REPORTED,
        )
        for flight in world.flights
        if (end := flight.ending) is not None and end.rank is not None
    ]  # fmt: skip


def _ended_together_note(silent: list[Flight]) -> str:
    processes = ", ".join(f"process {flight.process}: pid {flight.pid}" for flight in silent[:4])
    more = ", ..." if len(silent) > 4 else ""
    return (
        f"{len(silent)} processes ({processes}{more}) ended together without a word: by their launcher, the machine or "
        "the scheduler"
    )


def views_of_records(world: RecordedWorld, ended: list[Flight]) -> list[RankView]:
    """Return the views of the recorded ranks.

    Args:
        world: The records, of one process or more.
        ended: Records of processes that have ended without a report.
    """
    tables = {table.rank: (flight, table) for flight in world.flights for table in flight.ranks}
    newest = {rank: _newest_numbers(table.ends()) for rank, (_, table) in tables.items() if table.left}
    return [_make_view(flight, table, newest, is_dead=flight in ended) for flight, table in tables.values()]


def _newest_numbers(ends: Sequence[End]) -> dict[str, int]:
    """Return the highest number of the operations of a rank, for each key (see `CallRecord.key`)."""
    # Of equal keys the last one stays, which has the highest number.
    return {end.call.key: end.seq for end in sorted(ends, key=lambda end: end.seq)}


def _make_view(flight: Flight, table: RankTable, newest: Mapping[int, Mapping[str, int]], *, is_dead: bool) -> RankView:
    """Return the view of one rank; `newest` has the last numbers, by key, of each rank that has finished.

    With `is_dead`, the process has ended without a report.
    """
    # Operations that ended when the world did count as unfinished.
    ends = table.ends(flight.ending.at_ns if flight.ending is not None else None)
    last_ns = ends[-1].issued_ns if ends else 0
    ends = [end if _counts_for_verdict(end, last_ns, newest) else replace(end, state=EndState.DONE) for end in ends]
    view = RankView(
        rank=table.rank, ends=tuple(ends), step=None if table.step < 0 else table.step, process=flight.process,
        pid=flight.pid, host=flight.host, how=_SILENT if is_dead else "",
    )  # fmt: skip
    # Later lines override earlier ones: an ended process counts more than a running function, which outranks a wait.
    is_open = any(end.is_open for end in ends)
    seen = Seen.LEFT if table.left else Seen.ELSEWHERE
    if is_open:
        seen = Seen.WAITS
    if view.running_function is not None:
        seen = Seen.GOES_ON
    if is_dead and (is_open or not table.left):
        seen = Seen.ENDED
    return replace(view, seen=seen)


def _counts_for_verdict(end: End, last_ns: int, newest: Mapping[int, Mapping[str, int]]) -> bool:
    """Whether an operation still matters to the verdict: False if it failed and the program then went on.

    A program that issues another operation after a failure has probably caught the error. Exception: if a member
    finished its program without calling this operation, the failed operation counts. A later call then does not prove
    that the program knows of the failure, because it may not have awaited the operation yet.
    """
    if end.state is not EndState.FAILED or (end.done_ns or 0) > last_ns:
        return True
    others = [rank for rank in end.call.members if rank in newest and rank != end.rank]
    return any(newest[rank].get(end.call.key, -1) < end.seq for rank in others)


def last_signs_of_process(pid: int, folder: str | os.PathLike[str] | None) -> list[str]:
    """Return lines on the last operations of an ended process, and on ranks that wait for it; [] without its record.

    Args:
        pid: The process, which ended a moment ago without a report.
        folder: The folder of flight records; None: the default folder.
    """
    world = world_of_process(pid, folder)
    if world is None:
        return []
    own = [flight for flight in world.flights if flight.pid == pid]
    views = views_of_records(world, own)
    return last_signs(views, world.flights[0].world_size, [record.rank for flight in own for record in flight.ranks])


def name_missing_processes(world: RecordedWorld) -> list[str]:
    """Return one line that names the processes of the world without a record here, or [] if none is missing."""
    lacking = sorted(set(range(world.flights[0].processes)) - {flight.process for flight in world.flights})
    names = named_ranks(lacking).replace("rank", "process", 1) if lacking else ""
    return [f"no file of {names}: see the folder for flight records on its machine"] if lacking else []
