"""Coordinates on tori and open grids: rows, neighbours, shortest ways. Pure arithmetic on small tuples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sides of a grid, slowest first, and which of them close to a ring.

    Position i has the row-major coordinates of i: on dims (4, 4), 5 is row 1, column 1.
    """

    dims: tuple[int, ...]
    wraps: tuple[bool, ...]

    @property
    def size(self) -> int:
        """Number of positions."""
        return prod(self.dims)

    def coordinates(self, index: int) -> tuple[int, ...]:
        """Give the coordinates of a position."""
        found = []
        for side in reversed(self.dims):
            index, place = divmod(index, side)
            found.append(place)
        return tuple(reversed(found))

    def index(self, coordinates: tuple[int, ...]) -> int:
        """Give the position of coordinates."""
        index = 0
        for side, place in zip(self.dims, coordinates, strict=True):
            index = index * side + place
        return index

    def moved(self, index: int, axis: int, by: int) -> int | None:
        """Give the position `by` steps away along an axis, None beyond the edge of an open one."""
        place = list(self.coordinates(index))
        place[axis] += by
        if self.wraps[axis]:
            place[axis] %= self.dims[axis]
        elif not 0 <= place[axis] < self.dims[axis]:
            return None
        return self.index(tuple(place))

    def neighbours(self, index: int) -> tuple[int, ...]:
        """List the positions one wire away, each once, ascending; a side of 2 has one wire, not two."""
        moves = (self.moved(index, axis, by) for axis in range(len(self.dims)) for by in (-1, 1))
        return tuple(sorted({other for other in moves if other is not None and other != index}))

    def path(self, src: int, dst: int) -> tuple[int, ...]:
        """List the positions on a shortest way, both ends included, the fastest axis first.

        On an even ring the opposite position is equally far both ways: even places go up and odd ones go down, so
        that a shift by half a ring loads both directions.
        """
        here, way = src, [src]
        for axis in reversed(range(len(self.dims))):
            start, goal = self.coordinates(src)[axis], self.coordinates(dst)[axis]
            for _ in range(abs(delta := self._delta(axis, start, goal))):
                moved = self.moved(here, axis, 1 if delta > 0 else -1)
                assert moved is not None
                here = moved
                way.append(here)
        return tuple(way)

    def distance(self, src: int, dst: int) -> int:
        """Count the wires on a shortest way."""
        return sum(
            abs(self._delta(axis, start, goal))
            for axis, (start, goal) in enumerate(zip(self.coordinates(src), self.coordinates(dst), strict=True))
        )

    def _delta(self, axis: int, start: int, goal: int) -> int:
        side, straight = self.dims[axis], goal - start
        if not self.wraps[axis]:
            return straight
        up = straight % side
        down = up - side
        if up == -down:
            return up if start % 2 == 0 else down
        return up if up < -down else down

    def cut_wires(self) -> int:
        """Count the wires across the smallest cut that halves an axis.

        For even sides this is the bisection of the grid; where every side is odd there is no exact half, and the
        cut next to the middle counts.
        """
        even = [axis for axis, side in enumerate(self.dims) if side % 2 == 0]
        axes = even or [axis for axis, side in enumerate(self.dims) if side > 1]
        return min(
            self.size // self.dims[axis] * (2 if self.wraps[axis] and self.dims[axis] > 2 else 1) for axis in axes
        )


@cache
def torus(*dims: int) -> Grid:
    """Make a grid whose every side closes to a ring."""
    return Grid(dims=dims, wraps=(True,) * len(dims))


@cache
def open_grid(*dims: int) -> Grid:
    """Make a grid with edges."""
    return Grid(dims=dims, wraps=(False,) * len(dims))
