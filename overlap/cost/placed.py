"""Rounds on a machine: the fixed time of each message, and its time for each byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from ..collectives.placement import Floats, Ints, Placement, Routes, Wires
from .parameters import IDEAL, CostParameters, by_kind
from .processors import processor_work
from .rounds import Round, Rounds


class Ends:
    """Messages sorted by the clock that they start from or end at."""

    def __init__(self, clock: Ints) -> None:
        self.order: Ints = np.argsort(clock, kind="stable")
        # Positions sorted by clock; `first` has the start of each run of equal clocks.
        clocks = clock[self.order]
        starts = np.append(True, clocks[1:] != clocks[:-1]) if len(clock) else np.zeros(0, bool)
        self.first: Ints = np.flatnonzero(starts)
        self.clock: Ints = clocks[self.first]
        self.alone: bool = len(self.first) == len(clock)

    def latest(self, times: Ints) -> Ints:
        """Return the latest time at each clock in `clock`; of several equal ones, that of the first message.

        Args:
            times: (messages,) or (messages, columns) Time of each message; with columns, the time and its terms.
        """
        time = times[self.order] if times.ndim == 1 else times[self.order, 0]
        latest = time if self.alone else np.maximum.reduceat(time, self.first)
        if times.ndim == 1:
            return latest
        # Per message, sorted by clock: the number of its clock. The first message with the latest time wins.
        number = np.repeat(np.arange(len(self.first)), np.diff(np.append(self.first, len(self.order))))
        best = np.flatnonzero(time == latest[number])
        return times[self.order[best[np.unique(number[best], return_index=True)[1]]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedRound:
    """One round on the machine. Times for each slot are to be multiplied by the bytes of a slot."""

    round: Round  # the messages
    latency_s: Floats  # (messages,) latency of the wires of each message
    start_s: Floats  # (messages,) to start a step on the sender, and to issue all its messages
    wire_s_per_byte: Floats  # (messages,) time on the busiest wire of each message, for each byte of a slot
    moving_s_per_byte: Floats  # (messages,) time for copies in the busier one of the two memories
    adding_s_per_byte: Floats  # (messages,) time for reductions in that memory
    reducing_s_per_byte: Floats  # (messages,) time in the reducer of the receiver
    local_s_per_byte: Floats  # (size,) time in a rank's memory and reducer before its first message
    unawaited_s_per_byte: Floats  # (size,) time in a rank's memory that no message waits for
    load_s_per_byte: Floats  # (wires,) time on each wire, for one pass of the whole round
    # (cores,) time of each processor that ranks share, for one pass of the whole round; empty if ranks share none.
    core_s: Floats
    core_s_per_byte: Floats  # (cores,) time of each such processor for each byte of a slot
    hops: dict[str, int]  # wires crossed by the message with the longest way, by kind
    port: Ints  # (messages,) number of the wire by which each leaves its sender, among all wires of the schedule
    gap_s: Floats  # (messages,) time until the sender can start its next message
    reduce_s: Floats  # (messages,) time to start the reduction of a message
    # messages whose share of their wires depends on their size, with the curve of that share as (bytes, share).
    curves: tuple[tuple[Ints, Floats, Floats], ...] = ()

    @cached_property
    def src(self) -> Ints:
        """(messages,) The clock of each sender: each lane has a clock for every rank."""
        return self.round.src + self._lane_offset

    @cached_property
    def dst(self) -> Ints:
        """(messages,) The clock of each receiver."""
        return self.round.dst + self._lane_offset

    @property
    def _lane_offset(self) -> Ints | int:
        return 0 if self.round.lane is None else self.round.lane * len(self.local_s_per_byte)

    # Every price of the round uses these indices, whatever its bytes.

    @cached_property
    def by_src(self) -> Ends:
        """Messages by the clock of their sender."""
        return Ends(self.src)

    @cached_property
    def by_dst(self) -> Ends:
        """Messages by the clock of their receiver."""
        return Ends(self.dst)

    @cached_property
    def by_port(self) -> Ends:
        """Messages by the wire on which they leave their sender."""
        return Ends(self.port)

    @cached_property
    def of_bytes(self) -> Floats:
        """(3, messages) Times for each byte of a slot: copies; copies and reductions in memory; the reducer."""
        return np.stack(
            [self.moving_s_per_byte, self.moving_s_per_byte + self.adding_s_per_byte, self.reducing_s_per_byte]
        )

    def wire_s(self, slot_bytes: float) -> Floats:
        """Return (messages,) the time of each message's bytes on its busiest wire."""
        alone_s = self.wire_s_per_byte * slot_bytes
        for messages, sizes, shares in self.curves:
            length = self.round.sent[messages] / (1.0 if self.round.count is None else self.round.count[messages])
            share = np.interp(np.log(np.maximum(length * slot_bytes, 1.0)), sizes, shares)
            alone_s[messages] *= shares.max() / share
        return alone_s

    def delays_s(self, slot_bytes: float, pieces: int) -> tuple[Floats, Floats]:
        """Return two arrays, a value a message: the delay of its start and its latency, without the time of its bytes.

        Pieces that a ring reduces and passes on take as long as all their bytes, or as the delays and one piece: while
        one piece is on the wire another one is reduced. The last step has nothing to hide behind.

        Args:
            slot_bytes: Bytes of a slot.
            pieces: Number of pieces that are passed on; 1 if nothing hides.
        """
        if pieces == 1:
            return self.start_s, self.latency_s + self.reduce_s
        wire_s = self.wire_s(slot_bytes)
        memory_s = (self.moving_s_per_byte + self.adding_s_per_byte) * slot_bytes
        local_s = np.maximum(memory_s, self.reducing_s_per_byte * slot_bytes)
        all_bytes_s, piece_s = np.maximum(wire_s, local_s), (wire_s + local_s) / pieces
        delay_s = self.start_s + (pieces - 1) * self.gap_s + self.latency_s
        exposed_s = np.maximum(delay_s + piece_s - all_bytes_s, 0.0)  # what the bytes do not hide
        latency_s = np.minimum(self.latency_s, exposed_s)
        return exposed_s - latency_s, latency_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """All rounds of a schedule on a machine."""

    rounds: Rounds  # the schedule
    placement: Placement  # the machine, and where the ranks are on it
    parameters: CostParameters  # parameters of the cost model
    placed_rounds: tuple[PlacedRound, ...]  # one for each round

    @cached_property  # every step of every price asks
    def lanes(self) -> int:
        """Number of parts of the data that do not wait for each other."""
        return 1 + max(
            (int(lane.max(initial=0)) for r in self.rounds.rounds if (lane := r.lane) is not None), default=0
        )

    @cached_property
    def ports(self) -> int:
        """Number of wires on which messages leave their senders."""
        return max((int(placed.port.max(initial=-1)) + 1 for placed in self.placed_rounds), default=0)

    def runs(self) -> Iterator[tuple[PlacedRound, int, bool]]:
        """Yield each round, its number of repetitions, and whether the next step hides the delays of these."""
        in_pieces = self.parameters.chunk_pieces > 1
        for placed, after in zip_longest(self.placed_rounds, self.placed_rounds[1:]):
            goes_on = after is not None and after.round.passed_on
            hiding = placed.round.repeat - (not goes_on) if in_pieces and placed.round.passed_on else 0
            if hiding:
                yield placed, hiding, True
            if hiding < placed.round.repeat:
                yield placed, placed.round.repeat - hiding, False

    def hops(self) -> dict[str, int]:
        """Count the wires on the longest way of every step, by kind: the steps wait for them one by one."""
        total: dict[str, int] = {}
        for placed in self.placed_rounds:
            for kind, count in placed.hops.items():
                total[kind] = total.get(kind, 0) + count * placed.round.repeat
        return total

    def memory_s_per_byte(self) -> float:
        """Return the time that the busiest memory reads and writes, for each byte of the vector; 0 if not known."""
        bytes_per_s = self.placement.memory_bytes_per_s
        if bytes_per_s is None:
            return 0.0
        total = np.zeros(self.placement.size)
        for round_ in self.rounds.rounds:
            total += round_.repeat * round_.touched
        busiest = float(np.bincount(self.placement.device, total).max(initial=0.0))
        return busiest / (bytes_per_s * self.parameters.memory_efficiency * self.rounds.slots)

    def processors_s(self, nbytes: float) -> float:
        """Return the time that shared processors are busy with `nbytes`: in each step the busiest one counts."""
        slot_bytes = nbytes / self.rounds.slots
        times_s = (placed.core_s + placed.core_s_per_byte * slot_bytes for placed in self.placed_rounds)
        busiest_s = (core_s.max(initial=0.0) for core_s in times_s)
        return float(sum(placed.round.repeat * s for placed, s in zip(self.placed_rounds, busiest_s, strict=True)))

    def busiest_s_per_byte(self) -> float:
        """Return the time that the busiest wire carries bytes, for each byte of the vector; 0 without messages."""
        return float(self._loads_s().max(initial=0.0)) / self.rounds.slots

    def least_delay_s(self) -> float:
        """Return the least time before any message has arrived, besides its bytes: one start and one latency."""
        return min((float((r.start_s + r.latency_s).min()) for r in self.placed_rounds if len(r.start_s)), default=0.0)

    def busiest_wire(self) -> int | None:
        """Return the wire that is busy longest, of several the first by its ends; None without messages."""
        loads_s = self._loads_s()
        return self.placement.first_by_ends(np.flatnonzero(loads_s == loads_s.max())) if loads_s.any() else None

    def busy_s_per_slot(self) -> Floats:
        """Return the busy time of everything for a slot's bytes in all rounds: reducers, memories, then wires."""
        reducing, touched = np.zeros(self.placement.size), np.zeros(self.placement.size)
        for round_ in self.rounds.rounds:
            reducing += round_.repeat * (round_.added + round_.local_added)
            touched += round_.repeat * round_.touched
        # Ranks of one device share its memory.
        memory = np.bincount(self.placement.device, touched, int(self.placement.device.max(initial=0)) + 1)
        rate = self.placement.memory_bytes_per_s
        memory_s = memory / (rate * self.parameters.memory_efficiency) if rate else 0.0 * memory
        return np.concatenate([reducing * self.parameters.reduction_s_per_byte, memory_s, self._loads_s()])

    def _loads_s(self) -> Floats:
        """Return the time that each wire carries a slot's bytes in all rounds."""
        size = max((len(placed.load_s_per_byte) for placed in self.placed_rounds), default=0)
        total = np.zeros(size)
        for placed in self.placed_rounds:
            total[: len(placed.load_s_per_byte)] += placed.round.repeat * placed.load_s_per_byte
        return total


def on(placement: Placement, rounds: Rounds, *, parameters: CostParameters = IDEAL, contention: bool = True) -> Placed:
    """Put rounds on a machine.

    Args:
        placement: Placement of the group.
        rounds: Rounds of the group.
        parameters: Overheads and efficiencies.
        contention: Whether messages of a round share wires and memories; otherwise each has them alone.

    Raises:
        TopologyError: If no wire joins two ranks that exchange a message.
    """
    routes = [placement.routes(round_.src, round_.dst, round_.far) for round_ in rounds.rounds]
    wires = placement.wires()
    rate = wires.bytes_per_s * parameters.efficiencies(wires.kind)
    first_wires = [way.wire[way.first[:-1]] for way in routes]
    used = np.zeros(len(rate), np.bool_)
    for wire in first_wires:
        used[wire] = True
    port = np.cumsum(used) - 1
    placed_rounds = tuple(
        _place_round(round_, way, port[wire], wires, rate, placement, parameters, contention)
        for round_, way, wire in zip(rounds.rounds, routes, first_wires, strict=True)
    )
    return Placed(rounds=rounds, placement=placement, parameters=parameters, placed_rounds=placed_rounds)


def _place_round(
    round_: Round,
    routes: Routes,
    port: Ints,
    wires: Wires,
    rate: Floats,
    placement: Placement,
    parameters: CostParameters,
    contention: bool,
) -> PlacedRound:
    """Put a round on the machine: fixed times of each message, and times per byte of wires, memory and processors."""
    # Columns of routes: the wires of all messages in a row, those of message m from routes.first[m] on.
    hops, start = np.diff(routes.first), routes.first[:-1]
    # Kinds of the wires by which each message leaves its sender, and by which it reaches its receiver.
    outward, inward = wires.kind[routes.wire[start]], wires.kind[routes.wire[routes.first[1:] - 1]]
    sent = np.repeat(round_.sent, hops)
    load = np.bincount(routes.wire, sent, len(rate)) / rate
    wire_s_per_byte = load[routes.wire] if contention else sent / rate[routes.wire]
    others = np.bincount(round_.dst, round_.count)[round_.dst] - 1  # further messages to the same rank
    latency_s = _latencies_s(wires.latency_s[routes.wire], start, parameters)
    latency_s += others * by_kind(parameters.incast_s, inward)
    copied = np.zeros(placement.size) if round_.unawaited is None else round_.unawaited
    touched = round_.moving, round_.adding, round_.local, copied
    moving, adding, local, unawaited = (
        _memory_s_per_byte(amount, placement, parameters, contention) for amount in touched
    )
    # A message waits for the busier one of its two memories.
    busier = np.where((moving + adding)[round_.src] > (moving + adding)[round_.dst], round_.src, round_.dst)
    reducer = parameters.reduction_s_per_byte
    work = processor_work(round_, outward, placement, parameters)
    # The start of a reduction is hidden in the gaps of further messages to the same rank.
    hidden_s = others * by_kind(parameters.gap_s, inward)
    reduce_s = np.maximum(by_kind(parameters.reduce_s, inward) - hidden_s, 0.0)
    return PlacedRound(
        round=round_,
        latency_s=latency_s,
        start_s=_send_starts_s(round_, outward, parameters),
        wire_s_per_byte=_combine_wires(np.maximum, wire_s_per_byte, start),
        moving_s_per_byte=moving[busier],
        adding_s_per_byte=adding[busier],
        reducing_s_per_byte=round_.added[round_.dst] * reducer,
        local_s_per_byte=np.where(round_.local > 0, local, 0.0) + round_.local_added * reducer,
        unawaited_s_per_byte=np.where(copied > 0, unawaited, 0.0),
        load_s_per_byte=load,
        core_s=work.once_s,
        core_s_per_byte=work.s_per_byte,
        hops=_longest_hops(latency_s, routes, wires),
        port=port,
        gap_s=by_kind(parameters.gap_s, outward),
        reduce_s=np.where(round_.added[round_.dst] > 0, reduce_s, 0.0),
        curves=tuple(_wire_curves(outward, parameters)),
    )


def _latencies_s(wire_latency_s: Floats, start: Ints, parameters: CostParameters) -> Floats:
    """Return the latency of each message: the whole of its slowest wire, and the cut-through share of the others.

    Args:
        wire_latency_s: Latency of each wire of all messages, message after message.
        start: (messages,) Index of the first wire of each message.
        parameters: Parameters of the cost model.
    """
    slowest = _combine_wires(np.maximum, wire_latency_s, start)
    return slowest + parameters.cut_through * (_combine_wires(np.add, wire_latency_s, start) - slowest)


def _wire_curves(outward: NDArray[np.str_], parameters: CostParameters) -> Iterator[tuple[Ints, Floats, Floats]]:
    """Yield the messages that leave over each kind with a curve, and the curve's points over log bytes."""
    for kind, points in parameters.curves:
        messages = np.flatnonzero(outward == kind)
        if len(messages):
            sizes, shares = np.array(points).T
            yield messages, np.log(np.maximum(sizes, 1.0)), shares


def _combine_wires(operator: np.ufunc, values: Floats, start: Ints) -> Floats:
    return operator.reduceat(values, start) if len(start) else np.zeros(0)


def _memory_s_per_byte(touched: Floats, placement: Placement, parameters: CostParameters, contention: bool) -> Floats:
    """Return the time that each rank's memory needs, for each byte of a slot."""
    if placement.memory_bytes_per_s is None or not contention:
        return np.zeros(placement.size)
    of_device = np.bincount(placement.device, touched)
    return of_device[placement.device] / (placement.memory_bytes_per_s * parameters.memory_efficiency)


def _send_starts_s(round_: Round, outward: NDArray[np.str_], parameters: CostParameters) -> Floats:
    """Return the time that a sender spends on each message and on issuing its other messages."""
    gap_s = by_kind(parameters.gap_s, outward)
    total = np.bincount(round_.src, gap_s if round_.count is None else round_.count * gap_s, len(round_.added))
    return by_kind(parameters.start_s, outward) + np.maximum(total[round_.src] - gap_s, 0.0)


def _longest_hops(latency_s: Floats, routes: Routes, wires: Wires) -> dict[str, int]:
    """Count by kind the wires of the message with the largest latency; {} in a round without messages."""
    if not len(latency_s):
        return {}
    message = int(latency_s.argmax())
    crossed = routes.wire[routes.first[message] : routes.first[message + 1]]
    # A way through a switch or the network is two wires and one hop: the second half has no latency.
    kinds, counts = np.unique(wires.kind[crossed[wires.latency_s[crossed] > 0]], return_counts=True)
    return dict(zip(kinds.tolist(), counts.tolist(), strict=True))
