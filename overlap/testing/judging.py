"""Verdicts on a run in a test: from the error that ended it, and from the record of its operations."""

from __future__ import annotations

from collections.abc import Iterable

from topology.errors import TopologyError

from ..diagnostics import error_place, unwrap_single_error
from ..errors import (
    CollectiveMismatchError,
    DeadlineError,
    OverlapError,
    PeerLostError,
    RankFailedError,
    RankLeftError,
    StallError,
    one_line_text,
)
from ..ranklist import named_ranks
from ..waits import judge as waits
from ..waits.ends import End, Seen
from ..waits.judge import Kind, WaitIndex
from ..waits.wording import end_title, wait_sentence
from . import latent, roles
from .record import Issue, Record, Verdict
from .threads import RealTimeError, UntestableError

UNUSED = "unused fault"
"""Kind of the verdict on a run in which a planned fault has not happened: the test proves nothing."""

NEVER_ENDS = "never ends"
"""Kind of the verdict on a rank that gives others no turn within the real time that a test allows."""

# By kind of verdict: kinds of other verdicts that are its cause if both are found.
_GROUPS = ("group of some", "group order", "group members")
_CAUSES = {
    **dict.fromkeys(("deadline", "stall", "skipped", "left", "late"), (*_GROUPS, "buffer in flight")),
    **dict.fromkeys(("cycle", "mismatch", "swapped"), _GROUPS),
}


def judge_run(
    record: Record,
    error: BaseException | None,
    *,
    synchronised: bool = False,
    shared_order: bool = False,
    unused: str = "",
) -> list[Verdict]:
    """Return the verdicts on a program, the cause first.

    Args:
        record: The record of the run.
        error: Error that ended the run; None: it ended well.
        synchronised: Whether all ranks should have the same weights: they use DistributedDataParallel, or every update
            was made of gradients that all ranks have added up.
        shared_order: Whether ranks must issue the operations of all groups in one order, as on a GPU.
        unused: Why a planned fault has not happened; "": all have.

    Returns:
        Verdicts, [] if nothing is wrong.
    """
    verdicts = [] if error is None else [_judge_error(record, error)]
    finished = {rank for rank, how in record.left.items() if not how}
    checks = [latent.find_partial_group(record, finished), latent.find_buffer_in_flight(record)]
    checks.append(latent.find_reused_tag(record))
    checks.append(roles.judge_first_forward(record) or latent.find_missing_gradient(record))
    if not any(verdict is not None and verdict.kind == "group of some" for verdict in checks):
        checks.append(latent.find_group_order_difference(record) or latent.find_group_members_difference(record))
    if shared_order and not any(verdict.kind == "cycle" for verdict in verdicts):
        checks.append(latent.find_order_cycle(record))
    if synchronised:
        checks.append(latent.find_weight_difference(record))
    if error is None:
        checks.append(latent.find_leak(record))
    if unused:
        checks.append(Verdict(kind=UNUSED, text=unused))
    others = [verdict for verdict in checks if verdict is not None]
    first = [verdict for verdict in others if verdicts and verdict.kind in _CAUSES.get(verdicts[0].kind, ())]
    if first:
        return [first[0], *verdicts, *(other for other in others if other is not first[0])]  # the cause first
    return [*verdicts, *others]


def _judge_error(record: Record, error: BaseException) -> Verdict:
    """Return the verdict on the first of an error and its causes that has a known type; without one, "crash"."""
    cause = error.cause if isinstance(error, RankFailedError) else error
    rank = error.rank if isinstance(error, RankFailedError) else -1  # -1: no rank has raised it
    ranks, culprit = ((rank,), f"rank {rank}") if rank >= 0 else ((), "the world")
    chain = list(_error_chain(cause))
    if isinstance(cause, RuntimeError) and rank in record.troubles:  # C++ passed on only the text of the real error
        chain += _error_chain(record.troubles[rank])
    for failure in chain:
        if isinstance(failure, CollectiveMismatchError):
            verdict = judge_mismatch(record)
            return verdict or Verdict(kind="mismatch", text=str(failure), ranks=failure.ranks, lines=failure.call_sites)
        if isinstance(failure, UntestableError):
            line = failure.line or error_place(failure).removeprefix(" at ")
            return Verdict(kind="refused", text=f"{line}: {failure}", ranks=ranks, lines=(line,))
        if isinstance(failure, RealTimeError):
            return Verdict(kind=NEVER_ENDS, text=str(failure), ranks=ranks)
        if isinstance(failure, PeerLostError):
            return Verdict(kind="rank lost", text=str(failure), ranks=(failure.culprit,))
        if isinstance(failure, (StallError, RankLeftError, DeadlineError)):
            verdict = judge_stall(record)
            if verdict is not None:
                return verdict
            kind = "stall" if not isinstance(failure, DeadlineError) else "deadline"
            return Verdict(kind=kind, text=str(failure), ranks=ranks)
    if rank < 0 and not isinstance(cause, (OverlapError, TopologyError)):
        raise cause  # no rank has raised it: a bug of this package, not of the program
    at = next(filter(None, map(error_place, [cause, *chain])), "")
    line = at.removeprefix(" at ")
    return Verdict(
        kind="crash", ranks=ranks,
        text=f"{culprit} failed{at}: {one_line_text(unwrap_single_error(cause))}{record.late_files.get(rank, '')}",
        lines=(line,) if line else (),
    )  # fmt: skip


def _error_chain(error: BaseException) -> Iterable[BaseException]:
    """Yield an error and its causes, the outermost first."""
    link: BaseException | None = unwrap_single_error(error)
    while link is not None:
        yield link
        link = link.__cause__


# -- ranks that wait, and calls that differ ------------------------------------------------------------------------


def judge_stall(record: Record) -> Verdict | None:
    """Return the verdict on ranks that wait for ever.

    None if no rank waits for another, or if all ranks of an operation have arrived and it has only not ended yet.
    """
    found = waits.judge(record.views(), record.size)
    if not record.stopped.isdisjoint(found.culprits):
        # A rank that a fault has stopped is to blame: judge it as a process that has ended.
        found = waits.judge(record.views(Seen.ENDED), record.size)
    return None if found.kind in (Kind.NOBODY, Kind.WIRE) else _convert_verdict(found)


def judge_mismatch(record: Record) -> Verdict | None:
    """Return the verdict on ranks that called an operation differently, or None if their calls are alike."""
    result = waits.judge(record.views(), record.size)
    if result.kind not in (Kind.MISMATCH, Kind.SWAPPED, Kind.SKIPPED):
        return None
    verdict = _convert_verdict(result)
    reused = _send_lines_of_tag(record, result.ends[0]) if result.ends[0].call.is_message else []
    if not reused:
        return verdict
    again = (
        f"; messages sent at {' and '.join(reused)} have the same tag {result.ends[0].call.tag}, and are received in "
        "the order of their sending"
    )
    lines = tuple(dict.fromkeys((*reused, *verdict.lines)))
    return Verdict(kind="tag reused", text=verdict.text + again, ranks=verdict.ranks, lines=lines)


def _convert_verdict(found: waits.WaitVerdict) -> Verdict:
    """Convert a verdict of the judge of waits to the verdict of a test."""
    ends = [*found.ends, *([found.end] if found.end is not None else []), *found.others]
    if found.kind in (Kind.LEFT, Kind.UNMATCHED, Kind.DEAD) and found.view is not None:
        ends += found.view.ends[-1:]
    lines = tuple(dict.fromkeys(end.call.site for end in ends))
    ranks = tuple(dict.fromkeys((*found.culprits, *found.waiters)))
    return Verdict(kind=found.kind.value, text=wait_sentence(found), ranks=ranks, lines=lines)


def _send_lines_of_tag(record: Record, end: End) -> list[str]:
    """Return the lines that send messages with the sender, receiver and tag of `end`; [] if all sends are alike."""
    sends = [issue.call for issue in record.issues if (issue.call.op, issue.call.key) == ("send", end.call.key)]
    alike = len({send.form for send in sends}) < 2
    return [] if alike else list(dict.fromkeys(send.site for send in sends))


def blocked_issues(record: Record) -> dict[int, Issue]:
    """Return, for each rank that waits for others, the first operation that it waits in."""
    # Rank, operator, key and number together identify an operation of a rank.
    issues = {(issue.rank, issue.call.op, *issue.end.meeting): issue for issue in record.issues if not issue.lost}
    blocking = WaitIndex(record.views(), record.size).waits
    return {rank: issues[rank, own.call.op, *own.meeting] for rank, (own, *_) in blocking.items()}


def judge_wrong_group(record: Record, later: Record) -> Verdict | None:
    """Return the verdict on ranks that wait for each other because one has passed the wrong group, or None.

    Args:
        record: Record of a run that stalled.
        later: Record of the run repeated with the stuck operations made to end at once. A rank that merely calls in
            another order then reaches the operation in which others wait for it; a rank with the wrong group never
            does.
    """
    world = WaitIndex(record.views(), record.size)
    blocked = {rank: own_end for rank, (own_end, *_) in world.waits.items()}
    issued = {(issue.rank, issue.call.op, *issue.end.meeting) for issue in later.issues}
    collectives = {rank: end for rank, end in blocked.items() if not end.call.is_message}
    ended_well = {rank for rank in collectives if later.left.get(rank) == ""}
    never = [
        (collectives[rank], other)
        for other in collectives.values()
        for rank in world.absent_ranks(other)
        if rank in ended_well and (rank, other.call.op, *other.meeting) not in issued
    ]
    if not never:
        return None
    waiting: dict[object, list[int]] = {}
    for rank, end in blocked.items():
        waiting.setdefault(end.meeting, []).append(rank)
    own_end, other = min(never, key=lambda pair: len(waiting[pair[0].meeting]))
    ranks = waiting[other.meeting]
    text = (
        f"rank {own_end.rank} waits in {end_title(own_end)}, and never issues {end_title(other)}, in which "
        f"{named_ranks(ranks)} wait{'s' * (len(ranks) == 1)} for it: pass the same group on all ranks"
    )
    lines = tuple(dict.fromkeys((own_end.call.site, other.call.site)))
    return Verdict(kind="wrong group", text=text, ranks=(own_end.rank, *ranks), lines=lines)
