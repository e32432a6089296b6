"""A collective message by message: what each message takes alone, and which others it waits for. Pure; no Trio.

It is what `collectives.cost.maxplus` computes with, rank by rank and wire by wire, laid out for collectives that share
something scarce: where one message is held up, only those wait for it that need what it brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..collectives.cost.option import Part
from ..collectives.cost.placed import PlacedRound
from .flow import Stage, quantised
from .resources import Resources

__all__ = ["ARRIVED", "LEFT", "MOST_MESSAGES", "STARTED", "Phase", "Post", "Step", "unfolding"]

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

MOST_MESSAGES = 256
"""Collectives of more messages are taken to get on as a whole: they would take longer than the rest of a simulation."""

STARTED, LEFT, ARRIVED = range(3)
"""What becomes of a message: its sender is free again, it has left, it is there."""

_NOTHING = np.zeros(0, np.int64), np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A message of a step.

    Attributes:
        src: position of the sender.
        dst: position of the receiver.
        port: the wire on which it leaves: messages of a step wait there for those of the steps before.
        becomes: what becomes of it, of `STARTED`, `LEFT` and `ARRIVED`; it starts at once where that is left out.
        marks_ns: work at which that is so.
        stages: what it needs until when.
    """

    src: int
    dst: int
    port: int
    becomes: tuple[int, ...]
    marks_ns: tuple[int, ...]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all ranks do in a step.

    Attributes:
        posts: (ranks,) messages of each rank.
        awaited: (ranks,) how many come to each.
        local_ns: (ranks,) what each does before its first message.
    """

    posts: tuple[tuple[Post, ...], ...]
    awaited: tuple[int, ...]
    local_ns: tuple[int, ...]


Phase: TypeAlias = tuple[Step, ...]


def unfolding(parts: Sequence[Part], nbytes: float, ranks: Ints, resources: Resources) -> tuple[Phase, ...] | None:
    """Lay out phases that follow one another; None if there are too many messages, or trees beside each other.

    Args:
        parts: The phases, on wires as they are.
        nbytes: Of the whole vector.
        ranks: (size,) World ranks.
        resources: Of the cluster.
    """
    rounds = [one for part in parts for one in part.placed.each]
    messages = sum(one.round.repeat * len(one.round.src) for one in rounds)
    if not 0 < messages <= MOST_MESSAGES or any(part.placed.lanes > 1 for part in parts):
        return None
    return tuple(tuple(_steps(part, nbytes, ranks, resources)) for part in parts)


def _steps(part: Part, nbytes: float, ranks: Ints, resources: Resources) -> list[Step]:
    slot_bytes = part.share * nbytes / part.placed.rounds.slots
    found: list[Step] = []
    for one in part.placed.each:
        step = _step(part, one, slot_bytes, ranks, resources)
        found += [step] * one.round.repeat
    return found


def _step(part: Part, one: PlacedRound, slot_bytes: float, ranks: Ints, resources: Resources) -> Step:
    size = len(ranks)
    posts: list[list[Post]] = [[] for _ in range(size)]
    memory_s, memories = _memory(part, one, slot_bytes, ranks, resources)
    way, wires = part.placed.placement.routes(one.round.src, one.round.dst), part.placed.placement.wires()
    rate = wires.bytes_per_s * part.placed.parameters.efficiencies(wires.kind)
    slower = _ratio(one.wire_s(slot_bytes), one.wire_s_per_byte * slot_bytes)
    overlaps = part.placed.parameters.reduction_overlaps
    cores, sends = resources.cluster.cc_cores_per_rank, np.bincount(one.round.src, minlength=size)
    for i, (src, dst) in enumerate(zip(one.round.src.tolist(), one.round.dst.tolist(), strict=True)):
        crossed = way.wire[way.first[i] : way.first[i + 1]]
        numbers = np.concatenate([resources.wires(crossed), memories[[src, dst]][: 2 * len(memory_s)]])
        wire_s = one.round.sent[i] * slot_bytes / rate[crossed] * slower[i]
        busy_s = np.concatenate([wire_s, memory_s[[src, dst]] if len(memory_s) else memory_s])
        reducing_s = float(one.reducing_s_per_byte[i]) * slot_bytes
        takes_s = max(float(busy_s.max()), reducing_s if overlaps else 0.0)
        shares = _ratio(busy_s, np.full(len(busy_s), takes_s))
        if cores:  # each operation has one of them, for all messages of a rank at a time
            numbers = np.append(numbers, resources.cc_cores(ranks[[src]]))
            shares = np.append(shares, 1 / (cores * sends[src]))
        late_s = float(one.latency_s[i]) + (0.0 if overlaps else reducing_s)
        posts[src].append(_post(src, dst, int(crossed[0]), float(one.start_s[i]), takes_s, late_s, numbers, shares))
    return Step(
        posts=tuple(map(tuple, posts)),
        awaited=tuple(np.bincount(one.round.dst, minlength=size).tolist()),
        local_ns=tuple(np.rint(one.local_s_per_byte * slot_bytes * 1e9).astype(np.int64).tolist()),
    )


def _memory(part: Part, one: PlacedRound, slot_bytes: float, ranks: Ints, resources: Resources) -> tuple[Floats, Ints]:
    """Return (ranks,) for how long a message keeps a rank's memory busy, nothing if that is not known, and its number.

    Messages that come to a memory or leave it take equal parts of what the step needs of it.
    """
    rate, memories = part.placed.placement.memory_bytes_per_s, resources.memories(ranks)
    if rate is None:
        return np.zeros(0), memories
    which = np.unique(memories, return_inverse=True)[1]
    touched = np.bincount(which, one.round.moving + one.round.adding)
    ends = np.bincount(which[np.concatenate([one.round.src, one.round.dst])], minlength=len(touched))
    each = touched / np.maximum(ends, 1) * slot_bytes / (rate * part.placed.parameters.memory_efficiency)
    return each[which], memories


def _ratio(of: Floats, to: Floats) -> Floats:
    return np.divide(of, to, out=np.ones(len(of)), where=to > 0)


def _post(
    src: int, dst: int, port: int, start_s: float, takes_s: float, late_s: float, numbers: Ints, shares: Floats
) -> Post:
    ends_ns = [round(end_s * 1e9) for end_s in np.cumsum([start_s, takes_s, late_s]).tolist()]
    numbers, which = np.unique(numbers, return_inverse=True)  # a memory that two ranks share is named twice
    needs = numbers, quantised(np.bincount(which, shares))
    stages = [Stage.of(end_ns, *each) for end_ns, each in zip(ends_ns, (_NOTHING, needs, _NOTHING), strict=True)]
    long = [stage for stage, begun_ns in zip(stages, [0, *ends_ns], strict=False) if stage.end_ns > begun_ns]
    at_once = not ends_ns[STARTED]
    return Post(
        src=src,
        dst=dst,
        port=port,
        becomes=(LEFT, ARRIVED) if at_once else (STARTED, LEFT, ARRIVED),
        marks_ns=tuple(ends_ns[at_once:]),
        stages=tuple(long or stages[-1:]),
    )
