"""Flows, such as transfers in flight, and the load that they put on resources. Pure; no Trio.

A flow is work that proceeds at a rate; at rate 1 it takes as long as alone. Shares of resources are whole multiples of
2**-40, so that their sum is exact in any order of starts and ends. A flow that always has rate 1 reaches each mark at
exactly its start plus the mark's work.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ..collectives.placement import Floats, Ints

_QUANTUM = 2.0**40


def quantise_shares(shares: Floats) -> Floats:
    """Return shares limited to 1 and rounded down to whole multiples of 2**-40."""
    return np.floor(np.minimum(shares, 1.0) * _QUANTUM) / _QUANTUM


class FlowSection(NamedTuple):
    """A stretch of the work of a flow in which its needs of resources are constant."""

    end_ns: int  # amount of the flow's work at which the section ends
    resources: Ints  # (needs,) numbers of the resources that it needs
    shares: Floats  # (needs,) share of each resource that it takes at rate 1: more than 0, and quantised
    needs: dict[int, float]  # `shares` by number of the resource
    messages: dict[int, float]  # number of the flow's messages that use a resource at the same time, by resource
    most: int  # the largest number in `resources`; -1 if there is none

    @classmethod
    def of(cls, end_ns: int, resources: Ints, shares: Floats, messages: Floats | None = None) -> FlowSection:
        """Return a section without the resources whose share is 0.

        Args:
            end_ns: Work at which the section ends.
            resources: (needs,) Numbers of resources.
            shares: (needs,) Share of each resource that the flow takes at rate 1.
            messages: (needs,) Number of messages that use each resource at the same time; None: one.
        """
        if not len(shares):
            return cls(end_ns, resources, shares, {}, {}, -1)
        needed = shares > 0
        counts = np.ones(len(shares)) if messages is None else messages
        resources, shares = resources[needed], shares[needed]
        numbers = resources.tolist()
        needs = dict(zip(numbers, shares.tolist(), strict=True))
        shared = dict(zip(numbers, counts[needed].tolist(), strict=True))
        return cls(end_ns, resources, shares, needs, shared, max(numbers, default=-1))


class Flow:
    """Work in progress, counted in the nanoseconds that it takes at rate 1.

    Args:
        key: Identity of the flow. Marks of several flows at one instant come in the order of the keys.
        marks_ns: Amounts of work at which something is reported, such as that a rank is done; ascending. The last mark
            is all of the work.
        sections: The sections of the work. The last one ends with the work.
        priority: Priority; lower is more urgent.
        lane: Lane of the flow, in which older flows come first; None: the flow is in no lane.

    Attributes:
        key, marks_ns, sections, priority, lane: See the arguments.
        section: The present section.
        cap: Upper bound of the rate.
        rate: Present rate.
        started_ns: Instant of the start.
        age: Number of flows that started before this flow.
        done_ns: Work done at the last change of the rate.
    """

    __slots__ = (
        "_due_ns", "_mark", "_section", "_since_ns", "age", "cap", "done_ns", "key", "lane", "marks_ns", "priority",
        "rate", "section", "sections", "started_ns",
    )  # fmt: skip
    age: int
    cap: float
    key: tuple[object, ...]
    lane: object
    marks_ns: Sequence[int]
    priority: int
    rate: float
    section: FlowSection
    sections: Sequence[FlowSection]
    started_ns: int

    def __init__(
        self,
        key: tuple[object, ...],
        marks_ns: Sequence[int],
        sections: Sequence[FlowSection],
        *,
        priority: int = 0,
        lane: object = None,
    ) -> None:
        self.key, self.marks_ns, self.sections, self.section = key, marks_ns, sections, sections[0]
        self.priority, self.lane = priority, lane
        self.cap = self.rate = 1.0
        self.started_ns = self._since_ns = 0
        self.done_ns: float = 0.0
        self.age = 0
        # `_mark` and `_section` are indices: of the next mark, and of the present section. `_due_ns` is the instant at
        # which the first of the two ends; -1: none at this rate.
        self._mark, self._section, self._due_ns = 0, 0, -1

    def __repr__(self) -> str:
        return f"<Flow {self.key}: {self._mark} of {len(self.marks_ns)} marks, rate {self.rate:.3g}>"

    def _change_rate(self, now_ns: int, rate: float) -> None:
        """Count the work done at the old rate until now, and continue at the new rate."""
        self.done_ns += (now_ns - self._since_ns) * self.rate
        self._since_ns, self.rate = now_ns, rate


_age = attrgetter("age")

# From this number of needs on, arrays are faster than single additions: 32 needs take 4 us one by one, as does an array
# of a few hundred.
_WIDE_NEEDS = 48


class Occupancy:
    """The load of each resource, and the flows that use it.

    A resource is scarce if its flows, all at rate 1, would take more than all of it (load > 1).

    Two kinds of flows are stored differently, for speed. Loads of wide flows, with `_WIDE_NEEDS` needs or more, are
    added as arrays; to find the users of a resource, the array of each wide flow is searched. Loads of other flows are
    added one by one, and these flows are listed for each resource.
    """

    def __init__(self) -> None:
        self._load = array("d")  # by resource: the sum of the shares of its flows
        self._load_view: Floats = np.frombuffer(self._load)  # the same memory, as an array of numpy
        self._users: dict[int, dict[Flow, None]] = {}  # by resource: its flows that are not wide
        self._narrow_flows = 0  # number of flows with needs that are not wide
        self._wide: dict[Flow, None] = {}  # wide flows
        # Resources whose flows have changed, and that were scarce before or after the change: of other flows, of wide
        # ones.
        self._changed_resources: set[int] = set()
        self._changed_arrays: list[Ints] = []

    @property
    def loads(self) -> dict[int, float]:
        """Load of each resource that is in use, with all flows at rate 1."""
        loaded = np.flatnonzero(self._load_view)
        return dict(zip(loaded.tolist(), self._load_view[loaded].tolist(), strict=True))

    @property
    def needs_rates(self) -> bool:
        """Whether flows on scarce resources have changed, so that rates have to be computed."""
        return bool(self._changed_resources or self._changed_arrays)

    def add_flow(self, flow: Flow) -> None:
        """Add the needs of a flow's present section."""
        section = flow.section
        if section.most >= len(self._load):
            self._grow_load(section.most + 1)
        if len(section.needs) >= _WIDE_NEEDS:
            self._wide[flow] = None
            self._load_view[section.resources] += section.shares
            self._record_scarce_resources(flow)
            return
        load, users = self._load, self._users
        self._narrow_flows += bool(section.needs)
        for number, share in section.needs.items():
            on_resource = users.get(number)
            if on_resource is None:
                on_resource = users[number] = {}
            load[number] += share
            on_resource[flow] = None
            if load[number] > 1:
                self._changed_resources.add(number)

    def _grow_load(self, least: int) -> None:
        """Enlarge the array of loads to at least `least` resources; at least double it, so that growth is rare."""
        added = max(least - len(self._load), len(self._load))
        # An array whose buffer is exported, as to the view here, cannot grow: make a new one.
        self._load = self._load + array("d", bytes(added * self._load.itemsize))
        self._load_view = np.frombuffer(self._load)

    def _record_scarce_resources(self, flow: Flow) -> None:
        """Record the scarce resources of a wide flow that is added or removed."""
        if len(scarce := self._scarce_resources(flow)):
            self._changed_arrays.append(scarce)

    def remove_flow(self, flow: Flow) -> None:
        """Remove the needs of a flow's present section, which `add_flow` has added."""
        section = flow.section
        if len(section.needs) >= _WIDE_NEEDS:
            del self._wide[flow]
            self._record_scarce_resources(flow)
            self._load_view[section.resources] -= section.shares
            return
        load, users = self._load, self._users
        self._narrow_flows -= bool(section.needs)
        for number, share in section.needs.items():
            if load[number] > 1:
                self._changed_resources.add(number)
            # Exact, as shares are multiples of one quantum: nothing stays when all flows are gone.
            load[number] -= share
            del users[number][flow]

    def is_unlimited(self, flow: Flow) -> bool:
        """Whether a flow needs no scarce resource."""
        if flow in self._wide:
            return not len(self._scarce_resources(flow))
        return not any(self._load[number] > 1 for number in flow.section.needs)

    def take_affected_flows(self) -> dict[Flow, None]:
        """Return the flows on scarce resources whose flows have changed, and forget these changes."""
        numbers, self._changed_resources = self._changed_resources, set()
        arrays, self._changed_arrays = self._changed_arrays, []
        return self._find_flows_using(numbers, arrays)

    def _scarce_resources(self, flow: Flow) -> Ints:
        return flow.section.resources[self._load_view[flow.section.resources] > 1]

    def _find_flows_using(self, numbers: Collection[int], arrays: Sequence[Ints] = ()) -> dict[Flow, None]:
        """Return the flows that need any of the given resources; `arrays` are further numbers."""
        users: dict[Flow, None] = {}
        for number in numbers:
            users.update(self._users.get(number, {}))
        if self._narrow_flows:
            for number in chain.from_iterable(resources.tolist() for resources in arrays):
                users.update(self._users.get(number, {}))
        if self._wide and (numbers or arrays):
            chosen = np.zeros(len(self._load), np.bool_)
            chosen[list(numbers)] = True
            for resources in arrays:
                chosen[resources] = True
            users.update((flow, None) for flow in self._wide if chosen[flow.section.resources].any())
        return users

    def connected_flows(self, flow: Flow) -> tuple[list[Flow], Collection[int] | Ints]:
        """Return the flows that share scarce resources with a flow, directly or through other flows.

        Returns:
            These flows, the oldest first, and the numbers of the scarce resources that they share.
        """
        if self._wide:
            return self._connected_wide_flows(flow)
        crowd, scarce, load = {flow: None}, set[int](), self._load
        todo = [flow]
        for member in todo:  # the list grows in the loop
            further = {number for number in member.section.needs if load[number] > 1 and number not in scarce}
            scarce |= further
            users = self._find_flows_using(further)
            todo += users.keys() - crowd.keys()
            crowd.update(users)
        return sorted(crowd, key=_age), scarce

    def _connected_wide_flows(self, flow: Flow) -> tuple[list[Flow], Ints]:
        """Return the same as `connected_flows`; faster if there are wide flows."""
        crowd, visited = {flow: None}, np.zeros(len(self._load), np.bool_)
        todo = [flow]
        for member in todo:  # the list grows in the loop
            scarce = self._scarce_resources(member)
            further = scarce[~visited[scarce]]
            visited[further] = True
            users = self._find_flows_using((), [further])
            todo += users.keys() - crowd.keys()
            crowd.update(users)
        return sorted(crowd, key=_age), np.flatnonzero(visited)
