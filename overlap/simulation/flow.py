"""Something that gets on at a rate, and what it needs for that. Pure; no Trio.

Shares are whole multiples of 2**-40, so that what flows add to a resource and take away again sums up exactly, in any
order. A flow that is never held up reaches its marks at exactly its start plus their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

_QUANTUM = 2.0**40


def quantised(shares: Floats) -> Floats:
    """Round shares down to the quantum, and to 1."""
    return np.floor(np.minimum(shares, 1.0) * _QUANTUM) / _QUANTUM


class Stage(NamedTuple):
    """What a flow needs for a part of its work."""

    end_ns: int  # work at which it needs something else
    resources: Ints  # (needs,) what it needs, each once
    shares: Floats  # (needs,) how much of each while it gets on at rate 1: more than 0, and `quantised`
    needs: dict[int, float]  # the same: shares by resource
    messages: dict[int, float]  # how many of its messages, at a time, share each of them, by resource
    most: int  # the largest number of a resource; -1 without any

    @classmethod
    def of(cls, end_ns: int, resources: Ints, shares: Floats, messages: Floats | None = None) -> Stage:
        """Make one, without what it does not need; with one message on everything unless it is said."""
        if not len(shares):
            return cls(end_ns, resources, shares, {}, {}, -1)
        needed = shares > 0
        each = np.ones(len(shares)) if messages is None else messages
        resources, shares = resources[needed], shares[needed]
        numbers = resources.tolist()
        needs = dict(zip(numbers, shares.tolist(), strict=True))
        shared = dict(zip(numbers, each[needed].tolist(), strict=True))
        return cls(end_ns, resources, shares, needs, shared, max(numbers, default=-1))


class Flow:
    """Something that gets on at a rate.

    Attributes:
        key: tells flows apart, and orders what they reach in one instant.
        marks_ns: ascending: work at which parts of it are done; the last is the end.
        stages: what it needs until when; the last ends with the work.
        stage: that in which it is.
        priority: lower is more urgent.
        lane: what it belongs to; None for none.
        cap: the most its rate may be.
        rate: how fast it gets on now.
        started_ns: when it started.
        age: how many had started before it, and for a part of one, such as a message of a collective, how many parts.
        done_ns: work done when it was last given a rate.
    """

    __slots__ = (
        "_due_ns", "_mark", "_since_ns", "_stage", "age", "cap", "done_ns", "key", "lane", "marks_ns", "priority",
        "rate", "stage", "stages", "started_ns",
    )  # fmt: skip

    def __init__(
        self,
        key: tuple[object, ...],
        marks_ns: Sequence[int],
        stages: Sequence[Stage],
        *,
        priority: int = 0,
        lane: object = None,
    ) -> None:
        self.key, self.marks_ns, self.stages, self.stage = key, marks_ns, stages, stages[0]
        self.priority, self.lane = priority, lane
        self.cap = self.rate = 1.0
        self.started_ns = self._since_ns = 0
        self.done_ns = 0.0
        self.age = 0, 0
        self._mark, self._stage, self._due_ns = 0, 0, -1

    def __repr__(self) -> str:
        return f"<Flow {self.key}: {self._mark} of {len(self.marks_ns)} marks, rate {self.rate:.3g}>"

    @property
    def reached(self) -> int:
        """How many marks it has reached."""
        return self._mark

    def _turn(self, now_ns: int, rate: float) -> None:
        """Go on at another rate."""
        self.done_ns += (now_ns - self._since_ns) * self.rate
        self._since_ns, self.rate = now_ns, rate
