"""When every rank finishes: max-plus over rounds, on integer ticks.

A rank has two clocks: when all that it was sent has arrived, and when it is free to send again. A message starts at the
later one; it keeps the sender busy for the step's overhead and its transfer, and arrives a latency after that. Times
are integers, so sums are exact, and the same on every machine.

The map from the clocks before a round to those after is homogeneous: all clocks later by c, all results later by c. So
as soon as a repetition moves every clock by the same amount, all further ones do, and need not be computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..placement import Floats, Ints
from .placed import Placed, PlacedRound

__all__ = ["PICOSECONDS", "Cost", "CostBreakdown", "Resolution", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """How seconds become ticks.

    Attributes:
        ticks_per_s: ticks in a second.
        rounding: "nearest", or "down" as simulators do that cut every message's time to whole ticks.
    """

    ticks_per_s: int = 10**12
    rounding: Literal["nearest", "down"] = "nearest"

    def ticks(self, duration_s: Floats) -> Ints:
        """Return durations in ticks."""
        exact = duration_s * self.ticks_per_s
        return (np.rint(exact) if self.rounding == "nearest" else np.floor(exact)).astype(np.int64)


PICOSECONDS = Resolution()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """Where the time of the last rank to finish goes, along the chain of messages that it waited for.

    Attributes:
        waiting_s: for the rank at the start of that chain to arrive.
        launch_s: to start the operation.
        start_s: to start steps: descriptors, semaphores, and messages issued one after another.
        latency_s: of wires.
        wire_s: of bytes on the busiest wire of each step.
        memory_s: of copies, beyond what the wires take.
        reduction_s: of reductions, beyond what wires and copies take.
    """

    waiting_s: float
    launch_s: float
    start_s: float
    latency_s: float
    wire_s: float
    memory_s: float
    reduction_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cost:
    """What a collective costs.

    Attributes:
        finish_s: (size,) when each rank is done, on the clock of the arrivals.
        breakdown: of the latest of them, None if it was not asked for.
    """

    finish_s: Floats
    breakdown: CostBreakdown | None = None

    @property
    def total_s(self) -> float:
        """When the last rank is done."""
        return float(self.finish_s.max(initial=0.0))


_WAITING, _LAUNCH, _START, _LATENCY, _WIRE, _MEMORY, _REDUCTION = range(7)


def cost(
    placed: Placed,
    nbytes: float,
    *,
    arrivals_s: Floats | None = None,
    resolution: Resolution = PICOSECONDS,
    explain: bool = False,
) -> Cost:
    """Compute when every rank finishes.

    Args:
        placed: A schedule on a machine.
        nbytes: Of the whole vector: the larger one of a rank's input and output.
        arrivals_s: (size,) when each rank issues the collective; all at 0 by default.
        resolution: Of the clocks.
        explain: Whether to follow where the time goes.
    """
    size, parameters = placed.placement.size, placed.parameters
    arrivals = resolution.ticks(np.zeros(size) if arrivals_s is None else arrivals_s)
    launch = int(resolution.ticks(np.array(parameters.launch_s)))
    clocks = _Clocks(arrivals, launch, explain=explain)
    for one in placed.each:
        clocks.run(_Step(one, placed, nbytes / placed.rounds.slots, resolution), one.round.repeat)
    finish = np.maximum(clocks.ready, clocks.free)
    per_s = resolution.ticks_per_s
    return Cost(finish_s=finish / per_s, breakdown=clocks.breakdown(int(finish.argmax()), per_s) if explain else None)


class _Step:
    """A placed round for one number of bytes, in ticks."""

    def __init__(self, one: PlacedRound, placed: Placed, slot_bytes: float, resolution: Resolution) -> None:
        self.src, self.dst = one.round.src, one.round.dst
        parameters = placed.parameters
        self.start = resolution.ticks(one.start_s)
        self.latency = resolution.ticks(one.latency_s)
        self.wire = resolution.ticks(one.wire_s(slot_bytes))
        memory = resolution.ticks((one.moving_s_per_byte + one.adding_s_per_byte) * slot_bytes)
        reducing = resolution.ticks(one.reducing_s_per_byte * slot_bytes)
        self.serial = 0 * reducing if parameters.reduction_overlaps else reducing
        resources = (self.wire, memory) if self.serial.any() else (self.wire, memory, reducing)
        self.transfer: Ints = np.maximum.reduce(resources)
        self.copies = np.maximum(resolution.ticks(one.moving_s_per_byte * slot_bytes) - self.wire, 0)
        self.busy = self.start + self.transfer
        self.local = resolution.ticks(one.local_s_per_byte * slot_bytes)
        self.by_dst = _Segments(self.dst)
        self.by_src = _Segments(self.src)

    def terms(self) -> Ints:
        """Return (terms, messages) what keeps the sender of each message busy."""
        none = np.zeros_like(self.busy)
        rest = self.transfer - self.wire - self.copies
        return np.stack([none, none, self.start, none, self.wire, self.copies, rest])


class _Segments:
    """Messages sorted by rank."""

    def __init__(self, rank: Ints) -> None:
        self.order = np.argsort(rank, kind="stable")
        ranks = rank[self.order]
        self.first = np.flatnonzero(np.append(True, ranks[1:] != ranks[:-1])) if len(rank) else np.zeros(0, np.int64)
        self.rank = ranks[self.first]
        self.alone = len(self.first) == len(rank)

    def latest(self, time: Ints) -> Ints:
        """Return the latest time of each rank in `rank`."""
        times = time[self.order]
        return times if self.alone else np.maximum.reduceat(times, self.first)

    def winner(self, time: Ints) -> Ints:
        """Return the message with the latest time of each rank in `rank`, the first of several."""
        number = np.repeat(np.arange(len(self.first)), np.diff(np.append(self.first, len(self.order))))
        best = np.flatnonzero(time[self.order] == self.latest(time)[number])
        return self.order[best[np.unique(number[best], return_index=True)[1]]]


class _Clocks:
    """The two clocks of every rank: all that it was sent is there; it is free to send again."""

    def __init__(self, arrivals: Ints, launch: int, *, explain: bool) -> None:
        self.ready = arrivals + launch
        self.free = self.ready.copy()
        self._terms: tuple[Ints, Ints] | None = None
        if explain:
            terms = np.zeros((7, len(arrivals)), np.int64)
            terms[_WAITING], terms[_LAUNCH] = arrivals, launch
            self._terms = terms, terms.copy()

    def run(self, step: _Step, repeat: int) -> None:
        """Repeat a step."""
        for done in range(1, repeat + 1):
            before = self.ready, self.free, self._terms
            self._once(step)
            # Looking for the steady state costs about a step, so it is done after 1, 2, 4, 8, ... of them.
            if done < repeat and not done & (done - 1) and self._moved_alike(before[0], before[1]):
                self._jump(before, repeat - done)
                return

    def _moved_alike(self, ready: Ints, free: Ints) -> bool:
        by = self.ready[0] - ready[0]
        return bool((self.ready - ready == by).all() and (self.free - free == by).all())

    def _jump(self, before: tuple[Ints, Ints, tuple[Ints, Ints] | None], times: int) -> None:
        by = times * (self.ready[0] - before[0][0])
        self.ready, self.free = self.ready + by, self.free + by
        if self._terms is not None and before[2] is not None:
            ready, free = (now + times * (now - then) for now, then in zip(self._terms, before[2], strict=True))
            self._terms = ready, free

    def _once(self, step: _Step) -> None:
        if step.local.any():
            self._locally(step.local)
        if not len(step.src):
            return
        start = np.maximum(self.ready, self.free)[step.src]
        leaves = start + step.busy
        arrives = leaves + step.latency
        if self._terms is not None:
            self._follow(step, leaves, arrives)
        if step.serial.any():
            arrives = np.maximum(arrives, self.ready[step.dst]) + step.serial
        ready, free = self.ready.copy(), self.free.copy()
        ready[step.by_dst.rank] = np.maximum(ready[step.by_dst.rank], step.by_dst.latest(arrives))
        free[step.by_src.rank] = step.by_src.latest(leaves)
        self.ready, self.free = ready, free

    def _locally(self, local: Ints) -> None:
        works, late = local > 0, self.free > self.ready
        if self._terms is not None:
            ready, free = self._terms
            terms = np.where(works & late, free, ready)
            terms[_MEMORY] += local
            self._terms = terms, free
        self.ready = np.where(works, np.maximum(self.ready, self.free) + local, self.ready)

    def _follow(self, step: _Step, leaves: Ints, arrives: Ints) -> None:
        """Carry along what the clocks are made of."""
        assert self._terms is not None
        ready, free = self._terms
        busy = np.where(self.free > self.ready, free, ready)[:, step.src] + step.terms()
        there = busy.copy()
        there[_LATENCY] += step.latency
        new_ready, new_free = ready.copy(), free.copy()
        first = step.by_dst.winner(arrives)
        late = first[arrives[first] > self.ready[step.dst[first]]]
        new_ready[:, step.dst[late]] = there[:, late]
        new_ready[_REDUCTION, step.dst[first]] += step.serial[first]
        first = step.by_src.winner(leaves)
        new_free[:, step.src[first]] = busy[:, first]
        self._terms = new_ready, new_free

    def breakdown(self, rank: int, ticks_per_s: int) -> CostBreakdown:
        """Return what the later clock of a rank is made of."""
        assert self._terms is not None
        terms = self._terms[1 if self.free[rank] > self.ready[rank] else 0]
        return CostBreakdown(**dict(zip(CostBreakdown.__slots__, (terms[:, rank] / ticks_per_s).tolist(), strict=True)))
