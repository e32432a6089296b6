"""Verdicts from the end of a world: the error that ended it, explained by the record."""

from __future__ import annotations

from collections.abc import Iterable

from topology.errors import TopologyError

from ..diagnostics import unwrap_single_error, where
from ..errors import (
    CollectiveMismatchError,
    DeadlineError,
    OverlapError,
    PeerLostError,
    RankFailedError,
    RankLeftError,
    StallError,
    in_one_line,
)
from . import survived
from .record import Record
from .threads import RealTimeError, UntestableError
from .verdict import Verdict, why_mismatched, why_stalled

UNUSED = "unused fault"
"""Kind of the verdict on a test that proves nothing: its fault has not happened."""

NEVER_ENDS = "never ends"
"""Kind of the verdict on a rank that gives others no turn within the real time that a test has."""

# Verdicts that explain another one, by the kind of the explained.
_GROUPS = ("group of some", "group order", "group members")
_CAUSES = {
    **dict.fromkeys(("deadline", "stall", "skipped collective"), (*_GROUPS, "buffer in flight")),
    **dict.fromkeys(("order inversion", "mismatch"), _GROUPS),
}


def judge(
    record: Record,
    error: BaseException | None,
    *,
    synchronised: bool = False,
    shared_order: bool = False,
    unused: str = "",
) -> list[Verdict]:
    """Return the verdicts on a program, the cause first.

    Args:
        error: Error that ended the run.
        synchronised: Whether the program means its ranks to have the same weights: it wraps them in
            DistributedDataParallel, or makes every update of gradients that all ranks have added up.
        shared_order: Whether the operations of all groups need one order, as those of a GPU do.
        unused: Why a planned fault has not happened.
    """
    verdicts = [] if error is None else [_end_verdict(record, error)]
    finished = {rank for rank, how in record.left.items() if not how}
    checks = [survived.groups(record, finished), survived.touches(record), survived.tags(record)]
    checks.append(survived.gradients(record))
    if not any(verdict is not None and verdict.kind == "group of some" for verdict in checks):
        checks.append(survived.group_order(record) or survived.group_members(record))
    if shared_order and not any(verdict.kind == "order inversion" for verdict in verdicts):
        checks.append(survived.inversion(record))
    if synchronised:
        checks.append(survived.weights(record))
    if error is None:
        checks.append(survived.leaks(record))
    if unused:
        checks.append(Verdict(kind=UNUSED, text=unused))
    others = [verdict for verdict in checks if verdict is not None]
    first = [verdict for verdict in others if verdicts and verdict.kind in _CAUSES.get(verdicts[0].kind, ())]
    if first:
        return [first[0], *verdicts, *(other for other in others if other is not first[0])]  # the cause first
    return [*verdicts, *others]


def _end_verdict(record: Record, error: BaseException) -> Verdict:
    """Return the verdict on the error that ended a run, by the first error of its chain that a kind explains."""
    cause = error.cause if isinstance(error, RankFailedError) else error
    rank = error.rank if isinstance(error, RankFailedError) else -1  # -1: before any rank, or around all
    ranks, culprit = ((rank,), f"rank {rank}") if rank >= 0 else ((), "the world")
    chain = list(_error_chain(cause))
    if isinstance(cause, RuntimeError) and rank in record.troubles:  # C++ has passed it on as text
        chain += _error_chain(record.troubles[rank])
    for failure in chain:
        if isinstance(failure, CollectiveMismatchError):
            verdict = why_mismatched(record, failure.group, failure.seq, failure.ranks)
            return verdict or Verdict(kind="mismatch", text=str(failure), ranks=failure.ranks, lines=failure.call_sites)
        if isinstance(failure, UntestableError):
            line = failure.line or where(failure).removeprefix(" at ")
            return Verdict(kind="refused", text=f"{line}: {failure}", ranks=ranks, lines=(line,))
        if isinstance(failure, RealTimeError):
            return Verdict(kind=NEVER_ENDS, text=str(failure), ranks=ranks)
        if isinstance(failure, PeerLostError):
            return Verdict(kind="rank lost", text=str(failure), ranks=(failure.culprit,))
        if isinstance(failure, (StallError, RankLeftError, DeadlineError)):
            verdict = why_stalled(record)
            if verdict is not None:
                return verdict
            kind = "stall" if not isinstance(failure, DeadlineError) else "deadline"
            return Verdict(kind=kind, text=str(failure), ranks=ranks)
    if rank < 0 and not isinstance(cause, (OverlapError, TopologyError)):
        raise cause  # no rank has raised it: a bug of this package, not of the program
    at = next(filter(None, map(where, [cause, *chain])), "")
    line = at.removeprefix(" at ")
    return Verdict(
        kind="crash", ranks=ranks,
        text=f"{culprit} failed{at}: {in_one_line(unwrap_single_error(cause))}{record.late_files.get(rank, '')}",
        lines=(line,) if line else (),
    )  # fmt: skip


def _error_chain(error: BaseException) -> Iterable[BaseException]:
    """Yield an error and its causes, the outermost first."""
    link: BaseException | None = unwrap_single_error(error)
    while link is not None:
        yield link
        link = link.__cause__
