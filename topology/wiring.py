"""The wires of one node as a graph of devices, and coordinates on tori and open grids. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import combinations
from math import prod

from .machine import WiringSpec

_EXHAUSTIVE_DEVICES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A grid of positions, numbered row by row: with dims (4, 4), position 5 is in row 1 and column 1."""

    dims: tuple[int, ...]  # length of each side, the slowest first
    wraps: tuple[bool, ...]  # for each side, whether it closes to a ring

    @property
    def size(self) -> int:
        """Number of positions."""
        return prod(self.dims)

    def coordinates(self, index: int) -> tuple[int, ...]:
        """Return the coordinates of a position."""
        coordinates = []
        for side in reversed(self.dims):
            index, place = divmod(index, side)
            coordinates.append(place)
        return tuple(reversed(coordinates))

    def index(self, coordinates: tuple[int, ...]) -> int:
        """Return the position with these coordinates."""
        index = 0
        for side, place in zip(self.dims, coordinates, strict=True):
            index = index * side + place
        return index

    def moved(self, index: int, axis: int, by: int) -> int | None:
        """Return the position `by` steps from `index` along an axis, None beyond the edge of an open side."""
        coordinates = list(self.coordinates(index))
        coordinates[axis] += by
        if self.wraps[axis]:
            coordinates[axis] %= self.dims[axis]
        elif not 0 <= coordinates[axis] < self.dims[axis]:
            return None
        return self.index(tuple(coordinates))

    def neighbours(self, index: int) -> tuple[int, ...]:
        """Return the positions one wire away, each once, ascending. A ring of 2 positions has one wire, not two."""
        moves = (self.moved(index, axis, by) for axis in range(len(self.dims)) for by in (-1, 1))
        return tuple(sorted({other for other in moves if other is not None and other != index}))

    def path(self, src: int, dst: int) -> tuple[int, ...]:
        """Return the positions on a shortest way, including both ends; it goes along the fastest axis first.

        On a ring of even length, the opposite position is equally far in both directions: from an even coordinate the
        way goes up, from an odd one down, so that a shift by half a ring uses both directions.
        """
        position, way = src, [src]
        for axis in reversed(range(len(self.dims))):
            start, goal = self.coordinates(src)[axis], self.coordinates(dst)[axis]
            for _ in range(abs(delta := self._axis_steps(axis, start, goal))):
                moved = self.moved(position, axis, 1 if delta > 0 else -1)
                assert moved is not None
                position = moved
                way.append(position)
        return tuple(way)

    def distance(self, src: int, dst: int) -> int:
        """Count the wires on a shortest way."""
        return sum(
            abs(self._axis_steps(axis, start, goal))
            for axis, (start, goal) in enumerate(zip(self.coordinates(src), self.coordinates(dst), strict=True))
        )

    def _axis_steps(self, axis: int, start: int, goal: int) -> int:
        """Return the steps along an axis from start to goal, negative if downwards; on a ring, of the shorter way."""
        side, straight = self.dims[axis], goal - start
        if not self.wraps[axis]:
            return straight
        up = straight % side
        down = up - side
        if up == -down:
            return up if start % 2 == 0 else down
        return up if up < -down else down

    def cut_wires(self) -> int:
        """Return the number of wires across the smallest cut that halves a side.

        With an even side, this is the bisection of the grid. If every side is odd there is no exact half: then it is
        the cut next to the middle of a side. The grid must have more than one position.
        """
        even = [axis for axis, side in enumerate(self.dims) if side % 2 == 0]
        axes = even or [axis for axis, side in enumerate(self.dims) if side > 1]
        return min(
            # The cut of a ring goes through two wires.
            self.size // self.dims[axis] * (2 if self.wraps[axis] and self.dims[axis] > 2 else 1)
            for axis in axes
        )


@cache
def torus(*dims: int) -> Grid:
    """Make a grid with all sides closed to rings."""
    return Grid(dims=dims, wraps=(True,) * len(dims))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The wires between the devices of a node, as a graph."""

    devices: int  # number of devices
    grid: Grid | None = None  # coordinates of the devices, if the graph is a torus, ring, chain or open grid
    complete: bool = False  # whether every pair has a wire, or a way through one switch
    switched: bool = False  # whether devices are joined by a switch, so that one port limits all traffic of a device
    # neighbours of each device, ascending; empty for complete graphs, which may be large.
    neighbours: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @classmethod
    @lru_cache(maxsize=256)
    def from_spec(cls, wires: WiringSpec, devices: int) -> Wiring:
        """Build the graph that a machine file describes; it may be disconnected.

        Args:
            wires: the wires, as in the file.
            devices: number of devices in a node.
        """
        if wires.shape in ("full", "switch"):
            return cls(devices=devices, complete=True, switched=wires.shape == "switch")
        if sides := wires.sides(devices):
            grid = Grid(dims=sides, wraps=(wires.shape in ("ring", "torus"),) * len(sides))
            return cls(devices=devices, grid=grid, neighbours=tuple(grid.neighbours(d) for d in range(devices)))
        joined: list[set[int]] = [set() for _ in range(devices)]
        for first, second in wires.pairs:
            joined[first].add(second)
            joined[second].add(first)
        return cls(devices=devices, neighbours=tuple(tuple(sorted(others)) for others in joined))

    def adjacent_devices(self, device: int) -> tuple[int, ...]:
        """List the devices one hop away, in ascending order."""
        if self.complete:
            return tuple(other for other in range(self.devices) if other != device)
        return self.neighbours[device]

    def are_adjacent(self, a: int, b: int) -> bool:
        """Whether two different devices are one hop apart."""
        return a != b and (self.complete or b in self.neighbours[a])

    def path(self, src: int, dst: int) -> tuple[int, ...]:
        """Return the devices on a shortest way, including both ends.

        For the way on a grid see `Grid.path`. Otherwise, of equally short ways, it is that with the lowest numbers.

        Raises:
            ValueError: There is no way; a checked machine file excludes that.
        """
        if src == dst or self.complete:
            return (src,) if src == dst else (src, dst)
        if self.grid is not None:
            return self.grid.path(src, dst)
        towards = _count_hops_to(self, dst)
        if towards[src] < 0:
            raise ValueError(
                f"no wires lead from device {src} to device {dst}; add wires between the parts of the machine: in its "
                "file, to wires.pairs"
            )
        way = [src]
        while way[-1] != dst:
            way.append(next(other for other in self.neighbours[way[-1]] if towards[other] == towards[way[-1]] - 1))
        return tuple(way)

    def distance(self, src: int, dst: int) -> int | None:
        """Count the hops of a shortest way, None if there is none."""
        if src == dst or self.complete:
            return int(src != dst)
        hops = _count_hops_to(self, dst)[src]
        return None if hops < 0 else hops

    def unreachable_devices(self) -> tuple[int, ...]:
        """Return the devices without a way to device 0: none in a connected graph."""
        if self.complete:
            return ()
        return tuple(device for device, hops in enumerate(_count_hops_to(self, 0)) if hops < 0)

    def count_bisection_wires(self) -> int:
        """Return the number of wires across the smallest cut of the devices into halves.

        It is exact for grids with an even side, complete graphs, and any graph of up to 16 devices. For larger
        irregular graphs it is the cut between the lower and the upper half of the numbers, an upper bound. Behind a
        switch, ports count instead of wires.
        """
        half = self.devices // 2
        if self.complete:
            return half if self.switched else half * (self.devices - half)
        if self.grid is not None:
            return self.grid.cut_wires() if self.devices > 1 else 0
        if self.devices > _EXHAUSTIVE_DEVICES:
            return self._count_wires_out(frozenset(range(half)))
        return min(self._count_wires_out(frozenset(part)) for part in combinations(range(self.devices), half))

    def _count_wires_out(self, part: frozenset[int]) -> int:
        return sum(other not in part for device in part for other in self.neighbours[device])


@lru_cache(maxsize=4096)
def _count_hops_to(wiring: Wiring, goal: int) -> tuple[int, ...]:
    """Return the number of hops from each device to a goal; -1 for a device without a way."""
    hops = [-1] * wiring.devices
    hops[goal], reached = 0, [goal]
    for device in reached:  # breadth first; the list grows in the loop
        for other in wiring.neighbours[device]:
            if hops[other] < 0:
                hops[other] = hops[device] + 1
                reached.append(other)
    return tuple(hops)
