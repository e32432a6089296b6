"""Fair rates of flows that share scarce resources. Pure; no Trio.

The most urgent flows come first, and of each lane the oldest; less urgent and younger flows get the rest, as where
messages queue for a wire. Equals share by message, as messages on wires do: on a full resource all messages get the
same, so that a flow with seven messages there gets seven times the share of a flow with one, and none more than it
needs alone.
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
# Rest of a resource that counts as none: the rounding of such sums.
_NOTHING = 1e-12
# Flows times resources up to which plain Python is faster than numpy: four flows on four resources take 9 us, not 35.
_FEW = 200


# Crowds whose rates are remembered: the microbatches of a step make the same ones again and again.
_REMEMBERED = 1 << 12


class Rates:
    """Rates of crowds, computed once for flows in the same sections.

    The needs of a crowd's flows determine the scarce resources, so rates depend on nothing but their sections, caps and
    turns.
    """

    def __init__(self) -> None:
        self._known: dict[object, tuple[list[float], list[Section]]] = {}

    def of(self, flows: Sequence[Flow], scarce: Collection[int] | Ints) -> list[float]:
        """Return the rates of flows that need scarce resources.

        All rates of the flows of a turn rise together until a flow reaches its cap or a resource is used up; the flows
        affected stay there and the others rise on. Each rises in proportion to the share that its messages would get of
        the resource that limits it most, if all users of a resource shared it.

        Args:
            flows: Flows that need any of them, oldest first.
            scarce: Numbers of the resources that they overfill together.
        """
        if len(flows) * len(scarce) <= _FEW:
            return few(flows, scarce)
        key = tuple((id(flow.section), flow.cap) for flow in flows), tuple(map(tuple, _turns(flows)))
        entry = self._known.get(key)
        if entry is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            # Sections are kept as well: the id of an object is its own only while it lives.
            entry = self._known[key] = many(flows, scarce), [flow.section for flow in flows]
        return entry[0]


def few(flows: Sequence[Flow], scarce: Collection[int] | Ints) -> list[float]:
    """Return the rates of a few flows, added up one by one from the left, with the same bits as `many`."""
    rows = {number: row for row, number in enumerate(sorted(scarce))}
    users: list[list[_User]] = [[] for _ in rows]
    for n, flow in enumerate(flows):
        messages = flow.section.messages
        for number, share in flow.section.needs.items():
            if number in rows:
                users[rows[number]].append((n, share, messages[number]))
    free, rate = [1.0] * len(users), [0.0] * len(flows)
    for turn in _turns(flows):
        rising = set(turn)
        slope = _slopes(rising, users, len(flows))
        ceiling = [flow.cap / steepness for flow, steepness in zip(flows, slope, strict=True)]
        while rising:
            full = []
            for row_free, row_users in zip(free, users, strict=True):
                rise = 0.0
                for n, share, _ in row_users:
                    if n in rising:
                        rise += slope[n] * share
                full.append(row_free / rise if rise > 0 else inf)
            level = min(*full, *(ceiling[n] for n in rising))
            stops = {n for n in rising if ceiling[n] <= level * _ALIKE}
            for row_users, row_full in zip(users, full, strict=True):
                if row_full <= level * _ALIKE:
                    stops.update(n for n, _, _ in row_users if n in rising)
            for n in stops:
                rate[n] = flows[n].cap if ceiling[n] <= level * _ALIKE else level * slope[n]
            rising -= stops
            for row, row_users in enumerate(users):
                used = 0.0
                for n, share, _ in row_users:
                    used += rate[n] * share
                free[row] = 0.0 if 1.0 - used < _NOTHING else 1.0 - used
    return rate


def _slopes(turn: set[int], users: Sequence[Sequence[_User]], flows: int) -> list[float]:
    """Return the slope of each flow's rise."""
    slope = [inf] * flows
    for row_users in users:
        total = 0.0
        for n, _, messages in row_users:
            if n in turn:
                total += messages
        for n, share, messages in row_users:
            if n in turn and messages / (share * total) < slope[n]:
                slope[n] = messages / (share * total)
    return [1.0 if steepness == inf else steepness for steepness in slope]  # 1 for flows that need no scarce resource


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
    free: Floats = np.ones(len(names))
    for turn in _turns(flows):
        rising = np.zeros(len(flows), np.bool_)
        rising[turn] = True
        total = np.bincount(resource, np.where(rising[owner], message, 0.0), len(names))
        slope = np.full(len(flows), np.inf)
        np.minimum.at(slope, owner, message / (share * np.where(total > 0, total, 1.0)[resource]))
        slope[~rising | np.isinf(slope)] = 1.0
        while rising.any():
            rise = np.bincount(resource, np.where(rising, slope, 0.0)[owner] * share, len(names))
            full = np.divide(free, rise, out=np.full(len(names), np.inf), where=rise > 0)
            ceiling = np.where(rising, cap / slope, np.inf)
            level = min(full.min(), ceiling.min())
            stops = rising & (ceiling <= level * _ALIKE)
            stops[owner[(full <= level * _ALIKE)[resource] & rising[owner]]] = True
            rate[stops] = np.where(ceiling <= level * _ALIKE, cap, level * slope)[stops]
            rising &= ~stops
            rest = 1.0 - np.bincount(resource, rate[owner] * share, len(names))
            free = np.where(rest < _NOTHING, 0.0, rest)
    return rate.tolist()


def _turns(flows: Sequence[Flow]) -> list[list[int]]:
    """Return the numbers of equal flows, turn by turn: the most urgent and then the oldest of each lane first."""
    older: dict[object, int] = {}  # by lane: its flows so far
    turns: dict[tuple[int, int], list[int]] = {}
    for number, flow in enumerate(flows):
        index = 0
        if flow.lane is not None:
            lane = flow.priority, flow.lane
            index = older.get(lane, 0)
            older[lane] = index + 1
        turns.setdefault((flow.priority, index), []).append(number)
    return [turns[turn] for turn in sorted(turns)]
