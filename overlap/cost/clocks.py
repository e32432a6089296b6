"""Clocks of all ranks: when each of them finishes, by max-plus arithmetic on integer ticks.

A rank has two clocks: the arrival of its last message, and the time from which it can start another message. Every
wire that leaves a rank has a clock: the time from which it is free again. A message starts at the latest of the three;
it keeps the sender busy for the step's overhead, and the wire for its transfer as well, and arrives a latency later. So
a rank sends to several others at once if each has a wire of its own. Trees side by side have clocks of their own at
every rank. Times are integers, so sums are exact, and the same on every machine.

The map from the clocks before a round to those after is homogeneous: all clocks later by c, all results later by c. So
as soon as a repetition moves every clock by the same amount, all further ones do, and need not be computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..collectives.placement import Floats, Ints
from .placed import Placed, PlacedRound


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Resolution of clocks: ticks in a second, and rounding to them."""

    ticks_per_s: int = 10**12  # ticks in a second
    # "nearest", or "down" as simulators do that cut every message's time to whole ticks.
    rounding: Literal["nearest", "down"] = "nearest"

    def ticks(self, duration_s: Floats) -> Ints:
        """Return durations in seconds as whole ticks, rounded."""
        exact = duration_s * self.ticks_per_s
        return (np.rint(exact) if self.rounding == "nearest" else np.floor(exact)).astype(np.int64)


PICOSECONDS = Resolution()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """Shares of the time of the last rank to finish, along the chain of messages that it waited for."""

    waiting_s: float  # until the rank at the start of the chain arrives
    launch_s: float  # to start the operation
    start_s: float  # to start steps: descriptors, semaphores, and messages issued one after another
    latency_s: float  # latency of wires
    wire_s: float  # bytes on the busiest wire of each step
    memory_s: float  # copies that take longer than the wires
    reduction_s: float  # reductions that take longer than wires and copies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cost:
    """Cost of a collective: when each rank has finished, and where that time went."""

    finish_s: Floats  # (size,) time at which each rank is done, on the clock of the arrivals
    breakdown: CostBreakdown | None = None  # breakdown for the rank that finishes last; None without `explain`

    @property
    def total_s(self) -> float:
        """Time at which the last rank is done."""
        return float(self.finish_s.max(initial=0.0))


_TERMS = 7  # terms of a `CostBreakdown`, in its order
_WAITING, _LAUNCH, _START, _LATENCY, _WIRE, _MEMORY, _REDUCTION = range(_TERMS)


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
        nbytes: Bytes of the whole vector: the larger one of a rank's input and output.
        arrivals_s: (size,) when each rank issues the collective; all at 0 by default.
        resolution: Resolution of the clocks.
        explain: Whether to compute the breakdown.
    """
    size, parameters = placed.placement.size, placed.parameters
    # One clock for each rank and lane, in ticks.
    arrivals = np.tile(resolution.ticks(np.zeros(size) if arrivals_s is None else arrivals_s), placed.lanes)
    launch = int(resolution.ticks(np.array(parameters.launch_s)))
    clocks = _Clocks(arrivals, launch, placed.ports, explain=explain)
    for placed_round, times, hidden in placed.runs():
        clocks.repeat_step(
            _TimedStep(placed_round, placed, nbytes / placed.rounds.slots, resolution, hidden=hidden), times
        )
    finish = np.maximum(clocks.ready, clocks.left)
    per_s = resolution.ticks_per_s
    finish_s = finish.reshape(placed.lanes, -1).max(axis=0) / per_s
    return Cost(finish_s=finish_s, breakdown=clocks.breakdown(int(finish.argmax()), per_s) if explain else None)


class _TimedStep:
    """A step whose durations are known: a placed round, for one number of bytes, in ticks.

    A message keeps its sender for `start`, and its wire for `transfer` after that; it arrives `latency` later.

    Attributes:
        src, dst, port: (messages,) Clocks of the sender, of the receiver, and of the wire by which it leaves.
        by_src, by_dst, by_port: Messages grouped by these clocks.
        start: (messages,) Delay before its bytes move.
        wire: (messages,) Bytes on its busiest wire.
        copies: (messages,) Copies in memory, beyond the time on the wire.
        transfer: (messages,) Bytes on the wire, in memory and in the reducer: the longest of these, which overlap.
        busy: (messages,) `start` and `transfer`.
        latency: (messages,) Time from the end of the transfer to the arrival.
        serial: (messages,) Reduction after the arrival, where it cannot overlap; None if no message has one.
        local: (clocks,) Work of each rank before its first message; None: no rank has any.
        beside: (clocks,) Copies of each rank that no message waits for; None: no rank has any.

    Args:
        placed_round: The round, on the wires of a cluster.
        placed: Its schedule.
        slot_bytes: Bytes of a slot.
        resolution: Length of a tick.
        hidden: Whether the next step hides its delays, as in a ring that passes sums on in pieces.
    """

    def __init__(
        self, placed_round: PlacedRound, placed: Placed, slot_bytes: float, resolution: Resolution, *, hidden: bool
    ) -> None:
        parameters, tick = placed.parameters, resolution.ticks
        self.src, self.dst, self.port = placed_round.src, placed_round.dst, placed_round.port
        self.by_src, self.by_dst, self.by_port = placed_round.by_src, placed_round.by_dst, placed_round.by_port
        start_s, latency_s = placed_round.delays_s(slot_bytes, parameters.chunk_pieces if hidden else 1)
        self.start, self.latency = tick(start_s), tick(latency_s)
        self.wire = tick(placed_round.wire_s(slot_bytes))
        copying, in_memory, reducing = tick(placed_round.of_bytes * slot_bytes)
        waits_for_reducer = not (parameters.reduction_overlaps or hidden) and bool(reducing.any())
        self.serial = reducing if waits_for_reducer else None
        self.transfer: Ints = np.maximum(self.wire, in_memory)
        if not waits_for_reducer:
            self.transfer = np.maximum(self.transfer, reducing)
        self.copies = np.maximum(copying - self.wire, 0)
        self.busy = self.start + self.transfer
        self.local = _for_all_lanes(tick(placed_round.local_s_per_byte * slot_bytes), placed.lanes)
        self.beside = _for_all_lanes(tick(placed_round.beside_s_per_byte * slot_bytes), placed.lanes)

    def terms(self) -> Ints:
        """Return (terms, messages) the terms of the time for which each message's sender is busy."""
        none = np.zeros_like(self.busy)
        rest = self.transfer - self.wire - self.copies
        return np.stack([none, none, self.start, none, self.wire, self.copies, rest])


def _for_all_lanes(duration: Ints, lanes: int) -> Ints | None:
    """Return a duration of each rank for every clock, None if all are 0."""
    return np.tile(duration, lanes) if duration.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class _RankClocks:
    """Times of all clocks in ticks; or, in the same fields, the terms that each of these times consists of."""

    ready: Ints  # (ranks,) time at which all messages to the rank have arrived
    free: Ints  # (ranks,) time at which the rank has started its last message
    left: Ints  # (ranks,) time at which its last message has left and its copies next to messages have ended
    port: Ints  # (wires,) time at which the last message on a wire has left

    def extrapolate(self, other: _RankClocks, times: int) -> _RankClocks:
        """Return the times after `times` more steps, each of which moves the clocks as much as since `other`."""
        present, past = ((clocks.ready, clocks.free, clocks.left, clocks.port) for clocks in (self, other))
        return _RankClocks(*(now + times * (now - then) for now, then in zip(present, past, strict=True)))


class _Clocks:
    """The clocks of every rank and of every wire that leaves one, and their terms.

    Args:
        arrivals: (ranks,) When each rank arrives, in ticks.
        launch: Ticks from the arrival of the last rank to the first step.
        ports: Number of wires that leave ranks.
        explain: Whether terms are computed as well.
    """

    def __init__(self, arrivals: Ints, launch: int, ports: int, *, explain: bool) -> None:
        begin = arrivals + launch
        self._now = _RankClocks(begin, begin, begin, np.zeros(ports, np.int64))
        self._terms: _RankClocks | None = None
        if explain:
            terms = np.zeros((_TERMS, len(arrivals)), np.int64)
            terms[_WAITING], terms[_LAUNCH] = arrivals, launch
            self._terms = _RankClocks(terms, terms, terms, np.zeros((_TERMS, ports), np.int64))

    @property
    def ready(self) -> Ints:
        """Time at which all messages to each rank have arrived."""
        return self._now.ready

    @property
    def left(self) -> Ints:
        """Time at which the last message of each rank has left."""
        return self._now.left

    def repeat_step(self, step: _TimedStep, repeat: int) -> None:
        """Run a step `repeat` times; once all clocks move equally from step to step, compute the rest at once."""
        for done in range(1, repeat + 1):
            before, terms = self._now, self._terms
            self._run_step(step)
            # Looking for the steady state costs about a step, so it is done after 1, 2, 4, 8, ... of them.
            if done < repeat and not done & (done - 1) and self._has_moved_equally(before, step):
                self._now = self._now.extrapolate(before, repeat - done)
                if self._terms is not None and terms is not None:
                    self._terms = self._terms.extrapolate(terms, repeat - done)
                return

    def _has_moved_equally(self, before: _RankClocks, step: _TimedStep) -> bool:
        """Return whether all clocks have moved by the same time since `before`, which all further steps then repeat."""
        now, by = self._now, self._now.ready[0] - before.ready[0]
        ranks = ((now.ready, before.ready), (now.free, before.free), (now.left, before.left))
        alike = all((after - then == by).all() for after, then in ranks)
        return bool(alike and (now.port[step.port] - before.port[step.port] == by).all())

    def _run_step(self, step: _TimedStep) -> None:
        """Advance all clocks by one step: a message starts when its sender is ready and free, and its wire is free."""
        if step.local is not None:
            self._run_local_work(step.local)
        if step.beside is not None:
            self._run_unawaited_copies(step.beside)
        if not len(step.src):
            return
        clocks = self._now
        # Per message: its start, when it has left the sender, and when it arrives.
        start = np.maximum(np.maximum(clocks.ready, clocks.free)[step.src], clocks.port[step.port])
        leaves = start + step.busy
        arrives = leaves + step.latency
        if self._terms is not None:
            self._update_terms(step, start, leaves, arrives)
        if step.serial is not None:
            arrives = np.maximum(arrives, clocks.ready[step.dst]) + step.serial
        ready, free, left, port = clocks.ready.copy(), clocks.free.copy(), clocks.left.copy(), clocks.port.copy()
        ready[step.by_dst.clock] = np.maximum(ready[step.by_dst.clock], step.by_dst.latest(arrives))
        free[step.by_src.clock] = step.by_src.latest(start + step.start)
        left[step.by_src.clock] = np.maximum(left[step.by_src.clock], step.by_src.latest(leaves))
        port[step.by_port.clock] = step.by_port.latest(leaves)
        self._now = _RankClocks(ready, free, left, port)

    def _run_local_work(self, local: Ints) -> None:
        """Advance the clocks of ranks with local work, which begins when their messages have arrived and left."""
        now, works = self._now, local > 0
        if self._terms is not None:
            terms = np.where(works & (now.left > now.ready), self._terms.left, self._terms.ready)
            terms[_MEMORY] += local
            self._terms = replace(self._terms, ready=terms)
        self._now = replace(now, ready=np.where(works, np.maximum(now.ready, now.left) + local, now.ready))

    def _run_unawaited_copies(self, copy_time: Ints) -> None:
        """Add the time of copies that no message waits for: the ranks only finish later."""
        clocks, done = self._now, self._now.ready + copy_time
        last = (copy_time > 0) & (done > clocks.left)
        if self._terms is not None:
            terms = self._terms.ready.copy()
            terms[_MEMORY] += copy_time
            self._terms = replace(self._terms, left=np.where(last, terms, self._terms.left))
        self._now = replace(clocks, left=np.where(last, done, clocks.left))

    def _update_terms(self, step: _TimedStep, start: Ints, leaves: Ints, arrives: Ints) -> None:
        """Add the terms of a step to all clocks: each clock inherits the terms of the clock that it waited for."""
        clocks, terms = self._now, self._terms
        assert terms is not None
        # Terms of the start of each message: those of the latest of the sender's two clocks and the wire's clock.
        started = np.where(clocks.free > clocks.ready, terms.free, terms.ready)[:, step.src]
        held = start > np.maximum(clocks.ready, clocks.free)[step.src]
        started = np.where(held, terms.port[:, step.port], started)
        issued = started.copy()
        issued[_START] += step.start
        busy = started + step.terms()
        arrived = busy.copy()
        arrived[_LATENCY] += step.latency
        ready, free, left, port = (column.copy() for column in (terms.ready, terms.free, terms.left, terms.port))
        # Each clock takes the terms of the message with the latest time, unless it was already later.
        first = step.by_dst.winner(arrives)
        late_messages = first[arrives[first] > clocks.ready[step.dst[first]]]
        ready[:, step.dst[late_messages]] = arrived[:, late_messages]
        if step.serial is not None:
            ready[_REDUCTION, step.dst[first]] += step.serial[first]
        first = step.by_src.winner(start + step.start)
        free[:, step.src[first]] = issued[:, first]
        first = step.by_src.winner(leaves)
        late_messages = first[leaves[first] > clocks.left[step.src[first]]]
        left[:, step.src[late_messages]] = busy[:, late_messages]
        first = step.by_port.winner(leaves)
        port[:, step.port[first]] = busy[:, first]
        self._terms = _RankClocks(ready, free, left, port)

    def breakdown(self, rank: int, ticks_per_s: int) -> CostBreakdown:
        """Return the terms of the time at which a rank finishes: those of its later clock, ready or left."""
        assert self._terms is not None
        terms = self._terms.left if self._now.left[rank] > self._now.ready[rank] else self._terms.ready
        return CostBreakdown(**dict(zip(CostBreakdown.__slots__, (terms[:, rank] / ticks_per_s).tolist(), strict=True)))
