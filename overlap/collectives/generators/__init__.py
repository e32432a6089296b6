"""Generators of schedules, by collective and algorithm.

A generator of yours is a function like these, entered in the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from ...errors import ScheduleError
from .. import pattern as read
from ..pattern import Pattern
from ..schedule import ROOTED, Schedule
from ..tablewriter import reverse_scatter
from . import along_rings, composed, doubling, layouts, mesh, rank_order, tree
from . import doubling as bruck
from . import mesh as direct
from . import tree as double_tree
from .families import FROM_ROOT, READINGS, SPREADING
from .sizes import fits, misfit

__all__ = ["GENERATORS", "Generator", "fits", "generate", "misfit"]

Generator: TypeAlias = Callable[..., Schedule]


def _from_pattern(collective: str, algorithm: str, make: Callable[..., Pattern]) -> Generator:
    """Return the generator of a collective and algorithm, which reads a pattern of the algorithm."""

    def generator(size: int, **options: object) -> Schedule:
        return READINGS[collective](algorithm, make(size, **options))

    return generator


def _from_root_pattern(collective: str, algorithm: str, make: Callable[..., Pattern]) -> Generator:
    """Return the generator of a collective with a root, made from a pattern of broadcasts."""
    lower = read.broadcast if collective == "broadcast" else read.reduce

    def generator(size: int, *, root: int = 0, **options: object) -> Schedule:
        return lower(algorithm, make(size, root, **options), root)

    return generator


def _gather_from(scatter: Generator) -> Generator:
    """Return the generator of the gather that is a scatter read backwards."""

    def generator(size: int, **options: object) -> Schedule:
        return reverse_scatter(scatter(size, **options))

    return generator


def _rdh_all_reduce(size: int, *, devices: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Reduce over a power of two of the ranks, or over the devices of a machine if these are given."""
    folded = devices is None
    pattern = doubling.folded_halving_doubling(size) if folded else layouts.rdh(size, devices=devices)
    return read.all_reduce("rdh", pattern)


# Names of patterns read backwards, where they differ from the names forwards.
_BACKWARDS = {"scatter_all_gather": "reduce_scatter_gather"}

_SCATTERS: dict[str, Generator] = {
    "mesh": mesh.scatter, "binomial": tree.scatter, "multi_ring": along_rings.scatter
}  # fmt: skip

GENERATORS: dict[str, dict[str, Generator]] = {
    **{kind: {name: _from_pattern(kind, name, make) for name, make in SPREADING.items()} for kind in READINGS},
    "broadcast": {name: _from_root_pattern("broadcast", name, make) for name, make in FROM_ROOT.items()},
    "reduce": {
        _BACKWARDS.get(n, n): _from_root_pattern("reduce", _BACKWARDS.get(n, n), make) for n, make in FROM_ROOT.items()
    },
    "all_to_all": {"mesh": mesh.all_to_all, "pairwise": direct.pairwise, "bruck": bruck.all_to_all},
    "gather": {name: _gather_from(make) for name, make in _SCATTERS.items()},
    "scatter": {**_SCATTERS},
    "permute": {"mesh": mesh.permute},
}
for _name in ("binomial", "chain", "binary_tree"):
    GENERATORS["all_reduce"][_name] = _from_pattern("all_reduce", _name, partial(FROM_ROOT[_name], root=0))
GENERATORS["all_reduce"]["double_binary_tree"] = _from_pattern("all_reduce", "double_binary_tree", double_tree.over_all)
GENERATORS["all_reduce"]["recursive_doubling"] = doubling.recursive_doubling_all_reduce
GENERATORS["all_reduce"]["rdh"] = _rdh_all_reduce
GENERATORS["all_reduce"]["one_shot"] = direct.one_shot
GENERATORS["all_reduce"]["rank_order"] = rank_order.all_reduce
GENERATORS["all_reduce"]["rank_chain"] = _from_pattern("all_reduce", "rank_chain", rank_order.chain)
GENERATORS["reduce_scatter"]["rank_order"] = rank_order.reduce_scatter
GENERATORS["all_gather"]["recursive_doubling"] = _from_pattern(
    "all_gather", "recursive_doubling", doubling.halving_doubling
)


def generate(
    collective: str,
    algorithm: str,
    size: int,
    *,
    root: int = 0,
    pairs: tuple[tuple[int, int], ...] = (),
    **options: object,
) -> Schedule:
    """Expand a collective to its table of transfers.

    Args:
        algorithm: Name of an algorithm that it has.
        size: Ranks in the group, at least 1.
        root: Group rank of the root, for rooted collectives.
        pairs: The (src, dst) pairs of a permute.
        options: Options of the algorithm: `order` or `orders` of rings, `dims` of a torus, `slices` of a
            pipelined tree, `devices` of an rdh, `couples` and `orders` of a kangaring, `rings` of blocks that
            go around them, `gather`, `scatter`, `gather_options` and `rings` of a scatter_all_gather, and of
            "hierarchical" what `composed.hierarchical` takes.

    Raises:
        ScheduleError: If a name is unknown, the root is no rank, or the algorithm does not fit the size.
    """
    if collective not in GENERATORS:
        raise ScheduleError(f"unknown collective {collective!r}; known are {', '.join(GENERATORS)}")
    if algorithm not in GENERATORS[collective]:
        known = ", ".join(GENERATORS[collective])
        raise ScheduleError(f"{collective} has no algorithm {algorithm!r}; known are {known}")
    if size < 1 or not 0 <= root < size:
        raise ScheduleError(f"root: expected one of the group's {size} ranks, from 0, got {root}")
    if collective in ROOTED:
        options["root"] = root
    if collective == "permute":
        options["pairs"] = pairs
    return GENERATORS[collective][algorithm](size, **options)


for _kind in composed.PHASES:
    GENERATORS[_kind]["hierarchical"] = partial(composed.hierarchical, generate, _kind)
