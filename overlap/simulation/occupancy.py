"""What flows ask of resources, which of these are scarce, and who shares them. Pure; no Trio.

Most flows are messages, which need a handful of resources: adding these up one by one is faster than any array. Flows
that stand for groups all over a cluster need thousands, and are added up in arrays. Both add to the same loads.
"""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .flow import Flow

Floats: TypeAlias = NDArray[np.float64]

_age = attrgetter("age")

# Needs from which on arrays are faster: one by one, 32 take 4 us, which is what an array takes for up to a few hundred.
_WIDE = 48


class Occupancy:
    """The loads of all resources, and who needs them."""

    def __init__(self) -> None:
        self._load = array("d")  # by number: what its users would take at rate 1
        self._loads: Floats = np.frombuffer(self._load)  # the same memory
        self._users: dict[int, dict[Flow, None]] = {}  # those that need few
        self._wide: dict[Flow, None] = {}  # those that need many
        self._scarce: set[int] = set()  # what all users would overfill at rate 1
        self._changed: set[int] = set()  # what is or was scarce, with other users now

    @property
    def loads(self) -> dict[int, float]:
        """What is asked of each resource by flows at rate 1, of those that anything is asked of."""
        asked = np.flatnonzero(self._loads)
        return dict(zip(asked.tolist(), self._loads[asked].tolist(), strict=True))

    @property
    def changed(self) -> bool:
        """Whether somebody must share anew."""
        return bool(self._changed)

    def add(self, flow: Flow) -> None:
        """Let a flow ask for what its stage needs."""
        stage = flow.stage
        if stage.most >= len(self._load):
            self._grow(stage.most + 1)
        if len(stage.needs) >= _WIDE:
            self._add_many(flow)
            return
        load, users = self._load, self._users
        for number, share in stage.needs.items():
            of_it = users.get(number)
            if of_it is None:
                of_it = users[number] = {}
            load[number] += share
            of_it[flow] = None
            if load[number] > 1:
                self._scarce.add(number)
                self._changed.add(number)

    def _grow(self, least: int) -> None:
        self._load = array("d", self._load.tobytes() + bytes(8 * max(least - len(self._load), len(self._load))))
        self._loads = np.frombuffer(self._load)

    def _add_many(self, flow: Flow) -> None:
        stage = flow.stage
        self._wide[flow] = None
        after = self._loads[stage.resources] + stage.shares
        self._loads[stage.resources] = after
        scarce = stage.resources[after > 1].tolist()
        self._scarce.update(scarce)
        self._changed.update(scarce)

    def remove(self, flow: Flow) -> None:
        """Let a flow ask no more for what its stage needs."""
        stage = flow.stage
        if len(stage.needs) >= _WIDE:
            self._remove_many(flow)
            return
        load, users = self._load, self._users
        for number, share in stage.needs.items():
            scarce = load[number] > 1
            load[number] -= share
            del users[number][flow]
            if scarce:
                self._changed.add(number)
                if load[number] <= 1:
                    self._scarce.discard(number)

    def _remove_many(self, flow: Flow) -> None:
        stage = flow.stage
        del self._wide[flow]
        before = self._loads[stage.resources]
        after = before - stage.shares
        self._loads[stage.resources] = after
        scarce = before > 1
        self._changed.update(stage.resources[scarce].tolist())
        self._scarce.difference_update(stage.resources[scarce & (after <= 1)].tolist())

    def crowded(self) -> dict[Flow, None]:
        """Return those that share what is scarce and has changed."""
        return self._users_of(self._changed & self._scarce) if self._changed else {}

    def free(self, flow: Flow) -> bool:
        """Return whether a flow needs nothing that is scarce."""
        return flow.stage.needs.keys().isdisjoint(self._scarce)

    def others(self, flow: Flow) -> list[Flow]:
        """Return those that share with a flow what is scarce."""
        return [each for each in self._users_of(flow.stage.needs.keys() & self._scarce) if each is not flow]

    def slopes(self, flow: Flow) -> dict[int, float]:
        """Return how fast a flow would get on if its messages had their part of one resource alone, by resource."""
        found, messages = {}, flow.stage.messages
        for number, share in flow.stage.needs.items():
            if number in self._scarce:
                total = sum(each.stage.messages[number] for each in self._users_of({number}))
                found[number] = min(messages[number] / (share * total), 1.0)
            else:
                found[number] = 1.0
        return found

    def concerned(self) -> dict[Flow, None]:
        """Return those that share what has changed; then nothing has."""
        changed, self._changed = self._changed, set()
        return self._users_of(changed)

    def _users_of(self, resources: set[int]) -> dict[Flow, None]:
        found: dict[Flow, None] = {}
        for number in resources:
            found.update(self._users.get(number, {}))
        if self._wide:
            found.update((each, None) for each in self._wide if not each.stage.needs.keys().isdisjoint(resources))
        return found

    def crowd(self, flow: Flow) -> tuple[list[Flow], set[int]]:
        """Return all flows that scarce resources join with this one, oldest first, and these resources."""
        crowd, scarce = {flow: None}, set[int]()
        todo = [flow]
        for each in todo:
            further = (each.stage.needs.keys() & self._scarce) - scarce
            scarce |= further
            users = self._users_of(further)
            todo += users.keys() - crowd.keys()
            crowd.update(users)
        return sorted(crowd, key=_age), scarce
