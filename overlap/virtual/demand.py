"""What an operation asks of the machine when nothing else does: when each rank is done, and what is busy how long.

This is the cost model's answer to the nanosecond; the fabric only stretches it. Pure; no Trio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from topology import Cluster

from ..collectives.cost import cost, on
from ..collectives.cost.option import Option, Part, Price
from ..collectives.cost.phased import pipeline_s
from ..collectives.placement import shifted
from .conditions import SlowWires
from .flow import by_resource, quantised

__all__ = ["Demand", "Pricing", "Resources"]

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

# Skews of one size that are remembered: without jitter an operation comes again and again with the same one.
_REMEMBERED = 64


class Resources:
    """Numbers for whatever flows share on a cluster: memories of devices, collective processors of ranks, wires."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        places = [cluster.place(rank) for rank in range(cluster.world_size)]
        # Ranks of the plain machine have a core each, and one memory for all of a node.
        several = cluster.machine.devices is not None
        devices = [each.node * cluster.devices_per_node + (each.device if several else 0) for each in places]
        self._device = np.array(devices, np.int64)
        self._first_core = cluster.devices_per_node * cluster.nodes
        self._first_wire = self._first_core + cluster.world_size

    def memories(self, ranks: Ints) -> Ints:
        """Return the memory of each rank's device."""
        return self._device[ranks]

    def cc_cores(self, ranks: Ints) -> Ints:
        """Return the collective processors of each rank, as one."""
        return self._first_core + ranks

    def wires(self, wires: Ints) -> Ints:
        """Return wires, given their numbers on a placement."""
        return self._first_wire + wires

    def shifted(self, resources: Ints, units: Ints) -> Ints:
        """Return what sits in other units (nodes, or UltraServers) as some do in theirs, as (units, resources)."""
        servers, wire = self.cluster.servers, resources >= self._first_wire
        memory = servers * self.cluster.devices_per_node
        core = servers * self.cluster.ranks_per_node
        moved = resources + np.multiply.outer(units, np.where(resources < self._first_core, memory, core))
        moved[:, wire] = self.wires(shifted(self.cluster, resources[wire] - self._first_wire, units))
        return moved

    def kind_and_number(self, resource: int) -> tuple[str, int]:
        """Tell what a number stands for: "memory" of a device, "cc_core" of a rank, or "wire"."""
        if resource >= self._first_wire:
            return "wire", resource - self._first_wire
        if resource >= self._first_core:
            return "cc_core", resource - self._first_core
        return "memory", resource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """An operation on its own, from the arrival of its last rank.

    Attributes:
        ranks: (size,) world ranks in group order.
        marks_ns: when some ranks are done, ascending.
        positions: for each mark, which ranks are done then, as positions in `ranks`, ascending.
        resources: (needs,) what it keeps busy, each once.
        shares: (needs,) for how much of the time until the last mark.
        needs: shares by resource.
    """

    ranks: Ints
    marks_ns: tuple[int, ...]
    positions: tuple[Ints, ...]
    resources: Ints
    shares: Floats
    needs: dict[int, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", by_resource(self.resources, self.shares))

    @property
    def alone_ns(self) -> int:
        """How long it takes alone."""
        return self.marks_ns[-1]

    @classmethod
    def of(cls, ranks: Ints, left_ns: Ints, resources: Ints, busy_ns: Floats) -> Demand:
        """Sort ranks by when they are done.

        Args:
            ranks: (size,) World ranks.
            left_ns: (size,) What each of them has to go, from the arrival of the last.
            resources: (needs,) What is kept busy.
            busy_ns: (needs,) For how long.
        """
        marks: tuple[int, ...] = (int(left_ns[0]),)
        positions: tuple[Ints, ...] = (np.arange(len(ranks)),)
        if (left_ns != left_ns[0]).any():  # seldom
            distinct, which = np.unique(left_ns, return_inverse=True)
            order = np.argsort(which, kind="stable")
            marks = tuple(distinct.tolist())
            positions = tuple(np.split(order, np.searchsorted(which[order], np.arange(1, len(marks)))))
        shares = quantised(busy_ns / marks[-1]) if marks[-1] else np.zeros(len(busy_ns))
        needs = shares > 0
        return cls(ranks=ranks, marks_ns=marks, positions=positions, resources=resources[needs], shares=shares[needs])


class Pricing:
    """An operation of one group, for any number of bytes and any arrivals.

    Attributes:
        ranks: World ranks in group order.
    """

    def __init__(
        self,
        phases: Callable[[int], Sequence[Part]],
        priced: Callable[[float], Price],
        ranks: Ints,
        resources: Resources,
        slow: SlowWires,
    ) -> None:
        self.ranks, self._resources, self._slow = ranks, resources, slow
        self._phases, self._priced = phases, priced
        self._parts: dict[int, tuple[Part, ...]] = {}  # by slices
        self._known: dict[tuple[float, bytes], Demand] = {}
        self._needed: tuple[Ints, Floats] | None = None

    @classmethod
    def of_option(cls, option: Option, ranks: Sequence[int], resources: Resources, slow: SlowWires) -> Pricing:
        """Price a collective that has become an algorithm."""
        return cls(option.phases, option.price, np.asarray(ranks, np.int64), resources, slow)

    def demand(self, nbytes: float, late_ns: Ints) -> Demand:
        """Cost it.

        Nobody is done before the last rank has arrived: an operation begins with a handshake of all ranks, and
        completes when the slowest one has come (aws-neuron/aws-neuron-sdk:src/libnrt/include/nrt/nec.h).

        Args:
            nbytes: Of the whole vector.
            late_ns: (size,) how long after the first rank each one arrives.
        """
        key = nbytes, late_ns.tobytes()
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            found = self._known[key] = self._computed(nbytes, late_ns)
        return found

    def _computed(self, nbytes: float, late_ns: Ints) -> Demand:
        left_ns = np.maximum(self._computed_ns(nbytes, late_ns) - late_ns.max(), 0)
        resources, busy_ns = self._needs()
        busy_ns = busy_ns * nbytes
        cores = self._resources.cluster.cc_cores_per_rank
        if cores:  # every operation in flight has one, the whole time
            resources = np.concatenate([resources, self._resources.cc_cores(self.ranks)])
            busy_ns = np.concatenate([busy_ns, np.full(len(self.ranks), int(left_ns.max()) / cores)])
        return Demand.of(self.ranks, left_ns, resources, busy_ns)

    def _computed_ns(self, nbytes: float, late_ns: Ints) -> Ints:
        """Return when each rank is done, after the first arrival.

        Phases follow one another as a whole, and slices as in a pipeline: that is how they are priced. So lateness
        moves the first phase, and ranks differ by what they differ in the last one.
        """
        price, late_s = self._priced(nbytes), late_ns / 1e9
        parts = self._under_way(price.slices)
        if not parts:  # without messages: all meet, then the work is done
            return np.full(len(late_ns), int(late_ns.max()) + round(price.total_s * 1e9), np.int64)
        piece = nbytes / price.slices if len(parts) > 1 else nbytes
        first, last = parts[0], parts[-1]
        late = cost(first.placed, first.share * piece, arrivals_s=late_s)
        if len(parts) == 1:
            return _ns(late.finish_s)
        total_s = price.total_s + (late.total_s - first.total_s(piece)) + self._worse_s(piece, price.slices)
        finish_s = cost(last.placed, last.share * piece).finish_s
        return _ns(np.array(total_s)) - _ns(finish_s.max() - finish_s)

    def _under_way(self, slices: int) -> tuple[Part, ...]:
        """Return the phases on wires as they are."""
        if slices not in self._parts:
            healthy = self._phases(slices)
            self._parts[slices] = tuple(_under(self._slow, part) for part in healthy)
        return self._parts[slices]

    def _worse_s(self, piece: float, slices: int) -> float:
        """Return what slow wires add to the price."""
        now, before = self._under_way(slices), self._phases(slices)
        if all(part is healthy for part, healthy in zip(now, before, strict=True)):
            return 0.0
        now_s, before_s = ([part.total_s(piece) for part in parts] for parts in (now, before))
        return pipeline_s(now_s, slices) - pipeline_s(before_s, slices)

    def _needs(self) -> tuple[Ints, Floats]:
        """Return what is busy, and for how many nanoseconds for each byte; however the data is cut."""
        if self._needed is None:
            steps = [(part, one) for part in self._under_way(1) for one in part.placed.each]
            wires = np.zeros(max((len(one.load_s_per_byte) for _, one in steps), default=0))
            touched = np.zeros(len(self.ranks))
            for part, one in steps:
                times, r = one.round.repeat * part.share / part.placed.rounds.slots, one.round
                wires[: len(one.load_s_per_byte)] += times * one.load_s_per_byte
                touched += times * (r.moving + r.adding + r.local)
            busy_wires = np.flatnonzero(wires)
            memories, busy_s = self._memories(touched)
            resources = np.concatenate([memories, self._resources.wires(busy_wires)])
            self._needed = resources, np.concatenate([busy_s, wires[busy_wires]]) * 1e9
        return self._needed

    def _memories(self, touched: Floats) -> tuple[Ints, Floats]:
        parts = self._under_way(1)
        rate = parts[0].placed.placement.memory_bytes_per_s if parts else None
        if rate is None:
            return np.zeros(0, np.int64), np.zeros(0)
        memories, which = np.unique(self._resources.memories(self.ranks), return_inverse=True)
        bytes_touched = np.bincount(which, touched, len(memories))
        return memories, bytes_touched / (rate * parts[0].placed.parameters.memory_efficiency)


def _ns(duration_s: Floats) -> Ints:
    return np.rint(duration_s * 1e9).astype(np.int64)


def _under(slow: SlowWires, part: Part) -> Part:
    placed = part.placed
    placement = slow.under(placed.placement)
    if placement is placed.placement:
        return part
    return Part(on(placement, placed.rounds, parameters=placed.parameters), part.share)
