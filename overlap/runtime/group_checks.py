"""Whether a call names ranks that its group has: roots, peers and pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives.kinds import GATHER, REDUCE
from ..collectives.reduce import Array
from ..errors import UsageError, shown
from .operation import CollectiveFuture
from .request import Members

_TAGS = 1 << 24
_INTEGERS = int, np.integer


def check_rank(group: Members, argument: str, rank: int) -> None:
    """Raise `UsageError` unless it is a rank of the group."""
    if not isinstance(rank, _INTEGERS) or not 0 <= rank < group.size:
        raise UsageError(
            f"{argument}: expected 0 to {group.size - 1}, a rank of group '{group.name}', got {shown(rank)}"
        )


def check_peer(group: Members, argument: str, peer: int, tag: int) -> None:
    """Raise `UsageError` unless a message may go there, or come from there."""
    check_rank(group, argument, peer)
    if not isinstance(tag, int) or not 0 <= tag < _TAGS:
        raise UsageError(f"tag: must be from 0 to {_TAGS - 1}, got {shown(tag)}")


def check_root(group: Members, operation: CollectiveFuture[Array]) -> None:
    """Raise `UsageError` unless there is such a root, and arrays are given where they must be, and only there."""
    kind, root, mine = operation.kind, operation.root, group.rank
    check_rank(group, "root", root)
    only_root = kind is REDUCE or kind is GATHER
    if operation.input is None and (root == mine or only_root):
        raise UsageError(f"x: {kind.value} needs an array on rank {mine}, got None")
    if only_root and operation.out is not None and root != mine:
        raise UsageError(f"out: only the root {root} of {kind.value} gets a result, this is rank {mine}")


def check_pairs(group: Members, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return pairs of ranks as numbers; raise `UsageError` unless each rank sends once at most, and receives once."""
    try:
        checked = tuple((src, dst) for src, dst in pairs)
    except (TypeError, ValueError) as error:
        raise UsageError(f"pairs: expected (source, destination) pairs of ranks, got {shown(pairs)}") from error
    for index, role in enumerate(("source", "destination")):
        ranks = [pair[index] for pair in checked]
        for rank in ranks:
            check_rank(group, "pairs", rank)
        if len(set(ranks)) < len(ranks):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise UsageError(f"pairs: rank {twice} is a {role} twice in {list(checked)}; each may be one once")
    return tuple((int(src), int(dst)) for src, dst in checked)


def check_one_a_rank(group: Members, argument: str, values: object) -> None:
    """Raise `UsageError` unless there is one for each rank."""
    if not isinstance(values, (list, tuple)) or len(values) != group.size:
        got = f"{len(values)} of them" if isinstance(values, (list, tuple)) else type(values).__name__
        raise UsageError(f"{argument}: expected a list of {group.size} objects, one a rank, got {got}")
