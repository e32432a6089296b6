"""Load of wires and memories in a step: the bytes that all ranks send, added up by resource. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topology import Cluster

from ..collectives.placement import Floats, Ints, place
from ..cost.select import plan, size_class
from ..simulation import Alike, SimulatedFabric, repeated
from ..simulation.demand import Demand
from .layout import Layout
from .parts import MESSAGE, Operation, Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Wires of one kind, or memories."""

    most: float  # Share of the step in which the busiest of them is used at full rate
    mean: float  # The same of all that are used
    used: int  # How many those are


def busy(cluster: Cluster, layout: Layout, parts: Parts, *, peer_direct: bool = True) -> dict[str, Busy]:
    """Return how busy a step keeps wires and memories, by kind.

    Args:
        cluster: The machines.
        layout: The layout, which says which ranks communicate.
        parts: The operations of the step.
        peer_direct: Whether adapters read device memory themselves.
    """
    adding = _Adding(cluster, layout, peer_direct)
    for operation, amount in parts.operations.items():
        if operation.op == MESSAGE:
            adding.messages(operation, amount.count * len(parts.ranks) / len(operation.ranks))
        else:
            adding.collectives(operation, amount.count * layout.pp)
    return adding.shares(parts.step_ns)


class _Adding:
    """The sum of the time that each resource is busy."""

    def __init__(self, cluster: Cluster, layout: Layout, peer_direct: bool) -> None:
        self._cluster, self._layout, self._peer_direct = cluster, layout, peer_direct
        self._fabric = SimulatedFabric(cluster, peer_direct=peer_direct)
        self._alike = Alike.of(layout.stage_of, cluster.world_size)
        self._added: list[tuple[Ints, Floats]] = []  # resources, and how long each is busy
        self._unit = self._fabric.resources.ranks_per_unit

    def collectives(self, of: Operation, times: float) -> None:
        """Add a collective of all groups that are like one."""
        rows = self._alike.rows(of.ranks)
        none, algorithm = np.zeros(len(of.ranks), np.int64), None
        for members, units in repeated(rows, self._unit):
            row = tuple(rows[members[0]].tolist())
            found = plan(
                of.op,
                size_class(of.nbytes),
                self._cluster,
                row,
                dtype=of.dtype,
                peer_direct=self._peer_direct,
                algorithm=algorithm,
            )
            algorithm = found.algorithm  # for the others, as in the simulation
            demand = self._fabric.collective((), of.op, found.option, of.nbytes, row, none).demand
            self._add(demand, units, times)

    def messages(self, of: Operation, times: float) -> None:
        """Add a message of all pairs that are like one."""
        half = len(of.ranks) // 2
        src, dst = of.ranks[0], of.ranks[half]
        if of.dimension == "cp":
            dst = src + self._stride("cp")
        pairs = np.stack([np.flatnonzero(self._alike.classes == self._alike.classes[src])] * 2, axis=1)
        pairs[:, 1] += dst - src
        pairs = pairs[(pairs[:, 1] >= 0) & (pairs[:, 1] < self._cluster.world_size)]
        for members, units in repeated(pairs, self._unit):
            one, other = pairs[members[0]].tolist()
            self._add(self._fabric.message((), one, other, of.nbytes).demand, units, times)

    def _stride(self, axis: str) -> int:
        names, sizes = list(self._layout.axes), list(self._layout.axes.values())
        return int(np.prod(sizes[names.index(axis) + 1 :]))

    def _add(self, demand: Demand, units: Ints, times: float) -> None:
        each_ns = demand.busy_ns.sum(axis=0) * times
        resources = self._fabric.resources.shifted(demand.resources, units)
        self._added.append((resources.ravel(), np.tile(each_ns, len(resources))))

    def shares(self, step_ns: float) -> dict[str, Busy]:
        """Return the load by kind of wire."""
        if not self._added:
            return {}
        resources, each_ns = (np.concatenate(column) for column in zip(*self._added, strict=True))
        busy_ns = np.bincount(resources, each_ns)
        wires = place(self._cluster, (0,)).wires().kind
        by_kind: dict[str, list[float]] = {}
        for resource in np.flatnonzero(busy_ns).tolist():
            kind, number = self._fabric.resources.kind_and_number(resource)
            if kind != "cc_core":
                name = str(wires[number]) if kind == "wire" else kind
                by_kind.setdefault(name, []).append(float(busy_ns[resource]) / step_ns)
        return {k: Busy(most=max(v), mean=sum(v) / len(v), used=len(v)) for k, v in sorted(by_kind.items())}
