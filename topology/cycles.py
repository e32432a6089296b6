"""Edge-disjoint Hamiltonian cycles: rings that visit each device once and share no wire.

Three methods: zigzags for complete graphs (Walecki, 1892); exhaustive search for up to 16 vertices; for larger tori,
merging of the rings along the axes, which already use every wire once, to one ring for each axis.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

Graph = Mapping[int, Sequence[int]]
Cycle = tuple[int, ...]

MAX_CYCLES = 16
"""Rings reported for a complete graph; more channels than any collective library opens."""

_SEARCH_VERTICES = 16  # most vertices of a graph that is searched, if its axes could be merged instead
_SEARCH_STEPS = 200_000  # most steps of a search for a number of cycles
_MERGE_STEPS = 2_000_000  # most exchanges of colours


def zigzag_cycles(vertices: Sequence[int]) -> tuple[Cycle, ...]:
    """Return (n-1)//2 edge-disjoint Hamiltonian cycles of the complete graph of n vertices, at most `MAX_CYCLES`.

    Every cycle begins at the first vertex, the hub. Number the other vertices from 0: cycle i then visits i, i+1, i-1,
    i+2, ... (modulo n-1). In cycle i the numbers at the ends of each edge sum to 2i or 2i+1, so no two cycles share an
    edge.

    >>> zigzag_cycles(range(5))
    ((0, 1, 2, 4, 3), (0, 2, 3, 1, 4))
    """
    hub, *outer = vertices
    count_outer = len(outer)
    if count_outer < 2:
        return (tuple(vertices),)
    steps = [(step + 1) // 2 * (1 if step % 2 else -1) for step in range(count_outer)]
    count = min(count_outer // 2, MAX_CYCLES)
    return tuple((hub, *(outer[(start + step) % count_outer] for step in steps)) for start in range(count))


def disjoint_cycles(graph: Graph, factors: Sequence[Sequence[Cycle]] = ()) -> tuple[Cycle, ...]:
    """Find as many edge-disjoint Hamiltonian cycles as possible: at most half the smallest degree of a vertex.

    Args:
        graph: neighbours of each vertex.
        factors: for graphs of more than 16 vertices, sets of rings, each of which covers every vertex. The rings of one
            set are merged to one cycle. No two sets share an edge.

    Returns:
        Cycles, each starting at the lowest vertex; empty if there are none, or if none was found in the given steps.
        A single vertex is a ring, and two linked vertices are a ring that uses both directions of their wire.
    """
    vertices = sorted(graph)
    if len(vertices) < 3:
        return (tuple(vertices),) if len(vertices) == 1 or vertices[1] in graph[vertices[0]] else ()
    if len(vertices) > _SEARCH_VERTICES and factors:
        return _merge_rings(graph, factors)
    for count in range(min(map(len, graph.values())) // 2, 0, -1):
        # The steps that are left, in a list, so that all levels of the recursion change the same number.
        budget = [_SEARCH_STEPS]
        if cycles := _find_disjoint_cycles(
            {vertex: set(neighbours) for vertex, neighbours in graph.items()}, count, budget
        ):
            return tuple(cycles)
    return ()


def _find_disjoint_cycles(graph: dict[int, set[int]], count: int, budget: list[int]) -> list[Cycle] | None:
    """Return `count` edge-disjoint Hamiltonian cycles of a graph; None if there are none, or the budget is spent.

    `budget` is one number, the steps that are left; each step of the search takes one off.
    """
    if count == 0:
        return []
    for cycle in _search_cycles(graph, [min(graph)], budget):
        rest = {vertex: set(neighbours) for vertex, neighbours in graph.items()}
        for a, b in cycle_edges(cycle):
            rest[a].discard(b)
            rest[b].discard(a)
        if (cycles := _find_disjoint_cycles(rest, count - 1, budget)) is not None:
            return [cycle, *cycles]
    return None


def _search_cycles(graph: dict[int, set[int]], path: list[int], budget: list[int]) -> Iterator[Cycle]:
    """Yield Hamiltonian cycles that begin with `path`, in lexicographic order, until the budget of steps is spent.

    `path` begins with the lowest vertex. It is changed while the search runs, and restored. For `budget` see
    `_find_disjoint_cycles`.
    """
    if len(path) == len(graph):
        # The path must close, and of the two directions of a cycle, only the one with the lower second vertex counts.
        if path[0] in graph[path[-1]] and path[1] < path[-1]:
            yield tuple(path)
        return
    for vertex in sorted(graph[path[-1]].difference(path)):
        if budget[0] <= 0:
            return
        budget[0] -= 1
        path.append(vertex)
        yield from _search_cycles(graph, path, budget)
        path.pop()


def cycle_edges(cycle: Cycle) -> list[tuple[int, int]]:
    """List the edges of a cycle as pairs in its direction."""
    return list(zip(cycle, cycle[1:] + cycle[:1], strict=True))


Colours = dict[frozenset[int], int]
"""The colour of each edge, which is a set of two vertices; edges without a colour are left out."""


def _merge_rings(graph: Graph, factors: Sequence[Sequence[Cycle]]) -> tuple[Cycle, ...]:
    """Merge the rings of each factor into one cycle, by exchanging colours in squares; return the cycles.

    The edges of each factor have one colour. If the four edges of a square have the colours A, B, A, B, an exchange of
    A and B leaves two edges of each colour at every vertex, but joins or splits rings. Random exchanges that never
    raise the number of rings lead to one ring for each colour. A colour that still has several rings in the end has no
    cycle in the result.
    """
    colours: Colours = {
        frozenset(edge): colour for colour, rings in enumerate(factors) for ring in rings for edge in cycle_edges(ring)
    }
    squares = _find_squares(graph)
    pick = random.Random(0)
    # Number of rings of each colour.
    counts = [len(rings) for rings in factors]
    for _ in range(_MERGE_STEPS):
        if all(count == 1 for count in counts):
            break
        counts = _exchange_colours(colours, pick.choice(squares), counts, graph)
    return tuple(
        cycle
        for colour in range(len(factors))
        if len(cycle := _find_cycle_of_colour(colours, colour, min(graph), graph)) == len(graph)
    )


def _find_squares(graph: Graph) -> list[tuple[frozenset[int], ...]]:
    """Return each cycle of four vertices, as its four edges in order."""
    corners = {
        (a, b, c, d)
        for a in graph
        for b in graph[a]
        for c in graph[b]
        for d in graph[c]
        # Each square once: it begins at its lowest corner, and continues with the lower of the two neighbours.
        if d in graph[a] and a == min(a, b, c, d) and b < d and c != a
    }
    return [tuple(frozenset(side) for side in cycle_edges(square)) for square in sorted(corners)]


def _exchange_colours(
    colours: Colours, square: tuple[frozenset[int], ...], counts: list[int], graph: Graph
) -> list[int]:
    """Exchange the two colours of a square, unless that makes more rings; return the new number of rings by colour.

    `colours` is changed. `square` has the four edges in order.
    """
    even, odd, even2, odd2 = (colours.get(side) for side in square)
    # Opposite edges must have the same colour, and neighbouring ones different colours. No colour, None, counts as one.
    if even != even2 or odd != odd2 or even == odd:
        return counts
    _colour_edges(colours, square, odd, even)
    new = [
        _count_rings(colours, colour, graph) if colour in (even, odd) else count for colour, count in enumerate(counts)
    ]
    if sum(new) <= sum(counts):
        return new
    _colour_edges(colours, square, even, odd)
    return counts


def _colour_edges(colours: Colours, square: tuple[frozenset[int], ...], even: int | None, odd: int | None) -> None:
    """Give the edges of a square two colours in turn, in `colours`; None removes the colour of an edge."""
    for side, colour in zip(square, (even, odd, even, odd), strict=True):
        if colour is None:
            colours.pop(side, None)
        else:
            colours[side] = colour


def _count_rings(colours: Colours, colour: int, graph: Graph) -> int:
    """Count the separate cycles that the edges of one colour make; every vertex has two edges of it."""
    remaining, count = set(graph), 0
    while remaining:
        remaining -= set(_find_cycle_of_colour(colours, colour, next(iter(remaining)), graph))
        count += 1
    return count


def _find_cycle_of_colour(colours: Colours, colour: int, start: int, graph: Graph) -> Cycle:
    """Return the cycle that the edges of one colour make from `start` on; every vertex has two edges of it."""
    cycle, previous = [start], -1
    while True:
        vertex = cycle[-1]
        # At the first vertex there are two edges of the colour: take that to the lower neighbour. At later vertices one
        # is left.
        following = min(v for v in graph[vertex] if v != previous and colours.get(frozenset((vertex, v))) == colour)
        if following == start:
            return tuple(cycle)
        previous = vertex
        cycle.append(following)
