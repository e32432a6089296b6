"""Rounds on a machine: the fixed time of each message, and its time for each byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..collectives.placement import Floats, Ints, Placement, Routes, Wires
from .parameters import IDEAL, CostParameters, figures_of_wires
from .processors import processor_work
from .rounds import Round, Rounds


class MessagesByClock:
    """Messages grouped by clock: a number of the rank or wire at which each message starts or ends.

    For the clocks [2, 0, 2], `order` is [1, 0, 2], `first` is [0, 1] and `clock` is [0, 2].

    Args:
        clock: (messages,) Number of each message's clock.

    Attributes:
        order: Indexes of the messages, sorted by clock; messages of one clock keep their order.
        first: For each different clock, the position in `order` of its first message.
        clock: The different clocks, ascending.
        alone: Whether no two messages have the same clock.
    """

    def __init__(self, clock: Ints) -> None:
        self.order: Ints = np.argsort(clock, kind="stable")
        clocks = clock[self.order]
        starts = np.append(True, clocks[1:] != clocks[:-1]) if len(clock) else np.zeros(0, bool)
        self.first: Ints = np.flatnonzero(starts)
        self.clock: Ints = clocks[self.first]
        self.alone: bool = len(self.first) == len(clock)

    def latest_times(self, times: Ints) -> Ints:
        """Return for each clock in `clock` the latest time among its messages; of equal times, the first message's.

        Args:
            times: (messages,) Time of each message; or (messages, columns) the time and its terms, which are returned
                as well.
        """
        time = times[self.order] if times.ndim == 1 else times[self.order, 0]
        latest = time if self.alone else np.maximum.reduceat(time, self.first)
        if times.ndim == 1:
            return latest
        # `number`: for each message in `order`, the index of its clock. Take the first message with the latest time.
        number = np.repeat(np.arange(len(self.first)), np.diff(np.append(self.first, len(self.order))))
        best = np.flatnonzero(time == latest[number])
        return times[self.order[best[np.unique(number[best], return_index=True)[1]]]]


class _SizeCurve(NamedTuple):
    """Efficiency of a kind of wire by the size of a message, as ascending points of a curve."""

    messages: Ints  # indexes of the messages of a round that leave over a wire of this kind
    log_bytes: Floats  # logarithm of the size at each point
    shares: Floats  # share of the bandwidth at each point


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedRound:
    """One round on the machine. All `_s_per_byte` are times for each byte of a slot."""

    round: Round  # the messages and the work of ranks
    latency_s: Floats  # (messages,) latency of the wires of each message
    start_s: Floats  # (messages,) time of the sender to start the step, and to issue its messages in the step
    wire_s_per_byte: Floats  # (messages,) time on the busiest wire of each message
    moving_s_per_byte: Floats  # (messages,) time for copies in the busier one of the two memories
    adding_s_per_byte: Floats  # (messages,) time for reductions in that memory
    reducing_s_per_byte: Floats  # (messages,) time in the reducer of the receiver
    local_s_per_byte: Floats  # (size,) time in a rank's memory and reducer before its first message
    unawaited_s_per_byte: Floats  # (size,) time in a rank's memory that no message waits for
    load_s_per_byte: Floats  # (wires,) time that each wire is busy, in one repetition of the round
    # (cores,) busy time of each processor that ranks share, in one repetition of the round; empty if ranks share none.
    core_s: Floats
    core_s_per_byte: Floats  # (cores,) busy time of each such processor
    hops: dict[str, int]  # by kind: number of wires that the message with the largest latency crosses
    first_wire: Ints  # (messages,) number of the wire by which it leaves its sender, counted among such wires only
    gap_s: Floats  # (messages,) time until the sender can start its next message
    reduce_s: Floats  # (messages,) time to start the reduction of a message
    curves: tuple[_SizeCurve, ...] = ()  # for messages whose efficiency depends on their size

    @cached_property
    def src(self) -> Ints:
        """(messages,) Number of each sender's clock: lane * ranks + rank."""
        return self.round.src + self._lane_offset

    @cached_property
    def dst(self) -> Ints:
        """(messages,) Number of each receiver's clock: lane * ranks + rank."""
        return self.round.dst + self._lane_offset

    @property
    def _lane_offset(self) -> Ints | int:
        return 0 if self.round.lane is None else self.round.lane * len(self.local_s_per_byte)

    # These indexes do not depend on the number of bytes: all prices of the round share them.

    @cached_property
    def by_src(self) -> MessagesByClock:
        """The messages grouped by the clock of the sending rank."""
        return MessagesByClock(self.src)

    @cached_property
    def by_dst(self) -> MessagesByClock:
        """The messages grouped by the clock of the receiving rank."""
        return MessagesByClock(self.dst)

    @cached_property
    def by_first_wire(self) -> MessagesByClock:
        """Messages by the wire on which they leave their sender."""
        return MessagesByClock(self.first_wire)

    @cached_property
    def byte_times_s(self) -> Floats:
        """(3, messages) Times for each byte of a slot.

        The rows are: copies in memory; copies and reductions in memory; the reducer of the receiver.
        """
        return np.stack(
            [self.moving_s_per_byte, self.moving_s_per_byte + self.adding_s_per_byte, self.reducing_s_per_byte]
        )

    def wire_s(self, slot_bytes: float) -> Floats:
        """Return (messages,) the time of each message's bytes on its busiest wire, for slots of `slot_bytes`."""
        alone_s = self.wire_s_per_byte * slot_bytes
        for messages, log_bytes, shares in self.curves:
            slots = self.round.sent[messages] / (1.0 if self.round.count is None else self.round.count[messages])
            share = np.interp(np.log(np.maximum(slots * slot_bytes, 1.0)), log_bytes, shares)
            alone_s[messages] *= shares.max() / share
        return alone_s

    def delays_s(self, slot_bytes: float, pieces: int) -> tuple[Floats, Floats]:
        """Return (messages,) the delay of each message's start, and (messages,) its latency, without the time of bytes.

        A ring that reduces data and passes the sums on does so in pieces: while one piece is on the wire, another one
        is reduced. A step then takes as long as all bytes, or as the delays and one piece if that is longer. Only the
        part of the delays that exceeds the time of the bytes is returned.

        Args:
            slot_bytes: Bytes of a slot.
            pieces: Number of pieces of a message; 1 if the bytes hide no delay, as in the last step.
        """
        if pieces == 1:
            return self.start_s, self.latency_s + self.reduce_s
        wire_s = self.wire_s(slot_bytes)
        memory_s = (self.moving_s_per_byte + self.adding_s_per_byte) * slot_bytes
        local_s = np.maximum(memory_s, self.reducing_s_per_byte * slot_bytes)
        all_bytes_s, piece_s = np.maximum(wire_s, local_s), (wire_s + local_s) / pieces
        delay_s = self.start_s + (pieces - 1) * self.gap_s + self.latency_s
        exposed_s = np.maximum(delay_s + piece_s - all_bytes_s, 0.0)  # delays that the time of the bytes does not hide
        latency_s = np.minimum(self.latency_s, exposed_s)
        return exposed_s - latency_s, latency_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """All rounds of a schedule on a machine."""

    rounds: Rounds  # the schedule
    placement: Placement  # the machine, and where the ranks are on it
    parameters: CostParameters  # parameters of the cost model
    placed_rounds: tuple[PlacedRound, ...]  # one for each round

    @cached_property  # cached, as every step of every price needs it
    def lane_count(self) -> int:
        """Number of lanes: parts of the data that do not wait for each other, such as those of two trees."""
        return 1 + max(
            (int(lane.max(initial=0)) for r in self.rounds.rounds if (lane := r.lane) is not None), default=0
        )

    @cached_property
    def first_wire_count(self) -> int:
        """Number of wires by which messages leave their senders; `PlacedRound.first_wire` counts these."""
        return max((int(placed.first_wire.max(initial=-1)) + 1 for placed in self.placed_rounds), default=0)

    def iterate_rounds(self) -> Iterator[tuple[PlacedRound, int, bool]]:
        """Yield (round, repetitions, whether the following step hides the delays of each), in the order of time.

        The round of a ring may be yielded twice: its last repetition may have no following step that hides its delays.
        """
        in_pieces = self.parameters.chunk_pieces > 1
        for placed, after in zip_longest(self.placed_rounds, self.placed_rounds[1:]):
            # The last repetition can hide its delays only behind the next round, if that passes sums on as well.
            goes_on = after is not None and after.round.passed_on
            hiding = placed.round.repeat - (not goes_on) if in_pieces and placed.round.passed_on else 0
            if hiding:
                yield placed, hiding, True
            if hiding < placed.round.repeat:
                yield placed, placed.round.repeat - hiding, False

    def hops(self) -> dict[str, int]:
        """Return the number of wires of each kind on the longest ways of all steps, added up."""
        total: dict[str, int] = {}
        for placed in self.placed_rounds:
            for kind, count in placed.hops.items():
                total[kind] = total.get(kind, 0) + count * placed.round.repeat
        return total

    def memory_s_per_byte(self) -> float:
        """Return the time that the busiest memory reads and writes, for each byte of the vector; 0.0 if unknown."""
        bytes_per_s = self.placement.memory_bytes_per_s
        if bytes_per_s is None:
            return 0.0
        total = np.zeros(self.placement.size)
        for round_ in self.rounds.rounds:
            total += round_.repeat * round_.memory_accesses
        busiest = float(np.bincount(self.placement.device, total).max(initial=0.0))
        return busiest / (bytes_per_s * self.parameters.memory_efficiency * self.rounds.slots)

    def processor_time_s(self, nbytes: float) -> float:
        """Return the time that shared processors need for `nbytes`: the busiest one's in each step, added up."""
        slot_bytes = nbytes / self.rounds.slots
        times_s = (placed.core_s + placed.core_s_per_byte * slot_bytes for placed in self.placed_rounds)
        busiest_s = (core_s.max(initial=0.0) for core_s in times_s)
        return float(sum(placed.round.repeat * s for placed, s in zip(self.placed_rounds, busiest_s, strict=True)))

    def busiest_s_per_byte(self) -> float:
        """Return the time that the busiest wire carries bytes, for each byte of the vector; 0 without messages."""
        return float(self._wire_loads_s().max(initial=0.0)) / self.rounds.slots

    def least_delay_s(self) -> float:
        """Return the smallest sum of start and latency of any message, without the time of its bytes; 0 without any."""
        return min((float((r.start_s + r.latency_s).min()) for r in self.placed_rounds if len(r.start_s)), default=0.0)

    def busiest_wire(self) -> int | None:
        """Return the number of the wire that is busy longest; None without messages.

        Of several such wires, it is the first in the order of their ends.
        """
        loads_s = self._wire_loads_s()
        return self.placement.first_in_stable_order(np.flatnonzero(loads_s == loads_s.max())) if loads_s.any() else None

    def busy_s_per_slot(self) -> Floats:
        """Return (resources,) busy times in all rounds, for each byte of a slot: of reducers, memories, then wires."""
        reducing, touched = np.zeros(self.placement.size), np.zeros(self.placement.size)
        for round_ in self.rounds.rounds:
            reducing += round_.repeat * (round_.added + round_.local_added)
            touched += round_.repeat * round_.memory_accesses
        # Ranks of one device share its memory.
        memory = np.bincount(self.placement.device, touched, int(self.placement.device.max(initial=0)) + 1)
        rate = self.placement.memory_bytes_per_s
        memory_s = memory / (rate * self.parameters.memory_efficiency) if rate else 0.0 * memory
        return np.concatenate([reducing * self.parameters.reduction_s_per_byte, memory_s, self._wire_loads_s()])

    def _wire_loads_s(self) -> Floats:
        """Return (wires,) the time that each wire is busy in all rounds, for each byte of a slot."""
        size = max((len(placed.load_s_per_byte) for placed in self.placed_rounds), default=0)
        total = np.zeros(size)
        for placed in self.placed_rounds:
            total[: len(placed.load_s_per_byte)] += placed.round.repeat * placed.load_s_per_byte
        return total


def place_rounds(
    placement: Placement, rounds: Rounds, *, parameters: CostParameters = IDEAL, contention: bool = True
) -> Placed:
    """Return the rounds of a group with the times of their messages on a machine.

    Args:
        placement: Where the ranks of the group are.
        rounds: Rounds of the group.
        parameters: Overheads and efficiencies.
        contention: Whether messages of a round share wires, and memories take time; otherwise each message has its
            wires alone.

    Raises:
        TopologyError: No wire joins two ranks that exchange a message.
    """
    routes = [placement.routes(round_.src, round_.dst, round_.far) for round_ in rounds.rounds]
    wires = placement.wires()
    rate = wires.bytes_per_s * parameters.efficiencies(wires.kind)
    first_wires = [way.wire[way.first[:-1]] for way in routes]
    used = np.zeros(len(rate), np.bool_)
    for wire in first_wires:
        used[wire] = True
    # Number only the wires by which messages leave a sender: each of them needs a clock.
    number = np.cumsum(used) - 1
    placed_rounds = tuple(
        _place_round(round_, way, number[wire], wires, rate, placement, parameters, contention)
        for round_, way, wire in zip(rounds.rounds, routes, first_wires, strict=True)
    )
    return Placed(rounds=rounds, placement=placement, parameters=parameters, placed_rounds=placed_rounds)


def _place_round(
    round_: Round,
    routes: Routes,
    first_wire: Ints,
    wires: Wires,
    rate: Floats,
    placement: Placement,
    parameters: CostParameters,
    contention: bool,
) -> PlacedRound:
    """Return a round with its times on the machine: fixed ones, and those for each byte of a slot.

    `rate` has the bytes that each wire carries in a second; for `first_wire` see `PlacedRound`.
    """
    # Message m crosses the wires routes.wire[start[m] : stop[m]].
    start, stop = routes.first[:-1], routes.first[1:]
    # Kinds of the wires by which each message leaves its sender, and by which it reaches its receiver.
    outward, inward = wires.kind[routes.wire[start]], wires.kind[routes.wire[stop - 1]]
    sent = np.repeat(round_.sent, stop - start)  # slots of the message, for each wire that it crosses
    load = np.bincount(routes.wire, sent, len(rate)) / rate
    wire_s_per_byte = load[routes.wire] if contention else sent / rate[routes.wire]
    others = np.bincount(round_.dst, round_.count)[round_.dst] - 1  # number of further messages to the same receiver
    latency_s = _message_latencies_s(wires.latency_s[routes.wire], start, parameters)
    latency_s += others * figures_of_wires(parameters.incast_s, inward)
    # The start of a reduction is hidden in the gaps of further messages to the same rank.
    hidden_s = others * figures_of_wires(parameters.gap_s, inward)
    reduce_s = np.maximum(figures_of_wires(parameters.reduce_s, inward) - hidden_s, 0.0)
    memory = partial(_memory_s_per_byte, placement=placement, parameters=parameters, contention=contention)
    moving, adding = memory(round_.moving), memory(round_.adding)
    # A message waits for the busier memory, of its sender or of its receiver.
    busier = np.where((moving + adding)[round_.src] > (moving + adding)[round_.dst], round_.src, round_.dst)
    unawaited = np.zeros(placement.size) if round_.unawaited is None else round_.unawaited
    reducer = parameters.reduction_s_per_byte
    work = processor_work(round_, outward, placement, parameters)
    return PlacedRound(
        round=round_,
        latency_s=latency_s,
        start_s=_send_start_times_s(round_, outward, parameters),
        wire_s_per_byte=_combine_by_message(np.maximum, wire_s_per_byte, start),
        moving_s_per_byte=moving[busier],
        adding_s_per_byte=adding[busier],
        reducing_s_per_byte=round_.added[round_.dst] * reducer,
        local_s_per_byte=np.where(round_.local > 0, memory(round_.local), 0.0) + round_.local_added * reducer,
        unawaited_s_per_byte=np.where(unawaited > 0, memory(unawaited), 0.0),
        load_s_per_byte=load,
        core_s=work.once_s,
        core_s_per_byte=work.s_per_byte,
        hops=_count_longest_hops(latency_s, routes, wires),
        first_wire=first_wire,
        gap_s=figures_of_wires(parameters.gap_s, outward),
        reduce_s=np.where(round_.added[round_.dst] > 0, reduce_s, 0.0),
        curves=tuple(_wire_curves(outward, parameters)),
    )


def _message_latencies_s(wire_latency_s: Floats, start: Ints, parameters: CostParameters) -> Floats:
    """Return (messages,) the latency of each message: that of its slowest wire, and a share of its other wires'.

    The share is `CostParameters.cut_through`: devices on the way forward bytes before a message has arrived as a whole.
    `start` has the index of the first wire of each message.
    """
    slowest = _combine_by_message(np.maximum, wire_latency_s, start)
    return slowest + parameters.cut_through * (_combine_by_message(np.add, wire_latency_s, start) - slowest)


def _wire_curves(outward: NDArray[np.str_], parameters: CostParameters) -> Iterator[_SizeCurve]:
    """Yield the efficiency curves that apply to messages; `outward` is the kind of the first wire of each message."""
    for kind, points in parameters.curves:
        messages = np.flatnonzero(outward == kind)
        if len(messages):
            sizes, shares = np.array(points).T
            yield _SizeCurve(messages, np.log(np.maximum(sizes, 1.0)), shares)


def _combine_by_message(operator: np.ufunc, values: Floats, start: Ints) -> Floats:
    """Return (messages,) the values of each message's wires, combined by `operator`; `start` is its first index."""
    return operator.reduceat(values, start) if len(start) else np.zeros(0)


def _memory_s_per_byte(touched: Floats, placement: Placement, parameters: CostParameters, contention: bool) -> Floats:
    """Return (size,) the time of each rank's memory, for each byte of a slot; zeros if the bandwidth is unknown.

    `touched` has the reads and writes of each rank, in slots. Ranks of one device share its memory.
    """
    if placement.memory_bytes_per_s is None or not contention:
        return np.zeros(placement.size)
    of_device = np.bincount(placement.device, touched)
    return of_device[placement.device] / (placement.memory_bytes_per_s * parameters.memory_efficiency)


def _send_start_times_s(round_: Round, outward: NDArray[np.str_], parameters: CostParameters) -> Floats:
    """Return (messages,) the time of the sender to start each message: its own start, and gaps for its others."""
    gap_s = figures_of_wires(parameters.gap_s, outward)
    total = np.bincount(round_.src, gap_s if round_.count is None else round_.count * gap_s, len(round_.added))
    return figures_of_wires(parameters.start_s, outward) + np.maximum(total[round_.src] - gap_s, 0.0)


def _count_longest_hops(latency_s: Floats, routes: Routes, wires: Wires) -> dict[str, int]:
    """Return by kind the number of wires that the message with the largest latency crosses; {} without messages."""
    if not len(latency_s):
        return {}
    message = int(latency_s.argmax())
    crossed = routes.wire[routes.first[message] : routes.first[message + 1]]
    # Through a switch or the network a message crosses two wires, but one hop: the second wire has no latency.
    kinds, counts = np.unique(wires.kind[crossed[wires.latency_s[crossed] > 0]], return_counts=True)
    return dict(zip(kinds.tolist(), counts.tolist(), strict=True))
