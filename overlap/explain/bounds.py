"""Gains of changes to a program, from one step of it: if the rest stays as it was, and at most.

A rank that waits for others has less to do than they have: its own time is what it does not wait. A step takes as long
as the rank with the most own time. So a change gains what that shrinks by, *if the rest stays*: what the change does
not name may move, too, as bytes that were exposed become hidden. *At most*, all communication is hidden under the
rest, and a step takes as long as a rank computes, or moves bytes. No least gain follows from a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..units import format_ns
from . import causes

_HIDDEN = (causes.COMM, causes.WIRE, causes.QUEUE)
"""Causes that go if all communication is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of a rank: its costs by cause, which add up to its length, and facts on its communication."""

    costs_ns: Mapping[str, int]
    transfer_ns: int = 0  # Time in which bytes moved, exposed or not
    last_ns: int = 0  # Exposed time in which bytes of the last operation moved: no compute follows it

    @property
    def own_ns(self) -> int:
        """Time in which the rank did not wait for another one."""
        return sum(self.costs_ns.values()) - self.costs_ns.get(causes.WAIT, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Time by which a change makes a step shorter."""

    stays_ns: int  # If the rest stays
    most_ns: int  # At most

    def __str__(self) -> str:
        if not self.most_ns:
            return "none: another rank, or the wire, takes as long anyway"
        return f"{format_ns(self.stays_ns)} if the rest stays, at most {format_ns(self.most_ns)}"


def gain(ranks: Sequence[RankStep], *names: str) -> Gain:
    """Return the gain of a change that takes some causes away from all ranks.

    Without waiting, the ranks share their work out evenly. Without exposed communication, all operations but the last
    one are hidden, where it is known how long that is exposed.

    Args:
        ranks: The same step of each rank; at least one.
        names: Some of `causes.NAMES`.
    """
    wall_ns = max(sum(rank.costs_ns.values()) for rank in ranks)
    left_ns = [rank.own_ns - sum(_taken_ns(rank, name) for name in names) for rank in ranks]
    least_ns = [
        max(
            rank.own_ns - sum(rank.costs_ns.get(name, 0) for name in {*names, *_HIDDEN} - {causes.WAIT}),
            rank.transfer_ns,
        )
        for rank in ranks
    ]
    before_ns = max(rank.own_ns for rank in ranks)
    if causes.WAIT in names:
        left_ns, least_ns = ([sum(each) // len(ranks)] for each in (left_ns, least_ns))
        before_ns = wall_ns
    most_ns = max(wall_ns - max(least_ns), 0)
    return Gain(stays_ns=min(max(before_ns - max(left_ns), 0), most_ns), most_ns=most_ns)


def _taken_ns(rank: RankStep, cause: str) -> int:
    """Return what a change takes from the own time of a rank."""
    ns = 0 if cause == causes.WAIT else rank.costs_ns.get(cause, 0)
    return max(ns - rank.last_ns, 0) if cause in (causes.WIRE, causes.COMM) else ns
