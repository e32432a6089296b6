"""Gains of changes to a program, computed from one step: *if the rest stays*, and *at most*.

The own time of a rank is its time without waits for other ranks. A step takes as long as the largest own time. *If the
rest stays*, a change gains the time by which the largest own time shrinks. The rest may move, too: communication that
was exposed can become hidden. *At most*, all communication is hidden under the rest, and a step takes as long as the
rank that computes, or moves bytes, for longest. No least gain follows from a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..units import format_ns
from . import causes

_HIDDEN = (causes.COMM, causes.WIRE, causes.QUEUE)
"""Causes that take no time if all communication is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of a rank: its time by cause, and facts on its communication."""

    costs_ns: Mapping[str, int]  # By cause, one of `causes.NAMES`; they add up to the length of the step
    transfer_ns: int = 0  # Time in which bytes moved, exposed or hidden
    last_ns: int = 0  # Exposed time of the last operation's bytes, which cannot be hidden: no compute follows

    @property
    def own_ns(self) -> int:
        """Time in which the rank did not wait for another rank."""
        return sum(self.costs_ns.values()) - self.costs_ns.get(causes.WAIT, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Time by which a change makes a step shorter."""

    stays_ns: int  # If the rest of the step stays as it is
    most_ns: int  # Upper bound, if all communication is hidden

    def __str__(self) -> str:
        if not self.most_ns:
            return "none: another rank, or the wire, takes as long anyway"
        return f"{format_ns(self.stays_ns)} if the rest stays, at most {format_ns(self.most_ns)}"


def compute_gain(ranks: Sequence[RankStep], *names: str) -> Gain:
    """Return the gain of a change that removes some causes from all ranks.

    If waiting is removed, the work is spread evenly over the ranks. If exposed communication is removed, the last
    operation stays exposed, as far as its time is known.

    Args:
        ranks: The same step of each rank; at least one.
        names: Causes, some of `causes.NAMES`.
    """
    wall_ns = max(sum(rank.costs_ns.values()) for rank in ranks)
    # The own time that each rank still has after the change.
    left_ns = [rank.own_ns - sum(_removed_own_ns(rank, name) for name in names) for rank in ranks]
    # The own time if all communication is hidden, too; but a rank needs at least the time in which its bytes move.
    gone = {*names, *_HIDDEN} - {causes.WAIT}
    rests_ns = [rank.own_ns - sum(rank.costs_ns.get(name, 0) for name in gone) for rank in ranks]
    least_ns = [max(rest_ns, rank.transfer_ns) for rest_ns, rank in zip(rests_ns, ranks, strict=True)]
    before_ns = max(rank.own_ns for rank in ranks)
    # Without waiting, work is spread evenly: each rank has the mean.
    if causes.WAIT in names:
        left_ns, least_ns = ([sum(each) // len(ranks)] for each in (left_ns, least_ns))
        before_ns = wall_ns
    most_ns = max(wall_ns - max(least_ns), 0)
    return Gain(stays_ns=min(max(before_ns - max(left_ns), 0), most_ns), most_ns=most_ns)


def _removed_own_ns(rank: RankStep, cause: str) -> int:
    """Return by how much the own time of a rank falls without a cause.

    Waiting is no part of it; of communication, the last operation stays exposed.
    """
    ns = 0 if cause == causes.WAIT else rank.costs_ns.get(cause, 0)
    return max(ns - rank.last_ns, 0) if cause in (causes.WIRE, causes.COMM) else ns
