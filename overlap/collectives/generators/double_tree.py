"""Double binary trees: two trees over the same ranks, each for half of the data.

Source: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35(12), 2009; the trees are those of NVIDIA/nccl:src/graph/trees.cc. Ranks are numbered in order, so that odd
places are leaves; the second tree is the first mirrored, or moved by one place, so that no rank is inner in both. In
one tree alone half of the ranks would send nothing, and the others everything twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..pattern import Ints, Pattern, spread

_Tree = dict[int, int]


def from_root(size: int, root: int = 0, *, slices: int = 8) -> Pattern:
    """Pass slices down two trees over all ranks but the root, which feeds both in turn.

    Cost: at most 2 ceil(log2(size)) + 2 slices steps of n / (2 slices) bytes; n bytes sent by the root and by inner
    ranks, one message in and one out at a time.

    Args:
        size: Ranks.
        root: Who has the data.
        slices: Pieces of each half.
    """
    # Node 0 is the root, the others are places 1, 2, ... in the order of ranks.
    trees = [{node: max(parent, 0) for node, parent in tree.items()} for tree in _two_trees(size - 1)]
    return _pattern(size, trees, np.full(2, root, np.int32), root, slices)


def over_all(size: int, *, slices: int = 8) -> Pattern:
    """Pass slices down two trees over all ranks, each with a root of its own. For an all-reduce.

    Cost: at most 2 ceil(log2(size)) + 2 slices steps of n / (2 slices) bytes each way; at most 2 n bytes sent by any
    rank both ways together, for inner ranks send two halves down one tree, and one up in each.

    Args:
        size: Ranks.
        slices: Pieces of each half.
    """
    trees, tops = [], []
    for tree in _two_trees(size):
        top = next(node for node, parent in tree.items() if not parent)
        trees.append({node - 1: parent - 1 for node, parent in tree.items() if node != top})
        tops.append(top - 1)
    return _pattern(size, trees, np.asarray(tops, np.int32), 0, slices)


def _two_trees(places: int) -> tuple[_Tree, _Tree]:
    """Return the parent of each of the places 1, 2, ... in both trees; 0 for the top."""
    first = {place: _parent(place, places) for place in range(1, places + 1)}
    # Odd places, which are leaves, must become even ones.
    at = {node: places + 1 - node if places % 2 == 0 else node % places + 1 for node in first}
    who = {0: 0, **{place: node for node, place in at.items()}}
    return first, {node: who[first[at[node]]] for node in first}


def _parent(place: int, places: int) -> int:
    lowest = place & -place
    above = place ^ lowest | lowest << 1
    return above if above <= places else place ^ lowest


def _pattern(size: int, trees: Sequence[_Tree], owners: Ints, root: int, slices: int) -> Pattern:
    """Return both trees with times such that a rank takes in and sends one message a step."""
    turn = _turns(trees)
    edges = []
    for which, tree in enumerate(trees):
        when: dict[int, int] = {}
        for node in tree:
            _known(node, tree, which, turn, when)
        edges += [(when[node], parent, node, which) for node, parent in tree.items()]
    step, src, dst, half = np.asarray(edges, np.int32).reshape(-1, 4).T
    slice_ = np.arange(slices, dtype=np.int32)[:, None]
    chunk = half * np.int32(slices) + slice_
    src, dst = (src + root) % size, (dst + root) % size
    return spread(size, np.repeat(owners, slices), step + 2 * slice_, src, dst, chunk, channel=half)


def _known(node: int, tree: _Tree, which: int, turn: dict[tuple[int, int], int], when: dict[int, int]) -> int:
    """Return the step in which a node gets the first slice; -1 for a top, which has it."""
    if node not in tree:
        return -1
    if node not in when:
        next_step = _known(tree[node], tree, which, turn, when) + 1
        when[node] = next_step + (next_step + turn[which, node]) % 2
    return when[node]


def _turns(trees: Sequence[_Tree]) -> dict[tuple[int, int], int]:
    """Return for each edge, named by its tree and its lower end, whether it works in even or in odd steps.

    Two edges must differ that leave one node, or that end in one node. Each edge has at most one of either kind to
    differ from, so going round from edge to edge, the kinds alternate: all circles are even, and two turns do.
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
