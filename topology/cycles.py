"""Edge-disjoint Hamiltonian cycles: the rings that a set of devices holds.

Three methods: zigzags for complete graphs (Walecki, 1892), exhaustive search up to 16
vertices, and for larger tori the merging of their axes, whose rings already use every wire once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

Graph = Mapping[int, Sequence[int]]
Cycle = tuple[int, ...]

MAX_CYCLES = 16
"""Rings reported for a complete graph; more channels than any collective library opens."""

_SEARCH_VERTICES = 16
_SEARCH_STEPS = 200_000
_MERGE_STEPS = 2_000_000


def zigzag_cycles(vertices: Sequence[int]) -> tuple[Cycle, ...]:
    """Cut a complete graph of n vertices in (n-1)//2 edge-disjoint Hamiltonian cycles, at most `MAX_CYCLES` of them.

    The first vertex is the hub; cycle i visits i, i+1, i-1, i+2, ... of the others. Both ends of each of its edges sum
    to 2i or 2i+1, so no two cycles share one.
    """
    hub, *outer = vertices
    count_outer = len(outer)
    if count_outer < 2:
        return (tuple(vertices),)
    steps = [(step + 1) // 2 * (1 if step % 2 else -1) for step in range(count_outer)]
    count = min(count_outer // 2, MAX_CYCLES)
    return tuple((hub, *(outer[(start + step) % count_outer] for step in steps)) for start in range(count))


def disjoint_cycles(graph: Graph, factors: Sequence[Sequence[Cycle]] = ()) -> tuple[Cycle, ...]:
    """Find edge-disjoint Hamiltonian cycles: as many as possible, at most half the smallest degree.

    Args:
        graph: neighbours of each vertex.
        factors: for graphs of more than 16 vertices, disjoint sets of rings to be merged; each set covers every
               vertex.

    Returns:
        Cycles, each starting at the lowest vertex; none if there are none, or (beyond 16 vertices) none was found.
        One vertex is a ring of its own, and two that are linked are a ring that uses both directions of their wire.
    """
    vertices = sorted(graph)
    if len(vertices) < 3:
        return (tuple(vertices),) if len(vertices) == 1 or vertices[1] in graph[vertices[0]] else ()
    if len(vertices) > _SEARCH_VERTICES and factors:
        return _merge_rings(graph, factors)
    for count in range(min(map(len, graph.values())) // 2, 0, -1):
        budget = [_SEARCH_STEPS]
        if cycles := _find_disjoint({vertex: set(neighbours) for vertex, neighbours in graph.items()}, count, budget):
            return tuple(cycles)
    return ()


def _find_disjoint(graph: dict[int, set[int]], count: int, budget: list[int]) -> list[Cycle] | None:
    """Return `count` edge-disjoint Hamiltonian cycles of a graph, or None; `budget` limits the steps."""
    if count == 0:
        return []
    for cycle in _search_cycles(graph, [min(graph)], budget):
        rest = {vertex: set(neighbours) for vertex, neighbours in graph.items()}
        for a, b in edges(cycle):
            rest[a].discard(b)
            rest[b].discard(a)
        if (cycles := _find_disjoint(rest, count - 1, budget)) is not None:
            return [cycle, *cycles]
    return None


def _search_cycles(graph: dict[int, set[int]], path: list[int], budget: list[int]) -> Iterator[Cycle]:
    """Yield Hamiltonian cycles in lexicographic order, each in one direction, until the budget of steps is spent."""
    if len(path) == len(graph):
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


def edges(cycle: Cycle) -> list[tuple[int, int]]:
    """List the edges of a cycle as pairs in its direction."""
    return list(zip(cycle, cycle[1:] + cycle[:1], strict=True))


Colours = dict[frozenset[int], int]


def _merge_rings(graph: Graph, factors: Sequence[Sequence[Cycle]]) -> tuple[Cycle, ...]:
    """Merge the rings of each factor into one by recolouring squares.

    In a square of colours A, B, A, B, exchanging the colours leaves every vertex its two
    edges of each colour, and joins or splits rings. Random exchanges that never raise the number of rings lead to
    one ring per colour.
    """
    colours: Colours = {
        frozenset(edge): colour for colour, rings in enumerate(factors) for ring in rings for edge in edges(ring)
    }
    squares = _find_squares(graph)
    pick = random.Random(0)
    counts = [len(rings) for rings in factors]
    for _ in range(_MERGE_STEPS):
        if all(count == 1 for count in counts):
            break
        counts = _exchange_colours(colours, pick.choice(squares), counts, graph)
    return tuple(
        cycle
        for colour in range(len(factors))
        if len(cycle := _follow_colour(colours, colour, min(graph), graph)) == len(graph)
    )


def _find_squares(graph: Graph) -> list[tuple[frozenset[int], ...]]:
    corners = {
        (a, b, c, d)
        for a in graph
        for b in graph[a]
        for c in graph[b]
        for d in graph[c]
        if d in graph[a] and a == min(a, b, c, d) and b < d and c != a
    }
    return [tuple(frozenset(side) for side in edges(square)) for square in sorted(corners)]


def _exchange_colours(
    colours: Colours, square: tuple[frozenset[int], ...], counts: list[int], graph: Graph
) -> list[int]:
    """Exchange the two colours of a square, unless that makes more rings; return the rings of each colour."""
    even, odd, even2, odd2 = (colours.get(side) for side in square)
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
    """Give the edges of a square two colours in turn; None removes an edge."""
    for side, colour in zip(square, (even, odd, even, odd), strict=True):
        if colour is None:
            colours.pop(side, None)
        else:
            colours[side] = colour


def _count_rings(colours: Colours, colour: int, graph: Graph) -> int:
    remaining, count = set(graph), 0
    while remaining:
        remaining -= set(_follow_colour(colours, colour, next(iter(remaining)), graph))
        count += 1
    return count


def _follow_colour(colours: Colours, colour: int, start: int, graph: Graph) -> Cycle:
    """Return the cycle that the edges of one colour make, from a vertex on."""
    cycle, previous = [start], -1
    while True:
        vertex = cycle[-1]
        following = min(v for v in graph[vertex] if v != previous and colours.get(frozenset((vertex, v))) == colour)
        if following == start:
            return tuple(cycle)
        previous = vertex
        cycle.append(following)
