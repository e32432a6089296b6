"""Trees for rooted collectives and for small all-reduces. Ranks are counted from the root."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..pattern import Ints, Pattern, edge_pattern
from ..schedule import Buffer, Schedule
from ..tablewriter import TableWriter


def binomial(size: int, root: int = 0) -> Pattern:
    """Return the binomial tree: in every step each rank that has the data sends it to one that has not.

    Cost: ceil(log2(size)) steps; n bytes per edge, up to n log2(size) sent by the root.
    """
    parent = [(step, v, v + (1 << step)) for step in range((size - 1).bit_length()) for v in range(1 << step)]
    step, src, dst = _columns_of_edges([edge for edge in parent if edge[2] < size])
    return _rooted_pattern(size, root, 1, step, src, dst, 0)


def chain(size: int, root: int = 0, *, slices: int = 8) -> Pattern:
    """Return the pattern in which slices travel one behind the other from each rank to the next.

    Cost: size - 2 + slices steps of n / slices bytes; n bytes sent per rank.
    """
    v = np.arange(size - 1, dtype=np.int32)
    slice_ = np.arange(slices, dtype=np.int32)[:, None]
    return _rooted_pattern(size, root, slices, v + slice_, v, v + 1, slice_)


def binary_tree(size: int, root: int = 0, *, slices: int = 8) -> Pattern:
    """Return the pattern in which slices travel down a binary tree; a rank sends first to one child, then to the other.

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


def _columns_of_edges(edges: list[tuple[int, int, int]]) -> tuple[Ints, Ints, Ints]:
    """Return the columns step, parent and child of a list of edges (step, parent, child)."""
    table = np.asarray(edges, np.int32).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _rooted_pattern(size: int, root: int, slices: int, step: Ints, src: Ints, dst: Ints, chunk: Ints | int) -> Pattern:
    """Return the pattern of edges between ranks that are counted from the root: 0 is the root, 1 the next rank, ...

    The root owns all chunks, of which there are `slices`.
    """
    owner = np.full(slices, root, np.int32)
    return edge_pattern(size, owner, step, (src + root) % size, (dst + root) % size, chunk)


def binomial_subtrees(size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the edges of a binomial tree, largest subtrees first; the subtree of a child is a range of ranks.

    Returns:
        Columns: step, parent, child, number of ranks in the child's subtree (`child` and the following ranks).
    """
    steps = (size - 1).bit_length()
    edges = [
        (steps - 1 - bit, v, v + (1 << bit))
        for bit in range(steps - 1, -1, -1)
        for v in range(0, size, 2 << bit)
        if v + (1 << bit) < size
    ]
    step, parent, child = _columns_of_edges(edges)
    return step, parent, child, np.minimum(np.int32(1) << (steps - 1 - step), size - child)


def scatter(size: int, *, root: int = 0) -> Schedule:
    """Return the scatter over a binomial tree: each message has the blocks of a whole subtree, half as many each step.

    Cost: ceil(log2(size)) steps; n (size - 1) / size bytes sent by the root.
    """
    table = TableWriter()
    step, parent, child, count = binomial_subtrees(size)
    position = np.arange(size, dtype=np.int32)
    slot_in = (child + root) % size
    # In the root's IN, blocks are in the order of ranks: a subtree may wrap around from the last rank to rank 0, and is
    # then sent in two parts. In SCRATCH, blocks are in the order of ranks counted from the root.
    for part, length in ((0, np.minimum(count, size - slot_in)), (1, count - (size - slot_in))):
        rows = (parent == 0) & (length > 0)
        start = slot_in[rows] if part == 0 else np.zeros_like(slot_in[rows])
        into = child[rows] + (count[rows] - length[rows] if part else 0)
        table.add_moves(
            step[rows], root, (child[rows] + root) % size, (Buffer.IN, start), (Buffer.SCRATCH, into),
            count=length[rows],
        )  # fmt: skip
    rest = parent > 0
    table.add_moves(
        step[rest], (parent[rest] + root) % size, (child[rest] + root) % size,
        (Buffer.SCRATCH, child[rest]), (Buffer.SCRATCH, child[rest]), count=count[rest],
    )  # fmt: skip
    steps = (size - 1).bit_length()
    others = (position[1:] + root) % size
    table.add_moves(0, root, root, (Buffer.IN, root), (Buffer.OUT, 0))
    table.add_moves(steps, others, others, (Buffer.SCRATCH, position[1:]), (Buffer.OUT, 0))
    return table.build("scatter", "binomial", size, root=root, scratch=size)


_Tree = dict[int, int]
"""The parent of each node."""


def double_tree_from_root(size: int, root: int = 0, *, slices: int = 8) -> Pattern:
    """Return the pattern of two trees over all ranks but the root; the root feeds one half of the data into each.

    Cost: at most 2 * ceil(log2(size)) + 2 * slices steps of n / (2 * slices) bytes; n bytes sent by the root and by
    inner ranks, one message in and one out at a time.

    Args:
        size: Ranks.
        root: Rank that has the data.
        slices: Pieces of each half.
    """
    # Node 0 is the root, node i is the rank i places after the root. `_make_two_trees` gives a top the parent 0: here
    # that is the root.
    return _join_trees(size, _make_two_trees(size - 1), np.full(2, root, np.int32), root, slices)


def double_tree_over_all(size: int, *, slices: int = 8) -> Pattern:
    """Return the pattern of an all-reduce: two trees over all ranks with different tops, each for one half of the data.

    Cost: at most 2 * ceil(log2(size)) + 2 * slices steps of n / (2 * slices) bytes each way; at most 2 n bytes sent by
    any rank both ways together: an inner rank sends two halves down the tree in which it is inner, and one up in each
    tree.

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
    """Return two binary trees over nodes 1, 2, ...: the parent of each node, 0 for the top.

    In the first tree odd nodes are leaves. The second has the same shape, with node i in the position of another node:
    mirrored (an even number of nodes) or shifted by one (an odd number). So odd nodes become inner nodes, and at most
    one node is a leaf in both trees. With 4 nodes the parents of 1 to 4 are 2, 4, 2, 0 and 0, 3, 1, 3.
    """
    first = {node: _parent_place(node, places) for node in range(1, places + 1)}
    position = {node: places + 1 - node if places % 2 == 0 else node % places + 1 for node in first}
    node_at = {0: 0, **{place: node for node, place in position.items()}}

    def second_parent(node: int) -> int:
        parent_position = first[position[node]]
        return node_at[parent_position]

    return first, {node: second_parent(node) for node in first}


def _parent_place(place: int, places: int) -> int:
    """Return the parent of place 1 to `places` in a binary tree numbered in order, left to right; 0 for the top.

    With 7 places: 4 is the top, 2 and 6 are its children, and the odd places are leaves.
    """
    # A place 0b...10 (2), with lowest set bit 1 << h, has height h. Its parent has bit h cleared and bit h + 1 set. If
    # there is no such place, the parent is the one with bit h cleared only.
    lowest = place & -place
    above = place ^ lowest | lowest << 1
    return above if above <= places else place ^ lowest


def _join_trees(size: int, trees: Sequence[_Tree], owners: Ints, root: int, slices: int) -> Pattern:
    """Return the pattern of two trees, with steps in which a rank receives at most one message and sends at most one.

    Node i is the rank i places after `root`. `owners` are the ranks at the tops. Each half of the data has `slices`.
    """
    turn = _assign_edge_turns(trees)
    edges = []
    for which, tree in enumerate(trees):
        when: dict[int, int] = {}
        for node in tree:
            _find_arrival_step(node, tree, which, turn, when)
        # Rows are (step of the first slice, src, dst, tree).
        edges += [(when[node], parent, node, which) for node, parent in tree.items()]
    step, src, dst, half = np.asarray(edges, np.int32).reshape(-1, 4).T
    slice_ = np.arange(slices, dtype=np.int32)[:, None]
    chunk = half * np.int32(slices) + slice_
    src, dst = (src + root) % size, (dst + root) % size
    return edge_pattern(size, np.repeat(owners, slices), step + 2 * slice_, src, dst, chunk, channel=half)


def _find_arrival_step(
    node: int, tree: _Tree, which: int, turn: dict[tuple[int, int], int], when: dict[int, int]
) -> int:
    """Return the step in which a node receives the first slice; -1 for the top, which has it from the start.

    `turn` is the result of `_assign_edge_turns`, `which` the number of the tree. `when` has the results found so far,
    by node; those of the node and of the nodes above it are added.
    """
    if node not in tree:
        return -1
    if node not in when:
        next_step = _find_arrival_step(tree[node], tree, which, turn, when) + 1
        when[node] = next_step + (next_step + turn[which, node]) % 2
    return when[node]


def _assign_edge_turns(trees: Sequence[_Tree]) -> dict[tuple[int, int], int]:
    """Return for each edge whether it works in even (0) or odd (1) steps. The key of an edge is (tree, lower node).

    Two edges of a tree that leave one node must differ, and so must the edges of both trees that end in one node. So an
    edge must differ from at most one edge at its upper end and one at its lower end. A walk along these constraints
    alternates between upper and lower ends, so that every cycle has even length, and two values suffice.
    """
    leaving: dict[int, list[tuple[int, int]]] = {}
    for which, tree in enumerate(trees):
        for node, parent in tree.items():
            leaving.setdefault(parent, []).append((which, node))
    # The two edges that leave one node of a tree.
    sibling = {a: b for pair in leaving.values() if len(pair) == 2 for a, b in (pair, pair[::-1])}
    turn: dict[tuple[int, int], int] = {}
    for which, tree in enumerate(trees):
        for node in tree:
            stack = [((which, node), 0)] if (which, node) not in turn else []
            while stack:
                edge, now = stack.pop()
                if edge not in turn:
                    turn[edge] = now
                    own_tree, lower_end = edge
                    other_tree = 1 - own_tree
                    if edge in sibling:
                        stack.append((sibling[edge], 1 - now))
                    if lower_end in trees[other_tree]:
                        stack.append(((other_tree, lower_end), 1 - now))
    return turn
