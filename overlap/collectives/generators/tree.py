"""Trees for rooted collectives and for small all-reduces. Ranks are counted from the root."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..pattern import Ints, Pattern, edge_pattern
from ..schedule import Buffer, Schedule
from ..tablewriter import TableWriter


def binomial(size: int, root: int = 0) -> Pattern:
    """Double the number of ranks with the data in every step.

    Cost: ceil(log2(size)) steps; n bytes per edge, up to n log2(size) sent by the root.
    """
    parent = [(step, v, v + (1 << step)) for step in range((size - 1).bit_length()) for v in range(1 << step)]
    step, src, dst = _edge_columns([edge for edge in parent if edge[2] < size])
    return _rooted_pattern(size, root, 1, step, src, dst, 0)


def chain(size: int, root: int = 0, *, slices: int = 8) -> Pattern:
    """Pass slice after slice from neighbour to neighbour.

    Cost: size - 2 + slices steps of n / slices bytes; n bytes sent per rank.
    """
    v = np.arange(size - 1, dtype=np.int32)
    slice_ = np.arange(slices, dtype=np.int32)[:, None]
    return _rooted_pattern(size, root, slices, v + slice_, v, v + 1, slice_)


def binary_tree(size: int, root: int = 0, *, slices: int = 8) -> Pattern:
    """Pass slice after slice down a binary tree, first to one child, then to the other.

    Cost: at most 2 ceil(log2(size)) + 2 slices steps of n / slices bytes; up to 2 n bytes sent per rank.
    """
    # A parent sends to its first child one step after a slice arrives, to its second one two steps after.
    arrival = [0] * size
    for child in range(1, size):
        arrival[child] = arrival[(child - 1) // 2] + 2 - child % 2
    dst = np.arange(1, size, dtype=np.int32)
    slice_ = np.arange(slices, dtype=np.int32)[:, None]
    step = np.asarray(arrival[1:], np.int32) - 1 + 2 * slice_
    return _rooted_pattern(size, root, slices, step, (dst - 1) // 2, dst, slice_)


def _edge_columns(edges: list[tuple[int, int, int]]) -> tuple[Ints, Ints, Ints]:
    table = np.asarray(edges, np.int32).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _rooted_pattern(size: int, root: int, slices: int, step: Ints, src: Ints, dst: Ints, chunk: Ints | int) -> Pattern:
    """Return the pattern of edges whose ends count from the root."""
    owner = np.full(slices, root, np.int32)
    return edge_pattern(size, owner, step, (src + root) % size, (dst + root) % size, chunk)


def subtrees(size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the edges of a binomial tree, largest subtrees first: step, parent, child, ranks under the child."""
    steps = (size - 1).bit_length()
    edges = [
        (steps - 1 - bit, v, v + (1 << bit))
        for bit in range(steps - 1, -1, -1)
        for v in range(0, size, 2 << bit)
        if v + (1 << bit) < size
    ]
    step, parent, child = _edge_columns(edges)
    return step, parent, child, np.minimum(np.int32(1) << (steps - 1 - step), size - child)


def scatter(size: int, *, root: int = 0) -> Schedule:
    """Halve the blocks of each message with every step.

    Cost: ceil(log2(size)) steps; n (size - 1) / size bytes sent by the root.
    """
    table = TableWriter()
    step, parent, child, count = subtrees(size)
    position = np.arange(size, dtype=np.int32)
    slot_in = (child + root) % size
    # The root's blocks are in order of ranks, which may wrap around; all others count from the root.
    for part, length in ((0, np.minimum(count, size - slot_in)), (1, count - (size - slot_in))):
        rows = (parent == 0) & (length > 0)
        start = slot_in[rows] if part == 0 else np.zeros_like(slot_in[rows])
        into = child[rows] + (count[rows] - length[rows] if part else 0)
        table.move(
            step[rows], root, (child[rows] + root) % size, (Buffer.IN, start), (Buffer.SCRATCH, into),
            count=length[rows],
        )  # fmt: skip
    rest = parent > 0
    table.move(
        step[rest], (parent[rest] + root) % size, (child[rest] + root) % size,
        (Buffer.SCRATCH, child[rest]), (Buffer.SCRATCH, child[rest]), count=count[rest],
    )  # fmt: skip
    steps = (size - 1).bit_length()
    others = (position[1:] + root) % size
    table.move(0, root, root, (Buffer.IN, root), (Buffer.OUT, 0))
    table.move(steps, others, others, (Buffer.SCRATCH, position[1:]), (Buffer.OUT, 0))
    return table.build("scatter", "binomial", size, root=root, scratch=size)


_Tree = dict[int, int]


def from_root(size: int, root: int = 0, *, slices: int = 8) -> Pattern:
    """Pass slices down two trees over all ranks but the root, which feeds both in turn.

    Cost: at most 2 ceil(log2(size)) + 2 slices steps of n / (2 slices) bytes; n bytes sent by the root and by inner
    ranks, one message in and one out at a time.

    Args:
        size: Ranks.
        root: Rank that has the data.
        slices: Pieces of each half.
    """
    # Node 0 is the root, the others are places 1, 2, ... in the order of ranks.
    trees = [{node: max(parent, 0) for node, parent in tree.items()} for tree in _make_two_trees(size - 1)]
    return _join_trees(size, trees, np.full(2, root, np.int32), root, slices)


def over_all(size: int, *, slices: int = 8) -> Pattern:
    """Return the pattern of an all-reduce: slices travel down two trees over all ranks, with different roots.

    Cost: at most 2 ceil(log2(size)) + 2 slices steps of n / (2 slices) bytes each way; at most 2 n bytes sent by any
    rank both ways together, for inner ranks send two halves down one tree, and one up in each.

    Args:
        size: Ranks.
        slices: Pieces of each half.
    """
    trees, tops = [], []
    for tree in _make_two_trees(size):
        top = next(node for node, parent in tree.items() if not parent)
        trees.append({node - 1: parent - 1 for node, parent in tree.items() if node != top})
        tops.append(top - 1)
    return _join_trees(size, trees, np.asarray(tops, np.int32), 0, slices)


def _make_two_trees(places: int) -> tuple[_Tree, _Tree]:
    """Return the parent of each of the places 1, 2, ... in both trees; 0 for the top."""
    first = {place: _parent(place, places) for place in range(1, places + 1)}
    # Odd places, which are leaves, must become even ones.
    at = {node: places + 1 - node if places % 2 == 0 else node % places + 1 for node in first}
    node_at = {0: 0, **{place: node for node, place in at.items()}}
    return first, {node: node_at[first[at[node]]] for node in first}


def _parent(place: int, places: int) -> int:
    """Return the parent of a place, from 1 on, in an in-order binary tree of that many places."""
    lowest = place & -place
    above = place ^ lowest | lowest << 1
    return above if above <= places else place ^ lowest


def _join_trees(size: int, trees: Sequence[_Tree], owners: Ints, root: int, slices: int) -> Pattern:
    """Return both trees with times such that a rank receives and sends one message a step."""
    turn = _edge_turns(trees)
    edges = []
    for which, tree in enumerate(trees):
        when: dict[int, int] = {}
        for node in tree:
            _arrival_steps(node, tree, which, turn, when)
        # Rows are (step of the first slice, src, dst, tree).
        edges += [(when[node], parent, node, which) for node, parent in tree.items()]
    step, src, dst, half = np.asarray(edges, np.int32).reshape(-1, 4).T
    slice_ = np.arange(slices, dtype=np.int32)[:, None]
    chunk = half * np.int32(slices) + slice_
    src, dst = (src + root) % size, (dst + root) % size
    return edge_pattern(size, np.repeat(owners, slices), step + 2 * slice_, src, dst, chunk, channel=half)


def _arrival_steps(node: int, tree: _Tree, which: int, turn: dict[tuple[int, int], int], when: dict[int, int]) -> int:
    """Return the step in which a node gets the first slice; -1 for a top, which has it."""
    if node not in tree:
        return -1
    if node not in when:
        next_step = _arrival_steps(tree[node], tree, which, turn, when) + 1
        when[node] = next_step + (next_step + turn[which, node]) % 2
    return when[node]


def _edge_turns(trees: Sequence[_Tree]) -> dict[tuple[int, int], int]:
    """Return for each edge, named by its tree and its lower end, whether it works in even (0) or odd (1) steps.

    Edges that leave one node, or end in one node, must differ. Each edge has at most one of either kind to differ from,
    so going round from edge to edge, the kinds alternate: all circles are even, and two turns suffice.
    """
    leaving: dict[int, list[tuple[int, int]]] = {}
    for which, tree in enumerate(trees):
        for node, parent in tree.items():
            leaving.setdefault(parent, []).append((which, node))
    sibling = {a: b for pair in leaving.values() if len(pair) == 2 for a, b in (pair, pair[::-1])}
    turn: dict[tuple[int, int], int] = {}
    for which, tree in enumerate(trees):
        for node in tree:
            stack = [((which, node), 0)] if (which, node) not in turn else []
            while stack:
                edge, now = stack.pop()
                if edge not in turn:
                    turn[edge] = now
                    other = (1 - edge[0], edge[1])
                    stack += [
                        (e, 1 - now) for e in (sibling.get(edge), other if edge[1] in trees[other[0]] else None) if e
                    ]
    return turn
