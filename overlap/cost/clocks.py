"""Clocks of all ranks: the time at which each rank finishes, by max-plus arithmetic on integer ticks.

A rank has two clocks: the arrival of its last message, and the time from which it can start another message. Every
wire that leaves a rank has a clock: the time from which the wire is free again. A message starts at the latest of the
three. It keeps its sender busy for the overhead of the step, keeps the wire busy for the overhead and the transfer, and
arrives a latency later. So a rank sends to several others at once if each has a wire of its own. If the data has parts
that do not wait for each other (lanes, such as two trees in parallel), every rank has clocks for each lane. Times are
integers, so sums are exact, and the same on every machine.

If all clocks before a round are later by c, then all clocks after the round are later by c. So as soon as a repetition
of the round moves every clock by the same amount, all further repetitions do, and need not be computed.
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
    """Resolution of clocks: the length of a tick, and how times are rounded to ticks."""

    ticks_per_s: int = 10**12  # ticks in a second
    # "nearest"; or "down", like simulators that cut every message's time to whole ticks.
    rounding: Literal["nearest", "down"] = "nearest"

    def to_ticks(self, duration_s: Floats) -> Ints:
        """Return durations in seconds as whole ticks, rounded."""
        exact = duration_s * self.ticks_per_s
        return (np.rint(exact) if self.rounding == "nearest" else np.floor(exact)).astype(np.int64)


PICOSECONDS = Resolution()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBreakdown:
    """Terms of the time of the last rank to finish, along the chain of messages that it waited for, in seconds."""

    waiting_s: float = 0.0  # until the rank at the start of the chain arrives
    launch_s: float = 0.0  # to start the operation
    start_s: float = 0.0  # to start steps: descriptors, semaphores, and messages issued one after another
    latency_s: float = 0.0  # latency of wires
    wire_s: float = 0.0  # bytes on the busiest wire of each step
    memory_s: float = 0.0  # copies that take longer than the wires
    reduction_s: float = 0.0  # reductions that take longer than wires and copies

    @property
    def total_s(self) -> float:
        """Sum of the terms."""
        return float(sum(getattr(self, share) for share in self.__slots__))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cost:
    """Cost of a collective: when each rank finishes, and the terms of the last rank's time."""

    finish_s: Floats  # (size,) time at which each rank finishes, on the same clock as the arrivals
    breakdown: CostBreakdown | None = None  # terms of the time of the rank that finishes last; None without `explain`

    @property
    def total_s(self) -> float:
        """Time at which the last rank finishes."""
        return float(self.finish_s.max(initial=0.0))


# Columns of a clock with terms: the time, then the terms that add up to it, in the order of `CostBreakdown`.
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
        arrivals_s: (size,) Time at which each rank issues the collective; all at 0 by default.
        resolution: Resolution of the clocks.
        explain: Whether to compute the breakdown.
    """
    size, parameters = placed.placement.size, placed.parameters
    # One clock for each rank of each lane, in ticks; lane after lane.
    arrivals = np.tile(resolution.to_ticks(np.zeros(size) if arrivals_s is None else arrivals_s), placed.lane_count)
    launch = int(resolution.to_ticks(np.array(parameters.launch_s)))
    clocks = _Clocks.initial_clocks(arrivals, launch, placed.first_wire_count, explain=explain)
    # Each step begins with the clocks that the step before has left.
    for placed_round, times, hidden in placed.iterate_rounds():
        step = _TimedStep(
            placed_round, placed, nbytes / placed.rounds.slots, resolution, hidden=hidden, explain=explain
        )
        clocks = clocks.repeat_step(step, times)
    finish = _later_clocks(clocks.ready, clocks.left)
    per_s = resolution.ticks_per_s
    finish_s = _times_of(finish).reshape(placed.lane_count, -1).max(axis=0) / per_s
    if not explain:
        return Cost(finish_s=finish_s)
    terms_s = (finish[_times_of(finish).argmax(), _WAITING:] / per_s).tolist()
    return Cost(finish_s=finish_s, breakdown=CostBreakdown(**dict(zip(CostBreakdown.__slots__, terms_s, strict=True))))


class _TimedStep:
    """A placed round with its durations for one number of bytes, in ticks.

    A message keeps its sender busy for `start` before its bytes move, and its sender and wire for `busy` in all. The
    message arrives `latency` after that.

    Attributes:
        src, dst, first_wire: (messages,) Numbers of the clocks of the sender, of the receiver, and of the wire by which
            the message leaves.
        by_src, by_dst, by_first_wire: Messages grouped by these clocks.
        start: (messages,) Delay before the bytes of the message move.
        busy: (messages,) or (messages, columns) `start`, plus the longest of three times of the bytes, which overlap:
            on the wire, in memory, in the reducer. With columns: the time and its terms, as in a clock.
        latency: (messages,) Time from the end of the transfer to the arrival.
        serial: (messages,) Time of the reduction after the arrival, where it cannot overlap; None: it overlaps, or
            nothing is reduced.
        local: (clocks,) Time of each rank's work before its first message; None: no rank has any.
        unawaited: (clocks,) Time of each rank's copies that no message waits for; None: no rank has any.

    Args:
        placed_round: The round, on the wires of a cluster.
        placed: The schedule of the round.
        slot_bytes: Bytes of a slot.
        resolution: Length of a tick.
        hidden: Whether the next step hides the delays of this step, as in a ring that passes sums on in pieces.
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
        parameters, tick = placed.parameters, resolution.to_ticks
        self.src, self.dst, self.first_wire = placed_round.src, placed_round.dst, placed_round.first_wire
        self.by_src, self.by_dst = placed_round.by_src, placed_round.by_dst
        self.by_first_wire = placed_round.by_first_wire
        start_s, latency_s = placed_round.delays_s(slot_bytes, parameters.chunk_pieces if hidden else 1)
        self.start, self.latency = tick(start_s), tick(latency_s)
        wire = tick(placed_round.wire_s(slot_bytes))
        copying, in_memory, reducing = tick(placed_round.byte_times_s * slot_bytes)
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
        self.local = _repeat_for_lanes(tick(placed_round.local_s_per_byte * slot_bytes), placed.lane_count)
        self.unawaited = _repeat_for_lanes(tick(placed_round.unawaited_s_per_byte * slot_bytes), placed.lane_count)


def _repeat_for_lanes(duration: Ints, lanes: int) -> Ints | None:
    """Return durations by rank, repeated for each lane; None if all are 0."""
    return np.tile(duration, lanes) if duration.any() else None


def _times_of(clocks: Ints) -> Ints:
    """Return the times of clocks. Clocks are an array of times, or of rows with a time and its terms."""
    return clocks if clocks.ndim == 1 else clocks[:, _TIME]


def _later_clocks(clocks: Ints, others: Ints) -> Ints:
    """Return the later clock of each pair, with its terms if clocks have terms; of equal clocks, that of `clocks`."""
    return (
        np.maximum(clocks, others)
        if clocks.ndim == 1
        else _select_clocks(_times_of(others) > _times_of(clocks), others, clocks)
    )


def _select_clocks(condition: NDArray[np.bool_], clocks: Ints, others: Ints) -> Ints:
    """Return `clocks` where `condition` holds, else `others`, with terms if clocks have terms."""
    return np.where(condition if clocks.ndim == 1 else condition[:, None], clocks, others)


def _advance_clocks(clocks: Ints, duration: Ints, term: int) -> Ints:
    """Return clocks moved on by `duration` ticks, which are added to the column `term`, too, if clocks have terms."""
    if clocks.ndim == 1:
        return clocks + duration
    moved = clocks.copy()
    moved[:, _TIME] += duration
    moved[:, term] += duration
    return moved


@dataclass(frozen=True, slots=True, eq=False)
class _Clocks:
    """The clocks of every rank of every lane, and of every wire that leaves a rank.

    A clock is a time in ticks; or, to explain a cost, a row with the time and its terms.
    """

    ready: Ints  # by rank: all messages to the rank have arrived
    free: Ints  # by rank: the rank has started its last message, and can start another one
    left: Ints  # by rank: its last message has left, and its copies in parallel with messages have ended
    wire: Ints  # by wire: the last message on the wire has left, so that the wire is free

    @classmethod
    def initial_clocks(cls, arrivals: Ints, launch: int, wires: int, *, explain: bool) -> _Clocks:
        """Return the clocks at the start of the first step.

        Args:
            arrivals: (ranks,) When each rank arrives, in ticks.
            launch: Ticks from the arrival of a rank to its first step.
            wires: Number of wires that leave ranks.
            explain: Whether terms are computed as well.
        """
        if not explain:
            begin = arrivals + launch
            return cls(begin, begin, begin, np.zeros(wires, np.int64))
        columns = 1 + len(CostBreakdown.__slots__)
        begin = np.zeros((len(arrivals), columns), np.int64)
        begin[:, _TIME], begin[:, _WAITING], begin[:, _LAUNCH] = arrivals + launch, arrivals, launch
        return cls(begin, begin, begin, np.zeros((wires, columns), np.int64))

    def repeat_step(self, step: _TimedStep, repeat: int) -> _Clocks:
        """Return the clocks after `repeat` equal steps; once all clocks move equally, the rest is computed at once."""
        clocks = self
        for done in range(1, repeat + 1):
            before, clocks = clocks, clocks._run_step(step)
            # To look for the steady state takes as long as a step, so look after 1, 2, 4, 8, ... steps only:
            # `done` is a power of two if `done & (done - 1)` is 0.
            if done < repeat and not done & (done - 1) and clocks._has_moved_equally(before, step):
                return clocks._extrapolate_steps(before, repeat - done)
        return clocks

    def _has_moved_equally(self, before: _Clocks, step: _TimedStep) -> bool:
        """Return whether all clocks have moved by the same time since `before`; then all further steps do so too."""
        pairs = ((self.ready, before.ready), (self.free, before.free), (self.left, before.left))
        # Clocks of wires that the step does not use never move, and do not count.
        wires = (_times_of(self.wire) - _times_of(before.wire))[step.first_wire]
        moved = [*(_times_of(now) - _times_of(then) for now, then in pairs), wires]
        return all(bool((moves == moved[0][0]).all()) for moves in moved)  # as that of the first rank

    def _extrapolate_steps(self, before: _Clocks, times: int) -> _Clocks:
        """Return the clocks after `times` more steps, if each step moves them by their difference to `before`."""
        pairs = ((getattr(self, name), getattr(before, name)) for name in _Clocks.__slots__)
        return _Clocks(*(now + times * (now - then) for now, then in pairs))

    def _run_step(self, step: _TimedStep) -> _Clocks:
        """Return the clocks after a step: first the work of each rank in its own memory, then the messages."""
        clocks = self._run_local_work(step)
        return clocks._run_messages(step) if len(step.src) else clocks

    def _run_local_work(self, step: _TimedStep) -> _Clocks:
        """Return the clocks after the local work of a step. Clocks of ranks without local work stay."""
        ready, left = self.ready, self.left
        if step.local is not None:  # a rank's local work begins when its messages have arrived and left
            ready = _advance_clocks(
                _select_clocks(step.local > 0, _later_clocks(ready, left), ready), step.local, _MEMORY
            )
        if step.unawaited is not None:  # no message waits for these copies: the ranks only finish later
            left = _select_clocks(
                step.unawaited > 0, _later_clocks(left, _advance_clocks(ready, step.unawaited, _MEMORY)), left
            )
        return _Clocks(ready, self.free, left, self.wire)

    def _run_messages(self, step: _TimedStep) -> _Clocks:
        """Return the clocks after the messages of a step, which start when sender and wire are ready and free."""
        ready, free, left, wire = self.ready, self.free, self.left, self.wire
        # (messages,) each: when the message starts, has been issued, has left its sender, and arrives.
        starts = _later_clocks(_later_clocks(ready, free)[step.src], wire[step.first_wire])
        # If clocks have columns of terms, `busy` has the same columns: `+` adds all of them.
        issued, leaves = _advance_clocks(starts, step.start, _START), starts + step.busy
        arrives = _advance_clocks(leaves, step.latency, _LATENCY)
        if step.serial is not None:
            arrives = _advance_clocks(_later_clocks(ready[step.dst], arrives), step.serial, _REDUCTION)
        ready, free, left, wire = ready.copy(), free.copy(), left.copy(), wire.copy()
        ready[step.by_dst.clock] = _later_clocks(ready[step.by_dst.clock], step.by_dst.latest_times(arrives))
        free[step.by_src.clock] = step.by_src.latest_times(issued)
        left[step.by_src.clock] = _later_clocks(left[step.by_src.clock], step.by_src.latest_times(leaves))
        wire[step.by_first_wire.clock] = step.by_first_wire.latest_times(leaves)
        return _Clocks(ready, free, left, wire)
