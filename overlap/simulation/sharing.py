"""Fair rates of flows that share scarce resources. Pure; no Trio.

The most urgent flows come first, and of each lane the oldest; less urgent and younger ones get what these leave, as
they do where messages queue for a wire. Equals share by message, as messages on wires do: on a full resource all
messages get the same, so that a flow with seven of them there gets seven times what a flow with one gets, and none more
than it needs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import TypeAlias

import numpy as np

from ..collectives.placement import Floats, Ints
from .flow import Flow, Section

_User: TypeAlias = tuple[int, float, float]  # flow, its share of a resource, and the messages that share the resource

# Resources and levels that differ by less bind together: sums of a few products of doubles.
_ALIKE = 1 + 1e-12
# What is left of a resource when such sums have used it up.
_NOTHING = 1e-12
# Flows times resources up to which plain Python is faster than numpy: four flows on four resources take 9 us, not 35.
_FEW = 200


# Crowds whose rates are remembered: the microbatches of a step make the same ones again and again.
_REMEMBERED = 1 << 12


class Rates:
    """Rates of crowds, found once for flows in the same sections.

    What a crowd's flows need says which resources are scarce, so that their sections, their limits and their turns are
    all that rates depend on.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[list[float], list[Section]]] = {}

    def of(self, flows: Sequence[Flow], scarce: Collection[int] | Ints) -> list[float]:
        """Return how fast flows get on that need scarce resources.

        Of flows whose turn it is, all rates rise together until a flow reaches its cap or a resource is used up; the
        flows concerned stay where they are and the others rise on. Each rises in proportion to what its messages would
        get of the resource that holds it back most, if all who need a resource were to share it.

        Args:
            flows: Those that need any of them, oldest first.
            scarce: Numbers of the resources that they overfill together.
        """
        if len(flows) * len(scarce) <= _FEW:
            return few(flows, scarce)
        key = tuple((id(flow.section), flow.cap) for flow in flows), tuple(map(tuple, _turns(flows)))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            # Sections are kept as well: the identity of an object is its own only while it lives.
            known = self._known[key] = many(flows, scarce), [flow.section for flow in flows]
        return known[0]


def few(flows: Sequence[Flow], scarce: Collection[int] | Ints) -> list[float]:
    """Return the rates of a few flows, added up one by one from the left, with the same bits as `many`."""
    place = {number: row for row, number in enumerate(sorted(scarce))}
    users: list[list[_User]] = [[] for _ in place]
    for n, flow in enumerate(flows):
        messages = flow.section.messages
        for number, share in flow.section.needs.items():
            if number in place:
                users[place[number]].append((n, share, messages[number]))
    left, rate = [1.0] * len(users), [0.0] * len(flows)
    for turn in _turns(flows):
        rising = set(turn)
        slope = _slopes(rising, users, len(flows))
        ceiling = [flow.cap / each for flow, each in zip(flows, slope, strict=True)]
        while rising:
            full = []
            for free, each in zip(left, users, strict=True):
                by = 0.0
                for n, share, _ in each:
                    if n in rising:
                        by += slope[n] * share
                full.append(free / by if by > 0 else inf)
            level = min(*full, *(ceiling[n] for n in rising))
            stops = {n for n in rising if ceiling[n] <= level * _ALIKE}
            for each, at in zip(users, full, strict=True):
                if at <= level * _ALIKE:
                    stops.update(n for n, _, _ in each if n in rising)
            for n in stops:
                rate[n] = flows[n].cap if ceiling[n] <= level * _ALIKE else level * slope[n]
            rising -= stops
            for row, each in enumerate(users):
                used = 0.0
                for n, share, _ in each:
                    used += rate[n] * share
                left[row] = 0.0 if 1.0 - used < _NOTHING else 1.0 - used
    return rate


def _slopes(turn: set[int], users: Sequence[Sequence[_User]], flows: int) -> list[float]:
    """Return how steeply each flow rises."""
    slope = [inf] * flows
    for each in users:
        total = 0.0
        for n, _, messages in each:
            if n in turn:
                total += messages
        for n, share, messages in each:
            if n in turn and messages / (share * total) < slope[n]:
                slope[n] = messages / (share * total)
    return [1.0 if each == inf else each for each in slope]  # flows that need no scarce resource


def many(flows: Sequence[Flow], scarce: Collection[int] | Ints) -> list[float]:
    """Return the rates of many flows, or flows on many resources, in arrays."""
    owner = np.repeat(np.arange(len(flows)), [len(flow.section.resources) for flow in flows])
    needed = np.concatenate([flow.section.resources for flow in flows])
    share = np.concatenate([flow.section.shares for flow in flows])
    message = np.concatenate([np.fromiter(flow.section.messages.values(), np.float64) for flow in flows])
    numbers = np.fromiter(scarce, np.int64, len(scarce))
    is_scarce = np.zeros(int(max(needed.max(), numbers.max())) + 1, np.bool_)
    is_scarce[numbers] = True
    counts = is_scarce[needed]
    owner, share, message = owner[counts], share[counts], message[counts]
    names, resource = np.unique(needed[counts], return_inverse=True)
    cap = np.array([flow.cap for flow in flows])
    rate = np.zeros(len(flows))
    left: Floats = np.ones(len(names))
    for turn in _turns(flows):
        rising = np.zeros(len(flows), np.bool_)
        rising[turn] = True
        total = np.bincount(resource, np.where(rising[owner], message, 0.0), len(names))
        slope = np.full(len(flows), np.inf)
        np.minimum.at(slope, owner, message / (share * np.where(total > 0, total, 1.0)[resource]))
        slope[~rising | np.isinf(slope)] = 1.0
        while rising.any():
            rise = np.bincount(resource, np.where(rising, slope, 0.0)[owner] * share, len(names))
            full = np.divide(left, rise, out=np.full(len(names), np.inf), where=rise > 0)
            ceiling = np.where(rising, cap / slope, np.inf)
            level = min(full.min(), ceiling.min())
            stops = rising & (ceiling <= level * _ALIKE)
            stops[owner[(full <= level * _ALIKE)[resource] & rising[owner]]] = True
            rate[stops] = np.where(ceiling <= level * _ALIKE, cap, level * slope)[stops]
            rising &= ~stops
            free = 1.0 - np.bincount(resource, rate[owner] * share, len(names))
            left = np.where(free < _NOTHING, 0.0, free)
    return rate.tolist()


def _turns(flows: Sequence[Flow]) -> list[list[int]]:
    """Return the flows that are equals, by number, the most urgent and then the oldest of each lane first."""
    older: dict[object, tuple[int, int]] = {}  # by lane: its last flow, and the place of that flow
    turns: dict[tuple[int, int], list[int]] = {}
    for number, flow in enumerate(flows):
        place = 0
        if flow.lane is not None:
            lane, whole = (flow.priority, flow.lane), flow.age[0]
            last, place = older.get(lane, (whole, 0))
            place += last != whole  # parts of one are equals
            older[lane] = whole, place
        turns.setdefault((flow.priority, place), []).append(number)
    return [turns[turn] for turn in sorted(turns)]
