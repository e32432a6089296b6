"""Flows that share resources as a fluid: how fast each gets on, and when it reaches its marks. Pure; no Trio.

A flow has work, in nanoseconds that it takes alone, and while it gets on at rate r (1 is alone) it takes the share
r * u of every resource that it needs. The most urgent flows come first, and of each lane the oldest; less urgent and
younger ones get what these leave, as they do where messages queue for a wire. Among equals rates are max-min fair in
what each flow takes of the resource it needs most: as far as resources allow all flows take the same there, and none
more than it needs alone. Rates change only when flows start, end or are capped; between, everything is linear. SimGrid
shares its networks like this (Casanova et al., "Versatile, scalable, and accurate simulation of distributed
applications and platforms", JPDC 74, 2014).

Shares are whole multiples of 2**-40, so that what flows add to a resource and take away again sums up exactly, in any
order. A flow that is never held up reaches its marks at exactly its start plus their work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Flow", "Fluid", "quantised"]

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

_QUANTUM = 2.0**40
# Resources and levels that differ by less bind together: sums of a few products of doubles.
_ALIKE = 1 + 1e-12
# What is left of a resource when such sums have used it up.
_NOTHING = 1e-12


def quantised(shares: Floats) -> Floats:
    """Round shares down to the quantum, and to 1."""
    return np.floor(np.minimum(shares, 1.0) * _QUANTUM) / _QUANTUM


class Flow:
    """Something that gets on at a rate.

    Attributes:
        key: tells flows apart, and orders what they reach in one instant.
        marks_ns: ascending: work at which parts of it are done; the last is the end.
        resources: (needs,) what it needs, each once.
        shares: (needs,) how much of each while it gets on at rate 1; must be `quantised`.
        priority: lower is more urgent.
        lane: what it belongs to; None for none.
        cap: the most its rate may be.
        rate: how fast it gets on now.
        started_ns: when it started.
    """

    __slots__ = (
        "_done_ns", "_due_ns", "_mark", "_since_ns", "cap", "key", "lane", "marks_ns", "priority", "rate", "resources",
        "shares", "started_ns",
    )  # fmt: skip

    def __init__(
        self,
        key: tuple[object, ...],
        marks_ns: Sequence[int],
        resources: Ints,
        shares: Floats,
        *,
        priority: int = 0,
        lane: object = None,
    ) -> None:
        self.key, self.marks_ns, self.resources, self.shares = key, marks_ns, resources, shares
        self.priority, self.lane = priority, lane
        self.cap = self.rate = 1.0
        self.started_ns = self._since_ns = 0
        self._done_ns = 0.0
        self._mark, self._due_ns = 0, -1

    def __repr__(self) -> str:
        return f"<Flow {self.key}: {self._mark} of {len(self.marks_ns)} marks, rate {self.rate:.3g}>"

    def _turn(self, now_ns: int, rate: float) -> None:
        """Go on at another rate."""
        self._done_ns += (now_ns - self._since_ns) * self.rate
        self._since_ns, self.rate = now_ns, rate

    def _due(self) -> int | None:
        """Return when the next mark is reached at this rate; None while others leave it nothing."""
        left_ns = self.marks_ns[self._mark] - self._done_ns
        return self._since_ns + max(0, round(left_ns / self.rate)) if self.rate else None


class Fluid:
    """All flows in flight."""

    def __init__(self) -> None:
        self._flows: dict[tuple[object, ...], Flow] = {}
        self._load: Floats = np.zeros(0)  # what all flows would take at rate 1
        self._heap: list[tuple[int, tuple[object, ...]]] = []
        self._unfair = False  # rates have to be found anew

    def __repr__(self) -> str:
        return f"<Fluid: {len(self._flows)} flows>"

    @property
    def flows(self) -> Sequence[Flow]:
        """Those in flight, oldest first."""
        return tuple(self._flows.values())

    def start(self, now_ns: int, flows: Iterable[Flow]) -> None:
        """Let flows begin, at an instant not before the last one. Keys must be new."""
        flows = sorted(flows, key=lambda flow: flow.key)
        for flow in flows:
            assert flow.key not in self._flows, f"{flow.key} is in flight"
            flow.started_ns = flow._since_ns = now_ns
            self._flows[flow.key] = flow
            self._note(flow)
        needed = _needed(flows)
        if needed.size:
            room = int(needed.max()) + 1 - len(self._load)
            if room > 0:
                self._load = np.concatenate([self._load, np.zeros(room + len(self._load))])
            np.add.at(self._load, needed, _shares(flows))
            self._unfair = self._unfair or bool((self._load[needed] > 1).any())

    def cap(self, flow: Flow, most: float) -> None:
        """Let a flow get on at most at a rate, from the instant of the next `settle`."""
        if flow.cap != most:
            flow.cap, self._unfair = most, True

    def settle(self, now_ns: int) -> int | None:
        """Find the rates from now on, once all that starts now has started; return when the next mark is reached."""
        if self._unfair:
            self._share_out(now_ns)
            self._unfair = False
        while self._heap:
            due_ns, key = self._heap[0]
            flow = self._flows.get(key)
            if flow is not None and flow._due_ns == due_ns:
                return due_ns
            heappop(self._heap)
        return None

    def advance(self, now_ns: int) -> list[tuple[Flow, int]]:
        """Return the marks reached at an instant, by flows' keys, as the heap has them; the last one ends its flow.

        `settle` must follow before time goes on.
        """
        reached: list[tuple[Flow, int]] = []
        while self._heap and self._heap[0][0] <= now_ns:
            due_ns, key = heappop(self._heap)
            flow = self._flows.get(key)
            if flow is None or flow._due_ns != due_ns:
                continue
            reached.append((flow, flow._mark))
            flow._mark += 1
            if flow._mark == len(flow.marks_ns):
                del self._flows[key]
            else:
                self._note(flow)
        self._end([flow for flow, mark in reached if mark + 1 == len(flow.marks_ns)])
        return reached

    def _end(self, flows: list[Flow]) -> None:
        needed = _needed(flows)
        if needed.size:
            self._unfair = self._unfair or bool((self._load[needed] > 1).any())
            np.subtract.at(self._load, needed, _shares(flows))

    def _note(self, flow: Flow) -> None:
        due_ns = flow._due()
        flow._due_ns = -1 if due_ns is None else due_ns
        if due_ns is not None:
            heappush(self._heap, (due_ns, flow.key))

    def _share_out(self, now_ns: int) -> None:
        """Give all flows new rates: those that need nothing scarce their own, the others a fair one."""
        scarce = self._load > 1
        contending = []
        for flow in self._flows.values():
            if scarce[flow.resources].any():
                contending.append(flow)
            else:
                self._turn(flow, now_ns, flow.cap)
        if contending:
            for flow, rate in zip(contending, rates(contending, scarce), strict=True):
                self._turn(flow, now_ns, rate)

    def _turn(self, flow: Flow, now_ns: int, rate: float) -> None:
        if rate != flow.rate:
            flow._turn(now_ns, rate)
            self._note(flow)


def _needed(flows: Sequence[Flow]) -> Ints:
    return np.concatenate([flow.resources for flow in flows]) if flows else np.zeros(0, np.int64)


def _shares(flows: Sequence[Flow]) -> Floats:
    return np.concatenate([flow.shares for flow in flows])


def rates(flows: Sequence[Flow], scarce: NDArray[np.bool_]) -> list[float]:
    """Return how fast flows get on that need scarce resources.

    Of flows whose turn it is, all rates rise together, each in proportion to one over its flow's greatest share, until
    a flow reaches its cap or a resource is used up; the flows concerned stay where they are and the others rise on.

    Args:
        flows: Those that need any of them, oldest first.
        scarce: (resources,) which resources can be used up at all.
    """
    owner = np.repeat(np.arange(len(flows)), [len(flow.resources) for flow in flows])
    needed, share = _needed(flows), _shares(flows)
    counts = scarce[needed]
    owner, share = owner[counts], share[counts]
    names, resource = np.unique(needed[counts], return_inverse=True)
    slope = np.array([1 / float(flow.shares.max()) for flow in flows])
    cap = np.array([flow.cap for flow in flows])
    rate = np.zeros(len(flows))
    left: Floats = np.ones(len(names))
    for rising in _turns(flows):
        while rising.any():
            rise = np.bincount(resource, np.where(rising, slope, 0.0)[owner] * share, len(names))
            full = np.divide(left, rise, out=np.full(len(names), np.inf), where=rise > 0)
            ceiling = np.where(rising, cap / slope, np.inf)
            level = min(full.min(), ceiling.min())
            stops = rising & (ceiling <= level * _ALIKE)
            stops[owner[(full <= level * _ALIKE)[resource] & rising[owner]]] = True
            rate[stops] = np.minimum(cap, level * slope)[stops]
            rising &= ~stops
            free = 1.0 - np.bincount(resource, rate[owner] * share, len(names))
            left = np.where(free < _NOTHING, 0.0, free)
    return rate.tolist()


def _turns(flows: Sequence[Flow]) -> Iterator[NDArray[np.bool_]]:
    """Yield masks of the flows that are equals, the most urgent and then the oldest of each lane first."""
    older: dict[object, int] = {}
    turns = []
    for flow in flows:
        place = 0
        if flow.lane is not None:
            place = older.get((flow.priority, flow.lane), 0)
            older[flow.priority, flow.lane] = place + 1
        turns.append((flow.priority, place))
    which = np.unique(np.array(turns), axis=0, return_inverse=True)[1].reshape(-1)
    for turn in range(int(which.max()) + 1):
        yield which == turn
