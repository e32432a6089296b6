"""Views of the ranks of this process for the judge of waits, and texts about stalls.

Loaded only when ranks wait for long.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from time import time_ns

from msgspec.structs import replace

from ...diagnostics import error_place
from ...errors import one_line_text
from ...waits.ends import CallRecord, End, EndState, RankView, Seen, parse_call_fields
from ...waits.judge import Kind, WaitVerdict, judge
from ...waits.wording import report_lines, row_lines, unawaited_line, wait_rows, wait_sentence
from ..compute import ComputeFuture
from ..context import RankContext
from ..future import is_waited_for
from ..outstanding import IssuedFuture
from ..state import BLOCKED, DONE, MATCHING
from ..trio_private import may_time_out
from .loop import has_working_thread, program_task_lines, tasks_of

__all__ = ["find_stall", "first_lines", "report_lines", "sentence_on", "stall_lines", "view_of"]

_MOST_ENDS = 64  # most unfinished operations of a rank that its view contains
_SHOWN = 16  # lines of a table on a terminal; the culprit is in the sentence above it


def view_of(context: RankContext, left: Container[int], now_ns: int, place: str | None) -> RankView:
    """Return the view of a rank: its unfinished operations, and where its program is.

    Args:
        context: Context of the rank.
        left: World ranks that have finished.
        now_ns: The present instant of the context's clock.
        place: Line of the rank's program, for a program that is ending and whose frames are gone; "": it waited for
            its operations. None: the line is found in the frames of the program's tasks.
    """
    outstanding, rank = context.outstanding, context.rank
    operations = [operation for operation in list(outstanding.operations) if operation.state < DONE]
    if not operations and rank in left:
        return RankView(rank=rank, seen=Seen.LEFT)
    places = _program_lines(context) if place is None else [place] if place else []
    ends = tuple(_operation_end(context, operation, time_ns() - now_ns) for operation in operations[:_MOST_ENDS])
    unseen = outstanding.unseen
    view = RankView(
        rank=rank, ends=ends, site=" and ".join(places), step=context.step,
        seen=Seen.WAITS if operations and not places else Seen.ELSEWHERE, may_end=_wait_may_end(context, operations),
        error=f"{one_line_text(unseen.error)}{error_place(unseen.error)}" if unseen is not None else "",
    )  # fmt: skip
    return view if view.running_function is None else replace(view, seen=Seen.GOES_ON)


def _operation_end(context: RankContext, operation: IssuedFuture[object], shift_ns: int) -> End:
    """Return this rank's side of an operation as an `End`, the record that the judge of waits reads.

    `shift_ns` is added to instants of the context's clock, and gives nanoseconds since 1970.
    """
    read = getattr(operation, "flight_fields", None)  # tasks have none
    call = parse_call_fields(read() if read else {"op": "task", "name": operation.name, "site": operation.call_site})
    absent = tuple(operation.awaited_ranks)
    begun_ns, issued_ns = operation.since_ns, getattr(operation, "issued_ns", 0)
    return End(
        rank=context.rank, call=call, seq=getattr(operation, "seq", 0), state=_end_state(operation, call, absent),
        issued_ns=issued_ns + shift_ns, begun_ns=None if begun_ns is None else begun_ns + shift_ns,
        step=getattr(operation, "step", None), awaited=is_waited_for(operation),
        lacks=None if call.any_source else absent,
    )  # fmt: skip


def _end_state(operation: IssuedFuture[object], call: CallRecord, absent: tuple[int, ...]) -> EndState:
    """Return the state of a rank's side of an operation; `absent` are the world ranks that it waits for."""
    if isinstance(operation, ComputeFuture):
        return EndState.MOVING if operation.started_ns is not None else EndState.QUEUED
    # a receive from any source waits for no rank in particular, and a task for none: they have no absent ranks
    if absent or call.any_source or not call.meets:
        return EndState.WAITING
    if operation.state == BLOCKED:
        return EndState.BLOCKED
    return EndState.MOVING if operation.state >= MATCHING else EndState.QUEUED


def _wait_may_end(context: RankContext, operations: Sequence[IssuedFuture[object]]) -> bool:
    """Whether a rank's wait may end although no other rank acts: by a deadline, a cancel scope, or a working thread.

    A working thread, or a program in a thread of its own, may issue an operation at any time.
    """
    if context.program_line is not None and not context.outstanding.draining:
        return True  # the program runs in a thread of its own
    if any(getattr(operation, "deadline_s", None) is not None for operation in operations):
        return True
    nursery = context.nursery
    if nursery is not None and any(may_time_out(each, nursery) for each in tasks_of(nursery.parent_task)):
        return True
    return has_working_thread(context.thread)


def _program_lines(context: RankContext) -> list[str]:
    """Return the lines at which the tasks of a rank's program are; tasks that await operations of the rank have none.

    For a program in a thread of its own: its line, or nothing if anything waits for an operation.
    """
    if context.program_line is not None and not context.outstanding.draining:
        waits = any(map(is_waited_for, list(context.outstanding.operations)))
        return [] if waits else [context.program_line()]
    return program_task_lines(context.nursery.parent_task, context.rank) if context.nursery is not None else []


def _judge_running(views: Sequence[RankView], size: int) -> WaitVerdict:
    """Return the verdict on ranks that have not ended; their errors are left out, as they may still be awaited."""
    return judge([replace(view, error="") for view in views], size)


def sentence_on(views: Sequence[RankView], *, ignores_cycles: bool) -> str:
    """Return a sentence about which rank the others waited for when they stopped, or "" if none waited for another.

    Args:
        views: Views of the stopped ranks.
        ignores_cycles: Whether to return "" for ranks that wait for each other, too; see `Reports.culprit_sentence`.
    """
    verdict = _judge_running(views, 0)
    return (
        ""
        if verdict.kind in (Kind.WIRE, Kind.NOBODY) or (ignores_cycles and verdict.is_certain)
        else wait_sentence(verdict)
    )


def find_stall(views: Mapping[int, RankView], size: int) -> WaitVerdict | None:
    """Return the verdict on a stall, or None if no rank without progress keeps another one waiting.

    Args:
        views: View of each rank without progress, by world rank. Ranks that are not among them count as moving.
        size: Number of ranks of the world.
    """
    moving = {rank: RankView(rank=rank, seen=Seen.GOES_ON) for rank in range(size)}
    verdict = _judge_running(list({**moving, **views}.values()), size)
    waits = verdict.kind not in (Kind.WIRE, Kind.NOBODY) and not set(verdict.culprits).isdisjoint(views)
    return verdict if waits else None


def stall_lines(stall: WaitVerdict, views: Mapping[int, RankView]) -> tuple[str, list[str], list[str]]:
    """Return the texts of a report on a stall.

    Args:
        stall: The verdict on the stall.
        views: View of each rank without progress, by world rank.

    Returns:
        The sentence that names the cause; a line for each error that no task was given; the lines of a table of waits.
    """
    errors = [unawaited_line(view) for _, view in sorted(views.items()) if view.error]
    table = row_lines(wait_rows(views.values(), 0, stall), time_ns())
    return wait_sentence(stall), errors, first_lines(table)


def first_lines(table: Sequence[str]) -> list[str]:
    """Return the first `_SHOWN` lines of a table, and, if there are more, a line such as "and 5 lines more"."""
    more = [f"and {len(table) - _SHOWN} lines more"] if len(table) > _SHOWN else []
    return [*table[:_SHOWN], *more]
