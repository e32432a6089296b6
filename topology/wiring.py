"""The wires of one node as a graph of devices: neighbours, shortest ways, bisection."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

from .grid import Grid, open_grid, torus
from .machine import WiringSpec

_EXHAUSTIVE_DEVICES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """A graph of `devices` vertices."""

    devices: int  # how many
    grid: Grid | None = None  # its coordinates where it is a torus, ring, chain or open grid
    complete: bool = False  # every pair has a wire, or a way through one switch
    switched: bool = False  # devices reach each other through a switch, so a device's one port limits all its traffic
    # per device, ascending; empty for complete graphs, which may be large.
    neighbours: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, wires: WiringSpec, devices: int) -> Wiring:
        """Build the graph that a machine file describes; it may be disconnected."""
        if wires.shape in ("full", "switch"):
            return cls(devices=devices, complete=True, switched=wires.shape == "switch")
        if wires.dims:
            grid = (torus if wires.shape in ("ring", "torus") else open_grid)(*wires.dims)
            return cls(devices=devices, grid=grid, neighbours=tuple(grid.neighbours(d) for d in range(devices)))
        joined: list[set[int]] = [set() for _ in range(devices)]
        for first, second in wires.pairs:
            joined[first].add(second)
            joined[second].add(first)
        return cls(devices=devices, neighbours=tuple(tuple(sorted(others)) for others in joined))

    def adjacent(self, device: int) -> tuple[int, ...]:
        """List the devices one hop away."""
        if self.complete:
            return tuple(other for other in range(self.devices) if other != device)
        return self.neighbours[device]

    def linked(self, a: int, b: int) -> bool:
        """Tell whether two different devices are one hop apart."""
        return a != b and (self.complete or b in self.neighbours[a])

    def path(self, src: int, dst: int) -> tuple[int, ...]:
        """List the devices on a shortest way, both ends included.

        On grids the fastest axis comes first (see `Grid.path`); elsewhere, of equally short ways, the one through
        the lowest numbers.

        Raises:
            ValueError: if no way exists, which a checked machine file rules out.
        """
        if src == dst or self.complete:
            return (src,) if src == dst else (src, dst)
        if self.grid is not None:
            return self.grid.path(src, dst)
        towards = _distances(self, dst)
        if towards[src] < 0:
            raise ValueError(f"no way from device {src} to device {dst}")
        way = [src]
        while way[-1] != dst:
            way.append(next(other for other in self.neighbours[way[-1]] if towards[other] == towards[way[-1]] - 1))
        return tuple(way)

    def distance(self, src: int, dst: int) -> int | None:
        """Count the hops of a shortest way, None if there is none."""
        if src == dst or self.complete:
            return int(src != dst)
        hops = _distances(self, dst)[src]
        return None if hops < 0 else hops

    def unreached(self) -> tuple[int, ...]:
        """List the devices that no way joins to device 0: none in a connected graph."""
        if self.complete:
            return ()
        return tuple(device for device, hops in enumerate(_distances(self, 0)) if hops < 0)

    def bisection_wires(self) -> int:
        """Count the wires, one way, that join two halves of the devices where the cut is smallest.

        Exact for grids with even sides, complete graphs, and any graph of up to 16 devices; for larger irregular
        ones it is the cut between the lower and the upper half of the numbers, which is an upper bound. Behind a
        switch, ports count instead of wires.
        """
        half = self.devices // 2
        if self.complete:
            return half if self.switched else half * (self.devices - half)
        if self.grid is not None:
            return self.grid.cut_wires() if self.devices > 1 else 0
        if self.devices > _EXHAUSTIVE_DEVICES:
            return self._cut(frozenset(range(half)))
        return min(self._cut(frozenset(part)) for part in combinations(range(self.devices), half))

    def _cut(self, part: frozenset[int]) -> int:
        return sum(other not in part for device in part for other in self.neighbours[device])


@lru_cache(maxsize=4096)
def _distances(wiring: Wiring, goal: int) -> tuple[int, ...]:
    hops = [-1] * wiring.devices
    hops[goal], reached = 0, [goal]
    for device in reached:
        for other in wiring.neighbours[device]:
            if hops[other] < 0:
                hops[other] = hops[device] + 1
                reached.append(other)
    return tuple(hops)
