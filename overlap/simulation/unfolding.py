"""Messages of a collective: the time of each alone, and the messages that it waits for. Pure; no Trio.

It is what `cost.maxplus` computes with, rank by rank and wire by wire, laid out for collectives that share
something scarce: where one message is held up, only those wait for it that need what it brings. Taken as a
whole, all-reduces of 16 MiB in groups of four beside data parallel ones, on 64 ranks of two trn1.32xlarge, would be
18 % too fast; such of 256 KiB on two p4d.24xlarge 21 % too fast, and on all 16 beside groups of two 23 % too slow.
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
"""Collectives of more messages are taken to get on as a whole: they would take longer than the rest of a simulation."""

STARTED, LEFT, ARRIVED = range(3)
"""Events of a message: its sender is free again, it has left, it has arrived."""

_NOTHING = np.zeros(0, np.int64), np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A message of a step."""

    # position of the sender, and as many more as there are ranks in each further lane: lanes do not wait for each
    # other.
    src: int
    dst: int  # that of the receiver, likewise
    port: int  # the wire on which it leaves: messages of a step wait there for those of the steps before
    # its events, of `STARTED`, `LEFT` and `ARRIVED`; without `STARTED` it starts at once.
    becomes: tuple[int, ...]
    marks_ns: tuple[int, ...]  # work at which that is so
    sections: tuple[Section, ...]  # the resources that it needs, and until when


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of all ranks."""

    posts: tuple[tuple[Post, ...], ...]  # (lanes times ranks,) how many messages each rank sends
    awaited: tuple[int, ...]  # (lanes times ranks,) how many messages each rank receives
    local_ns: tuple[int, ...]  # (lanes times ranks,) work of each rank before its first message
    beside_ns: tuple[int, ...]  # (lanes times ranks,) work of each rank beside its messages


Phase: TypeAlias = tuple[Step, ...]


def unfolding(
    parts: Sequence[PricedPhase], nbytes: float, ranks: Ints, resources: Resources
) -> tuple[Phase, ...] | None:
    """Lay out phases that follow one another; None if there are too many messages.

    Args:
        parts: The phases, on wires as they are.
        nbytes: Of the whole vector.
        ranks: (size,) World ranks.
        resources: Of the cluster.
    """
    rounds = [one for part in parts for one in part.placed.each]
    messages = sum(one.round.repeat * len(one.round.src) for one in rounds)
    if not 0 < messages <= MOST_MESSAGES:
        return None
    return tuple(tuple(_steps(part, nbytes, ranks, resources)) for part in parts)


def _steps(part: PricedPhase, nbytes: float, ranks: Ints, resources: Resources) -> list[Step]:
    slot_bytes = part.share * nbytes / part.placed.rounds.slots
    found: list[Step] = []
    for one, times, hidden in part.placed.runs():
        found += [_step(part, one, slot_bytes, ranks, resources, hidden=hidden)] * times
    return found


def _step(
    part: PricedPhase, one: PlacedRound, slot_bytes: float, ranks: Ints, resources: Resources, *, hidden: bool
) -> Step:
    size, lanes, messages = len(ranks), part.placed.lanes, len(one.round.src)
    apart = size * (np.zeros(messages, np.int64) if one.round.lane is None else one.round.lane)
    memory_s, memory = _memory(part, one, slot_bytes, ranks, resources)
    cores, core = resources.cluster.cc_cores_per_rank, resources.cc_cores(ranks).tolist()
    sends = np.bincount(one.round.src, minlength=size).tolist()
    reducing_s = (one.reducing_s_per_byte * slot_bytes).tolist()
    known = part.placed.parameters
    overlaps = known.reduction_overlaps or hidden
    start_s, latency_s = (each.tolist() for each in one.delays_s(slot_bytes, known.chunk_pieces if hidden else 1))
    ways, first_wires = _on_wires(part, one, slot_bytes, ranks, resources)
    posts: list[list[Post]] = [[] for _ in range(size * lanes)]
    each = zip(one.round.src.tolist(), one.round.dst.tolist(), apart.tolist(), ways, strict=True)
    for i, (src, dst, lane, busy_s) in enumerate(each):
        for end in (src, dst) if memory_s else ():  # a memory that both ranks share carries both parts
            busy_s[memory[end]] = busy_s.get(memory[end], 0.0) + memory_s[end]
        takes_s = max(*busy_s.values(), reducing_s[i] if overlaps else 0.0)
        needs = {number: busy / takes_s for number, busy in busy_s.items() if takes_s}
        if cores:  # each operation has one, which all messages of a rank share
            needs[core[src]] = 1 / (cores * sends[src])
        late_s = latency_s[i] + (0.0 if overlaps else reducing_s[i])
        posts[src + lane].append(_post(src + lane, dst + lane, first_wires[i], start_s[i], takes_s, late_s, needs))
    local_ns, beside_ns = (
        tuple(np.rint(np.tile(each, lanes) * slot_bytes * 1e9).astype(np.int64).tolist())
        for each in (one.local_s_per_byte, one.beside_s_per_byte)
    )
    return Step(
        posts=tuple(map(tuple, posts)),
        awaited=tuple(np.bincount(one.round.dst + apart, minlength=size * lanes).tolist()),
        local_ns=local_ns,
        beside_ns=beside_ns,
    )


def _on_wires(
    part: PricedPhase, one: PlacedRound, slot_bytes: float, ranks: Ints, resources: Resources
) -> tuple[list[dict[int, float]], list[int]]:
    """Return for how long each message alone keeps each wire and way out of a block busy, and the wire it leaves on."""
    way, wires = part.placed.placement.routes(one.round.src, one.round.dst), part.placed.placement.wires()
    rate = wires.bytes_per_s * part.placed.parameters.efficiencies(wires.kind)
    longest_s = one.wire_s_per_byte * slot_bytes
    slower = np.divide(one.wire_s(slot_bytes), longest_s, out=np.ones(len(longest_s)), where=longest_s > 0)
    busy_s = np.repeat(one.round.sent * slot_bytes * slower, np.diff(way.first)) / rate[way.wire]
    numbers, first, each_s = resources.wires(way.wire).tolist(), way.first.tolist(), busy_s.tolist()
    spans = list(pairwise(first))
    ways = [dict(zip(numbers[a:b], each_s[a:b], strict=True)) for a, b in spans]
    for out, bytes_per_s in resources.ways_out(ranks[one.round.src], ranks[one.round.dst]):
        for message in np.flatnonzero(out >= 0).tolist():
            ways[message][int(out[message])] = float(one.round.sent[message]) * slot_bytes / bytes_per_s
    return ways, [numbers[a] for a, _ in spans]


def _memory(
    part: PricedPhase, one: PlacedRound, slot_bytes: float, ranks: Ints, resources: Resources
) -> tuple[list[float], list[int]]:
    """Return (ranks,) for how long a message keeps a rank's memory busy, nothing if that is not known, and its number.

    Messages that come to a memory or leave it take equal parts of what the step needs of it.
    """
    rate, memories = part.placed.placement.memory_bytes_per_s, resources.memories(ranks)
    if rate is None:
        return [], []
    which = np.unique(memories, return_inverse=True)[1]
    touched = np.bincount(which, one.round.moving + one.round.adding)
    ends = np.bincount(which[np.concatenate([one.round.src, one.round.dst])], minlength=len(touched))
    each_s = touched / np.maximum(ends, 1) * slot_bytes / (rate * part.placed.parameters.memory_efficiency)
    return each_s[which].tolist(), memories.tolist()


def _post(
    src: int, dst: int, port: int, start_s: float, takes_s: float, late_s: float, needs: dict[int, float]
) -> Post:
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
    return Post(
        src=src,
        dst=dst,
        port=port,
        becomes=(STARTED, LEFT, ARRIVED) if started_ns else (LEFT, ARRIVED),
        marks_ns=(started_ns, left_ns, arrived_ns) if started_ns else (left_ns, arrived_ns),
        sections=tuple(sections),
    )
