"""Fluid model of sharing: the rate of each flow, and the instants at which it reaches its marks. Pure; no Trio.

The work of a flow is counted in the nanoseconds that it takes alone, at rate 1. At rate r it takes the share r * u of
each resource that it needs, where u is its share at rate 1 in the present section. Rates change only when a flow
starts, ends, gets another cap or enters another section; then only the rates of flows change that share scarce
resources with it, directly or through other flows. In between, progress is linear in time. SimGrid shares networks like
this (Casanova et al., "Versatile, scalable, and accurate simulation of distributed applications and platforms", JPDC
74, 2014).
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
        # By instant: flows whose next mark or section was due then. An entry is out of date if `Flow._due_ns` differs.
        self._due: dict[int, list[Flow]] = {}
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
        """By resource number, the share of its capacity that the flows need if each has rate 1; above 1: overloaded."""
        return self._occupancy.loads

    def start_flows(self, now_ns: int, flows: Iterable[Flow]) -> None:
        """Start flows at an instant, not before the last one. Their keys must differ from those of flows in flight."""
        for flow in sorted(flows, key=_flow_key):
            assert flow.key not in self._flows, f"{flow.key} is in flight"
            flow.started_ns = flow._since_ns = now_ns
            flow.age = self._started
            self._started += 1
            self._flows[flow.key] = flow
            self._schedule_next_mark(flow)
            self._occupancy.add_flow(flow)

    def cap_rate(self, flow: Flow, most: float) -> None:
        """Limit the rate of a flow to `most`, from the next `update_rates` on."""
        if flow.cap != most:
            flow.cap = most
            self._outdated[flow] = None

    def update_rates(self, now_ns: int) -> int | None:
        """Compute the rates, once all flows of this instant have started; return the next instant for `advance_to`.

        It is that of the next mark or section of a flow; None if no flow will reach one at the present rates.
        """
        if self._outdated or self._occupancy.needs_rates:
            self._recompute_rates(now_ns)
        while self._due_heap:
            due_ns = self._due_heap[0]
            if any(flow._due_ns == due_ns for flow in self._due[due_ns]):
                return due_ns
            del self._due[heappop(self._due_heap)]
        return None

    def advance_to(self, now_ns: int) -> list[tuple[Flow, int]]:
        """Move to an instant; return the marks that are reached then, as (flow, index of the mark), by key of the flow.

        The last mark ends its flow. Call `update_rates` before the next instant.
        """
        reached: list[tuple[Flow, int]] = []
        while self._due_heap and self._due_heap[0] <= now_ns:
            due_ns = heappop(self._due_heap)
            for flow in sorted(self._due.pop(due_ns), key=_flow_key):
                # A flow may reach several marks and sections at one instant. Entries that are out of date are skipped.
                while flow._due_ns == due_ns:
                    if flow.section.end_ns < flow.marks_ns[flow._mark]:
                        self._enter_next_section(flow)
                    else:
                        reached.append((flow, flow._mark))
                        flow._mark += 1
                        if flow._mark == len(flow.marks_ns):
                            self._end_flow(flow)
                        else:
                            self._schedule_next_mark(flow)
        return reached

    def _end_flow(self, flow: Flow) -> None:
        """Remove a flow that has reached its last mark, and free its shares of resources."""
        del self._flows[flow.key]
        # This makes all entries of the flow in `_due` out of date.
        flow._due_ns = -1
        self._occupancy.remove_flow(flow)
        self._outdated.pop(flow, None)

    def _enter_next_section(self, flow: Flow) -> None:
        """Let a flow enter its next section, which needs other resources; its rate may change."""
        self._occupancy.remove_flow(flow)
        flow._section += 1
        flow.section = flow.sections[flow._section]
        self._occupancy.add_flow(flow)
        # A flow below its cap may become faster or slower. A flow at its cap can only become slower: then a resource of
        # the new section is scarce, which the occupancy has recorded.
        if flow.rate != flow.cap:
            self._outdated[flow] = None
        self._schedule_next_mark(flow)

    def _schedule_next_mark(self, flow: Flow) -> None:
        """Record the instant at which a flow reaches its next mark or the end of its section; none at rate 0."""
        rate = flow.rate
        if not rate:
            flow._due_ns = -1
            return
        # The next mark, or the end of the section, whichever comes first.
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

    def _recompute_rates(self, now_ns: int) -> None:
        """Compute new rates for all flows that recent changes may affect."""
        outdated, self._outdated = self._outdated, {}
        outdated.update(self._occupancy.take_affected_flows())
        rated: set[Flow] = set()
        for flow in outdated:
            if flow in rated:
                continue
            # Flows that share scarce resources get their rates together.
            if self._occupancy.is_unlimited(flow):
                self._set_rate(flow, now_ns, flow.cap)
            else:
                crowd, scarce = self._occupancy.connected_flows(flow)
                rated.update(crowd)
                for member, rate in zip(crowd, self._rates.find_rates(crowd, scarce), strict=True):
                    self._set_rate(member, now_ns, rate)

    def _set_rate(self, flow: Flow, now_ns: int, rate: float) -> None:
        if rate != flow.rate:
            flow._change_rate(now_ns, rate)
            self._schedule_next_mark(flow)
