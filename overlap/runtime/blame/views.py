"""Views of the ranks of this process for the judge of waits, and texts on stalls; loaded when ranks wait for long."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from time import time_ns

from msgspec.structs import replace

from ...diagnostics import where
from ...errors import in_one_line
from ...waits.ends import End, EndState, RankView, Seen, call_of
from ...waits.judge import Kind, WaitVerdict, judge
from ...waits.wording import lines, report_lines, rows, sentence, unawaited_line
from ..compute import ComputeFuture
from ..context import RankContext
from ..future import is_waited_for
from ..outstanding import IssuedFuture
from ..state import BLOCKED, DONE, MATCHING
from ..trio_private import may_time_out
from .loop import program_places, tasks_of, threads_at_work

__all__ = ["find_stall", "report_lines", "sentence_on", "stall_lines", "view_of"]

_MOST_ENDS = 64  # unfinished operations of a rank that are judged
_SHOWN = 16  # lines of a table on a terminal; the culprit is in the sentence above it


def view_of(context: RankContext, left: Container[int], now_ns: int, place: str | None) -> RankView:
    """Return the view of a rank, for the judge of waits.

    Args:
        left: World ranks that have finished.
        now_ns: The present of the context.
        place: Line of a program that is being unwound: it has no frame to look at any more.
    """
    outstanding, rank = context.outstanding, context.rank
    operations = [operation for operation in list(outstanding.operations) if operation.state < DONE]
    if not operations and rank in left:
        return RankView(rank=rank, seen=Seen.LEFT)
    places = _program_lines(context) if place is None else [place] if place else []
    ends = tuple(_end(context, operation, time_ns() - now_ns) for operation in operations[:_MOST_ENDS])
    unseen = outstanding.unseen
    view = RankView(
        rank=rank, ends=ends, site=" and ".join(places), step=context.step,
        seen=Seen.WAITS if operations and not places else Seen.ELSEWHERE, may_end=_may_end(context, operations),
        error=f"{in_one_line(unseen.error)}{where(unseen.error)}" if unseen is not None else "",
    )  # fmt: skip
    return view if view.running is None else replace(view, seen=Seen.GOES_ON)


def _end(context: RankContext, operation: IssuedFuture[object], shift_ns: int) -> End:
    """Return an operation as an end; `shift_ns` turns instants of the context into nanoseconds since 1970."""
    read = getattr(operation, "flight_fields", None)  # tasks have none
    call = call_of(read() if read else {"op": "task", "name": operation.name, "site": operation.call_site})
    state, lacks = EndState.QUEUED, tuple(operation.awaits)
    if isinstance(operation, ComputeFuture):
        state = EndState.MOVING if operation.started_ns is not None else EndState.QUEUED
    elif lacks or call.any_source or not call.meets:
        state = EndState.WAITING
    elif operation.state == BLOCKED:
        state = EndState.BLOCKED
    elif operation.state >= MATCHING:
        state = EndState.MOVING
    begun_ns, issued_ns = operation.since_ns, getattr(operation, "issued_ns", 0)
    return End(
        rank=context.rank, call=call, seq=getattr(operation, "seq", 0), state=state,
        issued_ns=issued_ns + shift_ns, begun_ns=None if begun_ns is None else begun_ns + shift_ns,
        step=getattr(operation, "step", None), awaited=is_waited_for(operation),
        lacks=None if call.any_source else lacks,
    )  # fmt: skip


def _may_end(context: RankContext, operations: Sequence[IssuedFuture[object]]) -> bool:
    """Whether its wait may end without another rank: by a deadline, a cancel scope, or a thread at work."""
    if context.elsewhere is not None and not context.outstanding.draining:
        return True  # its thread may issue an operation at any time
    if any(getattr(operation, "deadline_s", None) is not None for operation in operations):
        return True
    nursery = context.nursery
    if nursery is not None and any(may_time_out(each, nursery) for each in tasks_of(nursery.parent_task)):
        return True
    return threads_at_work(context.thread)


def _program_lines(context: RankContext) -> list[str]:
    """Return the lines at which the program of the rank is, unless it waits for operations."""
    if context.elsewhere is not None and not context.outstanding.draining:
        waits = any(map(is_waited_for, list(context.outstanding.operations)))
        return [] if waits else [context.elsewhere()]
    return program_places(context.nursery.parent_task, context.rank) if context.nursery is not None else []


def _judge_running(views: Sequence[RankView], size: int) -> WaitVerdict:
    """Return the verdict on ranks that have not ended: an error that no task was given may yet be awaited."""
    return judge([replace(view, error="") for view in views], size)


def sentence_on(views: Sequence[RankView], *, soon: bool) -> str:
    """Return the sentence on stopped ranks; see `Reports.sentence`."""
    verdict = _judge_running(views, 0)
    return "" if verdict.kind in (Kind.WIRE, Kind.NOBODY) or (soon and verdict.is_certain) else sentence(verdict)


def find_stall(views: Mapping[int, RankView], size: int) -> WaitVerdict | None:
    """Return the verdict on the ranks that wait for ranks without progress; None if there are none.

    Args:
        views: Views of the ranks without progress; the other ranks move.
    """
    moving = {rank: RankView(rank=rank, seen=Seen.GOES_ON) for rank in range(size)}
    verdict = _judge_running(list({**moving, **views}.values()), size)
    waits = verdict.kind not in (Kind.WIRE, Kind.NOBODY) and not set(verdict.culprits).isdisjoint(views)
    return verdict if waits else None


def stall_lines(stall: WaitVerdict, views: Mapping[int, RankView]) -> tuple[str, list[str], list[str]]:
    """Return the sentence of a stall, a line for each error that no task was given, and a table."""
    errors = [unawaited_line(view) for _, view in sorted(views.items()) if view.error]
    table = lines(rows(views.values(), 0, stall), time_ns())
    more = [f"and {len(table) - _SHOWN} lines more"] if len(table) > _SHOWN else []
    return sentence(stall), errors, [*table[:_SHOWN], *more]
