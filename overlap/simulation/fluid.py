"""Fluid model of sharing: the rate of each flow, and the instants of its marks. Pure; no Trio.

A flow has work, in nanoseconds that it takes alone, and while it proceeds at rate r (1 is alone) it takes the share
r * u of every resource that it needs in its section. Rates change only when flows start, end, are capped or come to
another section, and then only those of flows that scarce resources join with these, directly or through others;
between, everything is linear. SimGrid shares its networks like this (Casanova et al., "Versatile, scalable, and
accurate simulation of distributed applications and platforms", JPDC 74, 2014).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from .flow import Flow, Occupancy
from .sharing import Rates

_flow_key = attrgetter("key")


class Fluid:
    """All flows in flight, with their rates."""

    def __init__(self) -> None:
        self._flows: dict[tuple[object, ...], Flow] = {}
        self._started = 0
        self._occupancy = Occupancy()
        self._due: dict[int, list[Flow]] = {}  # by the instant at which they are due, unless they have changed since
        self._due_heap: list[int] = []  # the keys of `_due`
        self._outdated: dict[Flow, None] = {}  # flows that need a new rate
        self._rates = Rates()

    def __repr__(self) -> str:
        return f"<Fluid: {len(self._flows)} flows>"

    @property
    def flows(self) -> Sequence[Flow]:
        """Flows in flight, oldest first."""
        return tuple(self._flows.values())

    @property
    def loads(self) -> dict[int, float]:
        """Load of each resource that is in use, with all flows at rate 1."""
        return self._occupancy.loads

    def start(self, now_ns: int, flows: Iterable[Flow]) -> None:
        """Start flows, at an instant not before the last one. Keys must be new."""
        for flow in sorted(flows, key=_flow_key):
            assert flow.key not in self._flows, f"{flow.key} is in flight"
            flow.started_ns = flow._since_ns = now_ns
            flow.age = self._started
            self._started += 1
            self._flows[flow.key] = flow
            self._schedule_next(flow)
            self._occupancy.add(flow)

    def cap(self, flow: Flow, most: float) -> None:
        """Limit the rate of a flow, from the instant of the next `update_rates` on."""
        if flow.cap != most:
            flow.cap = most
            self._outdated[flow] = None

    def update_rates(self, now_ns: int) -> int | None:
        """Compute the rates, once all flows of this instant have started; return the instant of the next mark."""
        if self._outdated or self._occupancy.needs_rates:
            self._update_rates(now_ns)
        while self._due_heap:
            due_ns = self._due_heap[0]
            if any(flow._due_ns == due_ns for flow in self._due[due_ns]):
                return due_ns
            del self._due[heappop(self._due_heap)]
        return None

    def advance(self, now_ns: int) -> list[tuple[Flow, int]]:
        """Return the marks reached at an instant, as flow and index of the mark, ordered by the keys of flows.

        The last mark ends its flow. `update_rates` must follow before time goes on.
        """
        reached: list[tuple[Flow, int]] = []
        while self._due_heap and self._due_heap[0] <= now_ns:
            due_ns = heappop(self._due_heap)
            for flow in sorted(self._due.pop(due_ns), key=_flow_key):
                while flow._due_ns == due_ns:
                    if flow.section.end_ns < flow.marks_ns[flow._mark]:
                        self._enter_next_section(flow)
                    else:
                        reached.append((flow, flow._mark))
                        flow._mark += 1
                        if flow._mark == len(flow.marks_ns):
                            self._end_flow(flow)
                        else:
                            self._schedule_next(flow)
        return reached

    def _end_flow(self, flow: Flow) -> None:
        del self._flows[flow.key]
        flow._due_ns = -1
        self._occupancy.remove(flow)
        self._outdated.pop(flow, None)

    def _enter_next_section(self, flow: Flow) -> None:
        self._occupancy.remove(flow)
        flow._section += 1
        flow.section = flow.sections[flow._section]
        self._occupancy.add(flow)
        if flow.rate != flow.cap:
            self._outdated[flow] = None
        self._schedule_next(flow)

    def _schedule_next(self, flow: Flow) -> None:
        """Compute the instant at which a flow reaches its next mark or section; none at rate 0."""
        rate = flow.rate
        if not rate:
            flow._due_ns = -1
            return
        done_ns, end_ns = flow.marks_ns[flow._mark], flow.section.end_ns
        ahead_ns = round(((done_ns if done_ns < end_ns else end_ns) - flow.done_ns) / rate)
        due_ns = flow._due_ns = flow._since_ns + (ahead_ns if ahead_ns > 0 else 0)
        batch = self._due.get(due_ns)
        if batch is None:
            self._due[due_ns] = [flow]
            heappush(self._due_heap, due_ns)
        else:
            batch.append(flow)

    # -- sharing -------------------------------------------------------------------------------------------------

    def _update_rates(self, now_ns: int) -> None:
        """Compute new rates for all flows that recent changes may affect."""
        outdated, self._outdated = self._outdated, {}
        outdated.update(self._occupancy.take_affected())
        rated: set[Flow] = set()
        for flow in outdated:
            if flow in rated:
                continue
            if self._occupancy.is_unlimited(flow):
                self._set_rate(flow, now_ns, flow.cap)
            else:
                crowd, scarce = self._occupancy.connected_flows(flow)
                rated.update(crowd)
                for member, rate in zip(crowd, self._rates.of(crowd, scarce), strict=True):
                    self._set_rate(member, now_ns, rate)

    def _set_rate(self, flow: Flow, now_ns: int, rate: float) -> None:
        if rate != flow.rate:
            flow._change_rate(now_ns, rate)
            self._schedule_next(flow)
