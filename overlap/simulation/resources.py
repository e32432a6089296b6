"""What flows share on a cluster, by number: memories, collective processors, wires. Pure; no Trio."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from topology import Cluster

from ..collectives.placement import shifted

Ints: TypeAlias = NDArray[np.int64]


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

    def wires_among(self, resources: Ints) -> Ints:
        """Return those that are wires."""
        return resources[resources >= self._first_wire]

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
