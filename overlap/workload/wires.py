"""How busy wires and memories are in a step: what all ranks send, added up on what carries it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology import Cluster

from ..collectives.select import plan
from ..virtual import Alike, Fabric, repeated
from ..virtual.demand import Demand
from .layout import Layout
from .parts import MESSAGE, Operation, Parts

__all__ = ["Busy", "busy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Wires of one kind, or memories.

    Attributes:
        most: Share of the step in which the busiest of them is used at full rate.
        mean: The same of all that are used.
        used: How many those are.
    """

    most: float
    mean: float
    used: int


def busy(cluster: Cluster, layout: Layout, parts: Parts, *, peer_direct: bool = True) -> dict[str, Busy]:
    """Add up what a step keeps busy, by kind.

    Args:
        cluster: Where.
        layout: Who sends to whom.
        parts: What was sent.
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
    """What has been added up."""

    def __init__(self, cluster: Cluster, layout: Layout, peer_direct: bool) -> None:
        self._cluster, self._layout, self._peer_direct = cluster, layout, peer_direct
        self._fabric = Fabric(cluster, peer_direct=peer_direct)
        self._alike = Alike.of(layout.stage_of, cluster.world_size)
        self._busy_ns: dict[int, float] = {}
        self._kind: dict[int, str] = {}
        whole = cluster.nodes % cluster.servers == 0
        self._unit = cluster.servers * cluster.ranks_per_node if whole else cluster.world_size

    def collectives(self, of: Operation, times: float) -> None:
        """Add those of all groups like one."""
        rows = self._alike.rows(of.ranks)
        none = np.zeros(len(of.ranks), np.int64)
        for members, units in repeated(rows, self._unit):
            row = tuple(rows[members[0]].tolist())
            found = plan(of.op, of.nbytes, self._cluster, row, dtype=of.dtype, peer_direct=self._peer_direct)
            wires = found.option.busiest_wire()
            if wires is not None:
                self._named(wires[0].placement.wires().kind)
            demand = self._fabric.collective((), of.op, found.option, of.nbytes, row, none).demand
            self._add(demand, units, times)

    def messages(self, of: Operation, times: float) -> None:
        """Add those of all pairs like one."""
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

    def _named(self, kinds: NDArray[np.str_]) -> None:
        numbers = self._fabric.resources.wires(np.arange(len(kinds)))
        self._kind.update(zip(numbers.tolist(), kinds.tolist(), strict=True))

    def _add(self, demand: Demand, units: NDArray[np.int64], times: float) -> None:
        each_ns = demand.busy_ns.sum(axis=0) * times
        for row in self._fabric.resources.shifted(demand.resources, units).tolist():
            for resource, busy_ns in zip(row, each_ns.tolist(), strict=True):
                self._busy_ns[resource] = self._busy_ns.get(resource, 0.0) + busy_ns

    def shares(self, step_ns: float) -> dict[str, Busy]:
        """Return what came of it."""
        by_kind: dict[str, list[float]] = {}
        for resource, busy_ns in self._busy_ns.items():
            kind, _ = self._fabric.resources.kind_and_number(resource)
            if busy_ns > 0 and kind != "cc_core":
                kind = self._kind.get(resource, "wires") if kind == "wire" else kind
                by_kind.setdefault(kind, []).append(busy_ns / step_ns)
        return {k: Busy(most=max(v), mean=sum(v) / len(v), used=len(v)) for k, v in sorted(by_kind.items())}
