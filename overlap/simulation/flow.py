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


def quantised(shares: Floats) -> Floats:
    """Round shares down to the quantum, and to 1."""
    return np.floor(np.minimum(shares, 1.0) * _QUANTUM) / _QUANTUM


class Section(NamedTuple):
    """Needs of a flow for a part of its work."""

    end_ns: int  # work at which the needs of a flow change
    resources: Ints  # (needs,) the resources that it needs, each once
    shares: Floats  # (needs,) how much of each it takes at rate 1: more than 0, and `quantised`
    needs: dict[int, float]  # `shares` by resource
    messages: dict[int, float]  # how many of its messages share each resource at a time, by resource
    most: int  # the largest index of a resource; -1 without resources

    @classmethod
    def of(cls, end_ns: int, resources: Ints, shares: Floats, messages: Floats | None = None) -> Section:
        """Make a section without the resources of share 0; with one message on each resource by default."""
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
    section: Section
    sections: Sequence[Section]
    started_ns: int

    def __init__(
        self,
        key: tuple[object, ...],
        marks_ns: Sequence[int],
        sections: Sequence[Section],
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

    def _turn(self, now_ns: int, rate: float) -> None:
        """Go on at another rate."""
        self.done_ns += (now_ns - self._since_ns) * self.rate
        self._since_ns, self.rate = now_ns, rate


_age = attrgetter("age")

# Needs from which on arrays are faster: one by one, 32 take 4 us, as an array of up to a few hundred.
_WIDE = 48


class Occupancy:
    """Loads and users of all resources. A resource is scarce if its flows, all at rate 1, overfill it."""

    def __init__(self) -> None:
        self._load = array("d")  # by resource: the sum of the shares of its flows
        self._loads: Floats = np.frombuffer(self._load)  # a view of that memory
        self._users: dict[int, dict[Flow, None]] = {}  # flows with few needs
        self._few = 0  # number of these flows that need a resource
        self._wide: dict[Flow, None] = {}  # flows with many needs
        self._changed: set[int] = set()  # resources that are or were scarce, and have other flows with few needs now
        self._changed_wide: list[Ints] = []  # the same of flows with many needs

    @property
    def loads(self) -> dict[int, float]:
        """Load of each resource that is in use, with all flows at rate 1."""
        used = np.flatnonzero(self._loads)
        return dict(zip(used.tolist(), self._loads[used].tolist(), strict=True))

    @property
    def changed(self) -> bool:
        """Whether a change of users calls for new rates."""
        return bool(self._changed or self._changed_wide)

    def add(self, flow: Flow) -> None:
        """Add the needs of a flow's section."""
        section = flow.section
        if section.most >= len(self._load):
            self._grow(section.most + 1)
        if len(section.needs) >= _WIDE:
            self._wide[flow] = None
            self._loads[section.resources] += section.shares
            self._note_wide(section.resources[self._loads[section.resources] > 1])
            return
        load, users = self._load, self._users
        self._few += bool(section.needs)
        for number, share in section.needs.items():
            on_resource = users.get(number)
            if on_resource is None:
                on_resource = users[number] = {}
            load[number] += share
            on_resource[flow] = None
            if load[number] > 1:
                self._changed.add(number)

    def _grow(self, least: int) -> None:
        self._load = array("d", self._load.tobytes() + bytes(8 * max(least - len(self._load), len(self._load))))
        self._loads = np.frombuffer(self._load)

    def _note_wide(self, scarce: Ints) -> None:
        if len(scarce):
            self._changed_wide.append(scarce)

    def remove(self, flow: Flow) -> None:
        """Remove the needs of a flow's section."""
        section = flow.section
        if len(section.needs) >= _WIDE:
            del self._wide[flow]
            self._note_wide(section.resources[self._loads[section.resources] > 1])
            self._loads[section.resources] -= section.shares
            return
        load, users = self._load, self._users
        self._few -= bool(section.needs)
        for number, share in section.needs.items():
            if load[number] > 1:
                self._changed.add(number)
            load[number] -= share
            del users[number][flow]

    def free(self, flow: Flow) -> bool:
        """Return whether a flow needs no scarce resource."""
        if flow in self._wide:
            return not (self._loads[flow.section.resources] > 1).any()
        return not any(self._load[number] > 1 for number in flow.section.needs)

    def take_affected(self) -> dict[Flow, None]:
        """Return the flows on changed resources, and clear the changes."""
        few, self._changed = self._changed, set()
        wide, self._changed_wide = self._changed_wide, []
        return self._users_of(few, wide)

    def _scarce_of(self, flow: Flow) -> Ints:
        return flow.section.resources[self._loads[flow.section.resources] > 1]

    def _users_of(self, few: Collection[int], many: Sequence[Ints] = ()) -> dict[Flow, None]:
        """Return the flows on resources, given one by one (`few`) and in arrays (`many`)."""
        users: dict[Flow, None] = {}
        for number in few:
            users.update(self._users.get(number, {}))
        if self._few:
            for number in chain.from_iterable(numbers.tolist() for numbers in many):
                users.update(self._users.get(number, {}))
        if self._wide and (few or many):
            chosen = np.zeros(len(self._load), np.bool_)
            chosen[list(few)] = True
            for numbers in many:
                chosen[numbers] = True
            users.update((wide, None) for wide in self._wide if chosen[wide.section.resources].any())
        return users

    def crowd(self, flow: Flow) -> tuple[list[Flow], Collection[int] | Ints]:
        """Return all flows connected with one by scarce resources, oldest first, and these resources."""
        if self._wide:
            return self._wide_crowd(flow)
        crowd, scarce, load = {flow: None}, set[int](), self._load
        todo = [flow]
        for member in todo:
            further = {number for number in member.section.needs if load[number] > 1 and number not in scarce}
            scarce |= further
            users = self._users_of(further)
            todo += users.keys() - crowd.keys()
            crowd.update(users)
        return sorted(crowd, key=_age), scarce

    def _wide_crowd(self, flow: Flow) -> tuple[list[Flow], Ints]:
        crowd, visited = {flow: None}, np.zeros(len(self._load), np.bool_)
        todo = [flow]
        for member in todo:
            scarce = self._scarce_of(member)
            further = scarce[~visited[scarce]]
            visited[further] = True
            users = self._users_of((), [further])
            todo += users.keys() - crowd.keys()
            crowd.update(users)
        return sorted(crowd, key=_age), np.flatnonzero(visited)
