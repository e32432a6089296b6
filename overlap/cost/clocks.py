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

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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


# Columns of clocks: their time, and the terms of a `CostBreakdown` that the time consists of, in their order.
_TIME, _WAITING, _LAUNCH, _START, _LATENCY, _WIRE, _MEMORY, _REDUCTION = range(8)


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
    clocks = _Clocks.begin(arrivals, launch, placed.ports, explain=explain)
    for placed_round, times, hidden in placed.runs():
        step = _TimedStep(
            placed_round, placed, nbytes / placed.rounds.slots, resolution, hidden=hidden, explain=explain
        )
        clocks = clocks.repeat_step(step, times)
    finish = _later(clocks.ready, clocks.left)
    per_s = resolution.ticks_per_s
    finish_s = _time(finish).reshape(placed.lanes, -1).max(axis=0) / per_s
    if not explain:
        return Cost(finish_s=finish_s)
    terms_s = (finish[_time(finish).argmax(), _WAITING:] / per_s).tolist()
    return Cost(finish_s=finish_s, breakdown=CostBreakdown(**dict(zip(CostBreakdown.__slots__, terms_s, strict=True))))


class _TimedStep:
    """A step whose durations are known: a placed round, for one number of bytes, in ticks.

    A message keeps its sender for `start` before its bytes move, and then its wire; it arrives `latency` later.

    Attributes:
        src, dst, port: (messages,) Clocks of the sender, of the receiver, and of the wire by which it leaves.
        by_src, by_dst, by_port: Messages grouped by these clocks.
        start: (messages,) Delay before its bytes move.
        busy: Time for which each message keeps its sender, as a clock: `start`, and the bytes on the wire, in memory
            and in the reducer, of which the longest counts, as they overlap.
        latency: (messages,) Time from the end of the transfer to the arrival.
        serial: (messages,) Reduction after the arrival, where it cannot overlap; None if no message has one.
        local: (clocks,) Work of each rank before its first message; None: no rank has any.
        unawaited: (clocks,) Copies of each rank that no message waits for; None: no rank has any.

    Args:
        placed_round: The round, on the wires of a cluster.
        placed: Its schedule.
        slot_bytes: Bytes of a slot.
        resolution: Length of a tick.
        hidden: Whether the next step hides its delays, as in a ring that passes sums on in pieces.
        explain: Whether to compute terms as well.
    """

    def __init__(
        self,
        placed_round: PlacedRound,
        placed: Placed,
        slot_bytes: float,
        resolution: Resolution,
        *,
        hidden: bool,
        explain: bool,
    ) -> None:
        parameters, tick = placed.parameters, resolution.ticks
        self.src, self.dst, self.port = placed_round.src, placed_round.dst, placed_round.port
        self.by_src, self.by_dst, self.by_port = placed_round.by_src, placed_round.by_dst, placed_round.by_port
        start_s, latency_s = placed_round.delays_s(slot_bytes, parameters.chunk_pieces if hidden else 1)
        self.start, self.latency = tick(start_s), tick(latency_s)
        wire = tick(placed_round.wire_s(slot_bytes))
        copying, in_memory, reducing = tick(placed_round.of_bytes * slot_bytes)
        waits_for_reducer = not (parameters.reduction_overlaps or hidden) and bool(reducing.any())
        self.serial = reducing if waits_for_reducer else None
        transfer = np.maximum(wire, in_memory)
        if not waits_for_reducer:
            transfer = np.maximum(transfer, reducing)
        self.busy: Ints = self.start + transfer
        if explain:
            none, copies = np.zeros_like(wire), np.maximum(copying - wire, 0)
            terms = (none, none, self.start, none, wire, copies, transfer - wire - copies)
            self.busy = np.column_stack([self.busy, *terms])
        self.local = _for_all_lanes(tick(placed_round.local_s_per_byte * slot_bytes), placed.lanes)
        self.unawaited = _for_all_lanes(tick(placed_round.unawaited_s_per_byte * slot_bytes), placed.lanes)


def _for_all_lanes(duration: Ints, lanes: int) -> Ints | None:
    return np.tile(duration, lanes) if duration.any() else None


def _time(clocks: Ints) -> Ints:
    return clocks if clocks.ndim == 1 else clocks[:, _TIME]


def _later(clocks: Ints, others: Ints) -> Ints:
    """Return, of each clock and another one, the later; the first of equal ones."""
    return np.maximum(clocks, others) if clocks.ndim == 1 else _choose(_time(others) > _time(clocks), others, clocks)


def _choose(condition: NDArray[np.bool_], clocks: Ints, others: Ints) -> Ints:
    return np.where(condition if clocks.ndim == 1 else condition[:, None], clocks, others)


def _add(clocks: Ints, duration: Ints, term: int) -> Ints:
    """Return clocks that are later by durations, which count as a term."""
    if clocks.ndim == 1:
        return clocks + duration
    moved = clocks.copy()
    moved[:, _TIME] += duration
    moved[:, term] += duration
    return moved


@dataclass(frozen=True, slots=True, eq=False)
class _Clocks:
    """The clocks of every rank and lane, and of every wire that leaves a rank.

    A clock is its time in ticks; or, to explain a cost, a row with the time and its terms.
    """

    ready: Ints  # by rank: time at which all messages to it have arrived
    free: Ints  # by rank: time at which it has started its last message
    left: Ints  # by rank: time at which its last message has left and its copies next to messages have ended
    port: Ints  # by wire: time at which the last message on it has left

    @classmethod
    def begin(cls, arrivals: Ints, launch: int, ports: int, *, explain: bool) -> _Clocks:
        """Return the clocks at the start of the first step.

        Args:
            arrivals: (ranks,) When each rank arrives, in ticks.
            launch: Ticks from the arrival of a rank to its first step.
            ports: Number of wires that leave ranks.
            explain: Whether terms are computed as well.
        """
        if not explain:
            begin = arrivals + launch
            return cls(begin, begin, begin, np.zeros(ports, np.int64))
        columns = 1 + len(CostBreakdown.__slots__)
        begin = np.zeros((len(arrivals), columns), np.int64)
        begin[:, _TIME], begin[:, _WAITING], begin[:, _LAUNCH] = arrivals + launch, arrivals, launch
        return cls(begin, begin, begin, np.zeros((ports, columns), np.int64))

    def repeat_step(self, step: _TimedStep, repeat: int) -> _Clocks:
        """Return the clocks after `repeat` equal steps; once all clocks move equally, the rest is computed at once."""
        clocks = self
        for done in range(1, repeat + 1):
            before, clocks = clocks, clocks._run_step(step)
            # Looking for the steady state costs about a step, so it is done after 1, 2, 4, 8, ... of them.
            if done < repeat and not done & (done - 1) and clocks._has_moved_equally(before, step):
                return clocks._extrapolate(before, repeat - done)
        return clocks

    def _has_moved_equally(self, before: _Clocks, step: _TimedStep) -> bool:
        """Return whether all clocks have moved by the same time since `before`, which all further steps then repeat."""
        pairs = ((self.ready, before.ready), (self.free, before.free), (self.left, before.left))
        ports = (_time(self.port) - _time(before.port))[step.port]
        moved = [*(_time(now) - _time(then) for now, then in pairs), ports]
        return all(bool((each == moved[0][0]).all()) for each in moved)

    def _extrapolate(self, before: _Clocks, times: int) -> _Clocks:
        """Return the clocks after `times` more steps, each of which moves them as much as since `before`."""
        pairs = ((getattr(self, name), getattr(before, name)) for name in _Clocks.__slots__)
        return _Clocks(*(now + times * (now - then) for now, then in pairs))

    def _run_step(self, step: _TimedStep) -> _Clocks:
        """Return the clocks after a step: a message starts when its sender is ready and free, and its wire is free."""
        ready, free, left, port = self.ready, self.free, self.left, self.port
        if step.local is not None:  # it begins when the messages of a rank have arrived and left
            ready = _add(_choose(step.local > 0, _later(ready, left), ready), step.local, _MEMORY)
        if step.unawaited is not None:  # no message waits for it: the ranks only finish later
            left = _choose(step.unawaited > 0, _later(left, _add(ready, step.unawaited, _MEMORY)), left)
        if not len(step.src):
            return _Clocks(ready, free, left, port)
        # Of each message: when it starts, has been issued, has left its sender, and arrives.
        starts = _later(_later(ready, free)[step.src], port[step.port])
        issued, leaves = _add(starts, step.start, _START), starts + step.busy
        arrives = _add(leaves, step.latency, _LATENCY)
        if step.serial is not None:
            arrives = _add(_later(ready[step.dst], arrives), step.serial, _REDUCTION)
        ready, free, left, port = ready.copy(), free.copy(), left.copy(), port.copy()
        ready[step.by_dst.clock] = _later(ready[step.by_dst.clock], step.by_dst.latest(arrives))
        free[step.by_src.clock] = step.by_src.latest(issued)
        left[step.by_src.clock] = _later(left[step.by_src.clock], step.by_src.latest(leaves))
        port[step.by_port.clock] = step.by_port.latest(leaves)
        return _Clocks(ready, free, left, port)
