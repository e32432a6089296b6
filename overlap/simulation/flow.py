"""Flows, which are work at a rate, and the load that they put on resources. Pure; no Trio.

Shares are whole multiples of 2**-40, so that the sum of the shares on a resource is exact in any order of starts and
ends. A flow that is never held up reaches its marks at exactly its start plus their work.
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


def quantise(shares: Floats) -> Floats:
    """Return shares, at most 1, rounded down to whole multiples of the quantum."""
    return np.floor(np.minimum(shares, 1.0) * _QUANTUM) / _QUANTUM


class FlowSection(NamedTuple):
    """Part of the work of a flow, with equal needs throughout."""

    end_ns: int  # work at which the needs of a flow change
    resources: Ints  # (needs,) the resources that it needs, each once
    shares: Floats  # (needs,) how much of each it takes at rate 1: more than 0, and `quantise`
    needs: dict[int, float]  # `shares` by resource
    messages: dict[int, float]  # how many of its messages share each resource at a time, by resource
    most: int  # the largest number of a resource; -1 without resources

    @classmethod
    def of(cls, end_ns: int, resources: Ints, shares: Floats, messages: Floats | None = None) -> FlowSection:
        """Return a section without resources of share 0; by default one message shares each resource."""
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
    """Work in progress at a rate.

    Attributes:
        key: Identity of the flow, and order of its marks in one instant.
        marks_ns: Work at which parts of it are done, ascending; the last is the end.
        sections: Needs of each part of the work; the last ends with the work.
        section: The present section.
        priority: Priority; lower is more urgent.
        lane: Its lane, in which older flows come first; None for none.
        cap: Upper bound of its rate.
        rate: Its present rate.
        started_ns: Instant of its start.
        age: Number of flows started before it.
        done_ns: Work done at the last change of its rate.
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
        self._mark, self._section, self._due_ns = 0, 0, -1

    def __repr__(self) -> str:
        return f"<Flow {self.key}: {self._mark} of {len(self.marks_ns)} marks, rate {self.rate:.3g}>"

    def _change_rate(self, now_ns: int, rate: float) -> None:
        """Add the work done so far at the old rate, and go on at another one."""
        self.done_ns += (now_ns - self._since_ns) * self.rate
        self._since_ns, self.rate = now_ns, rate


_age = attrgetter("age")

# Number of needs from which on arrays are faster: 32 needs one by one take 4 us, as does an array of a few hundred.
_WIDE_NEEDS = 48


class Occupancy:
    """Loads and users of all resources. A resource is scarce if its flows, all at rate 1, overfill it."""

    def __init__(self) -> None:
        self._load = array("d")  # by resource: the sum of the shares of its flows
        self._loads: Floats = np.frombuffer(self._load)  # a view of that memory
        self._users: dict[int, dict[Flow, None]] = {}  # flows with few needs
        self._narrow_flows = 0  # number of these flows that need a resource
        self._wide: dict[Flow, None] = {}  # flows with many needs
        self._changed_resources: set[int] = set()  # scarce before or after a change of flows with few needs
        self._changed_arrays: list[Ints] = []  # the same for flows with many needs, as arrays

    @property
    def loads(self) -> dict[int, float]:
        """Load of each resource that is in use, with all flows at rate 1."""
        loaded = np.flatnonzero(self._loads)
        return dict(zip(loaded.tolist(), self._loads[loaded].tolist(), strict=True))

    @property
    def needs_rates(self) -> bool:
        """Whether flows on scarce resources have changed, so that rates have to be computed."""
        return bool(self._changed_resources or self._changed_arrays)

    def add(self, flow: Flow) -> None:
        """Add the needs of a flow's present section."""
        section = flow.section
        if section.most >= len(self._load):
            self._grow_load(section.most + 1)
        if len(section.needs) >= _WIDE_NEEDS:
            self._wide[flow] = None
            self._loads[section.resources] += section.shares
            self._mark_scarce(section.resources[self._loads[section.resources] > 1])
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
        """Make room for the loads of at least `least` resources; double the room, so that growth is rare."""
        self._load = array("d", self._load.tobytes() + bytes(8 * max(least - len(self._load), len(self._load))))
        self._loads = np.frombuffer(self._load)

    def _mark_scarce(self, scarce: Ints) -> None:
        """Note scarce resources whose flows with many needs have changed."""
        if len(scarce):
            self._changed_arrays.append(scarce)

    def remove(self, flow: Flow) -> None:
        """Remove the needs of a flow's present section."""
        section = flow.section
        if len(section.needs) >= _WIDE_NEEDS:
            del self._wide[flow]
            self._mark_scarce(section.resources[self._loads[section.resources] > 1])
            self._loads[section.resources] -= section.shares
            return
        load, users = self._load, self._users
        self._narrow_flows -= bool(section.needs)
        for number, share in section.needs.items():
            if load[number] > 1:
                self._changed_resources.add(number)
            load[number] -= share
            del users[number][flow]

    def is_unlimited(self, flow: Flow) -> bool:
        """Return whether a flow needs no scarce resource."""
        if flow in self._wide:
            return not (self._loads[flow.section.resources] > 1).any()
        return not any(self._load[number] > 1 for number in flow.section.needs)

    def take_affected(self) -> dict[Flow, None]:
        """Return the flows on resources that have changed, and forget these changes."""
        numbers, self._changed_resources = self._changed_resources, set()
        arrays, self._changed_arrays = self._changed_arrays, []
        return self._find_users(numbers, arrays)

    def _scarce_resources(self, flow: Flow) -> Ints:
        return flow.section.resources[self._loads[flow.section.resources] > 1]

    def _find_users(self, numbers: Collection[int], arrays: Sequence[Ints] = ()) -> dict[Flow, None]:
        """Return the flows that need any of some resources, given as numbers and as arrays of numbers."""
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
        """Return the flows that scarce resources join with a flow, directly or through other flows.

        Returns:
            These flows, the oldest first, and the numbers of the scarce resources that join them.
        """
        if self._wide:
            return self._connected_wide_flows(flow)
        crowd, scarce, load = {flow: None}, set[int](), self._load
        todo = [flow]
        for member in todo:
            further = {number for number in member.section.needs if load[number] > 1 and number not in scarce}
            scarce |= further
            users = self._find_users(further)
            todo += users.keys() - crowd.keys()
            crowd.update(users)
        return sorted(crowd, key=_age), scarce

    def _connected_wide_flows(self, flow: Flow) -> tuple[list[Flow], Ints]:
        """Return the same flows as `connected_flows`, faster where some flow needs many resources."""
        crowd, visited = {flow: None}, np.zeros(len(self._load), np.bool_)
        todo = [flow]
        for member in todo:
            scarce = self._scarce_resources(member)
            further = scarce[~visited[scarce]]
            visited[further] = True
            users = self._find_users((), [further])
            todo += users.keys() - crowd.keys()
            crowd.update(users)
        return sorted(crowd, key=_age), np.flatnonzero(visited)
