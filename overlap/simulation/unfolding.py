"""Messages of a collective, with the time of each alone and the messages that it waits for. Pure; no Trio.

These are the figures of `cost.maxplus`, rank by rank and wire by wire, for collectives that share scarce resources:
where one message is held up, only the messages that need its data wait for it. Taken as a whole, all-reduces of 16
MiB in groups of four beside data parallel ones, on 64 ranks of two trn1.32xlarge, would be 18 % too fast; of 256 KiB on
two p4d.24xlarge 21 % too fast, and on all 16 beside groups of two 23 % too slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ..collectives.placement import Ints
from ..cost.option import PricedPhase
from ..cost.placed import PlacedRound
from .flow import Section, quantised
from .loads import Resources

MOST_MESSAGES = 512
"""Collectives of more messages proceed as a whole: their messages would take longer than the rest of a simulation."""

STARTED, LEFT, ARRIVED = range(3)
"""Events of a message: its sender is free again, it has left, it has arrived."""

_NOTHING = np.zeros(0, np.int64), np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """A message of a step."""

    # position of the sender, plus the number of ranks for each further lane: lanes do not wait for each other.
    src: int
    dst: int  # position of the receiver, likewise
    port: int  # first wire: messages of a step wait there for those of the steps before
    # its events, of `STARTED`, `LEFT` and `ARRIVED`; without `STARTED` it starts at once.
    becomes: tuple[int, ...]
    marks_ns: tuple[int, ...]  # work at each event
    sections: tuple[Section, ...]  # its needs of resources, and their ends


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStep:
    """One step of all ranks."""

    posts: tuple[tuple[StepMessage, ...], ...]  # (lanes times ranks,) how many messages each rank sends
    awaited: tuple[int, ...]  # (lanes times ranks,) how many messages each rank receives
    local_ns: tuple[int, ...]  # (lanes times ranks,) work of each rank before its first message
    beside_ns: tuple[int, ...]  # (lanes times ranks,) work of each rank beside its messages


Phase: TypeAlias = tuple[MessageStep, ...]


def unfolding(
    parts: Sequence[PricedPhase], nbytes: float, ranks: Ints, resources: Resources
) -> tuple[Phase, ...] | None:
    """Return phases as steps of messages; None if there are too many messages.

    Args:
        parts: The phases, on wires as they are.
        nbytes: Bytes of the whole vector.
        ranks: (size,) World ranks.
        resources: Resources of the cluster.
    """
    rounds = [placed.round for part in parts for placed in part.placed.each]
    messages = sum(each_round.repeat * len(each_round.src) for each_round in rounds)
    if not 0 < messages <= MOST_MESSAGES:
        return None
    return tuple(tuple(_steps(part, nbytes, ranks, resources)) for part in parts)


def _steps(part: PricedPhase, nbytes: float, ranks: Ints, resources: Resources) -> list[MessageStep]:
    slot_bytes = part.share * nbytes / part.placed.rounds.slots
    steps: list[MessageStep] = []
    for placed, times, hidden in part.placed.runs():
        steps += [_step(part, placed, slot_bytes, ranks, resources, hidden=hidden)] * times
    return steps


def _step(
    part: PricedPhase, placed: PlacedRound, slot_bytes: float, ranks: Ints, resources: Resources, *, hidden: bool
) -> MessageStep:
    size, lanes, messages = len(ranks), part.placed.lanes, len(placed.round.src)
    apart = size * (np.zeros(messages, np.int64) if placed.round.lane is None else placed.round.lane)
    memory_s, memory = _memory(part, placed, slot_bytes, ranks, resources)
    cores, core = resources.cluster.cc_cores_per_rank, resources.cc_cores(ranks).tolist()
    sends = np.bincount(placed.round.src, minlength=size).tolist()
    reducing_s = (placed.reducing_s_per_byte * slot_bytes).tolist()
    parameters = part.placed.parameters
    overlaps = parameters.reduction_overlaps or hidden
    delays_s = placed.delays_s(slot_bytes, parameters.chunk_pieces if hidden else 1)
    start_s, latency_s = (column.tolist() for column in delays_s)
    ways, first_wires = _on_wires(part, placed, slot_bytes, ranks, resources)
    posts: list[list[StepMessage]] = [[] for _ in range(size * lanes)]
    columns = zip(placed.round.src.tolist(), placed.round.dst.tolist(), apart.tolist(), ways, strict=True)
    for i, (src, dst, lane, busy_s) in enumerate(columns):
        for end in (src, dst) if memory_s else ():  # a memory that both ranks share carries both parts
            busy_s[memory[end]] = busy_s.get(memory[end], 0.0) + memory_s[end]
        takes_s = max(*busy_s.values(), reducing_s[i] if overlaps else 0.0)
        needs = {number: busy / takes_s for number, busy in busy_s.items() if takes_s}
        if cores:  # each operation has placed core, which all messages of a rank share
            needs[core[src]] = 1 / (cores * sends[src])
        late_s = latency_s[i] + (0.0 if overlaps else reducing_s[i])
        posts[src + lane].append(_post(src + lane, dst + lane, first_wires[i], start_s[i], takes_s, late_s, needs))
    local_ns, beside_ns = (
        tuple(np.rint(np.tile(s_per_byte, lanes) * slot_bytes * 1e9).astype(np.int64).tolist())
        for s_per_byte in (placed.local_s_per_byte, placed.beside_s_per_byte)
    )
    return MessageStep(
        posts=tuple(map(tuple, posts)),
        awaited=tuple(np.bincount(placed.round.dst + apart, minlength=size * lanes).tolist()),
        local_ns=local_ns,
        beside_ns=beside_ns,
    )


def _on_wires(
    part: PricedPhase, placed: PlacedRound, slot_bytes: float, ranks: Ints, resources: Resources
) -> tuple[list[dict[int, float]], list[int]]:
    """Return the time that each message alone needs each wire and way out of a block, and its first wire."""
    way, wires = part.placed.placement.routes(placed.round.src, placed.round.dst), part.placed.placement.wires()
    rate = wires.bytes_per_s * part.placed.parameters.efficiencies(wires.kind)
    longest_s = placed.wire_s_per_byte * slot_bytes
    slower = np.divide(placed.wire_s(slot_bytes), longest_s, out=np.ones(len(longest_s)), where=longest_s > 0)
    busy_s = np.repeat(placed.round.sent * slot_bytes * slower, np.diff(way.first)) / rate[way.wire]
    numbers, first, each_s = resources.wires(way.wire).tolist(), way.first.tolist(), busy_s.tolist()
    spans = list(pairwise(first))
    ways = [dict(zip(numbers[a:b], each_s[a:b], strict=True)) for a, b in spans]
    for out, bytes_per_s in resources.ways_out(ranks[placed.round.src], ranks[placed.round.dst]):
        for message in np.flatnonzero(out >= 0).tolist():
            ways[message][int(out[message])] = float(placed.round.sent[message]) * slot_bytes / bytes_per_s
    return ways, [numbers[a] for a, _ in spans]


def _memory(
    part: PricedPhase, placed: PlacedRound, slot_bytes: float, ranks: Ints, resources: Resources
) -> tuple[list[float], list[int]]:
    """Return (ranks,) the time that a message needs a rank's memory, empty if not known, and the memory's number.

    Messages to and from a memory take equal parts of the step's need of it.
    """
    rate, memories = part.placed.placement.memory_bytes_per_s, resources.memories(ranks)
    if rate is None:
        return [], []
    which = np.unique(memories, return_inverse=True)[1]
    touched = np.bincount(which, placed.round.moving + placed.round.adding)
    ends = np.bincount(which[np.concatenate([placed.round.src, placed.round.dst])], minlength=len(touched))
    message_s = touched / np.maximum(ends, 1) * slot_bytes / (rate * part.placed.parameters.memory_efficiency)
    return message_s[which].tolist(), memories.tolist()


def _post(
    src: int, dst: int, port: int, start_s: float, takes_s: float, late_s: float, needs: dict[int, float]
) -> StepMessage:
    started_ns, left_ns = round(start_s * 1e9), round((start_s + takes_s) * 1e9)
    arrived_ns = round((start_s + takes_s + late_s) * 1e9)
    sections = []
    if started_ns:
        sections.append(Section.of(started_ns, *_NOTHING))
    if left_ns > started_ns:
        shares = quantised(np.fromiter(needs.values(), np.float64, len(needs)))
        sections.append(Section.of(left_ns, np.fromiter(needs, np.int64, len(needs)), shares))
    if arrived_ns > left_ns or not sections:
        sections.append(Section.of(arrived_ns, *_NOTHING))
    return StepMessage(
        src=src,
        dst=dst,
        port=port,
        becomes=(STARTED, LEFT, ARRIVED) if started_ns else (LEFT, ARRIVED),
        marks_ns=(started_ns, left_ns, arrived_ns) if started_ns else (left_ns, arrived_ns),
        sections=tuple(sections),
    )
