"""Generators: collective and algorithm to schedule.

A stranger's generator is a function like ours, entered in the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ...errors import ScheduleError
from .. import pattern as read
from ..pattern import Pattern
from ..pipeline import pipelined
from ..schedule import ROOTED, Schedule
from . import bruck, direct, doubling, hierarchical, kangaring, mesh, ring, torus, tree

__all__ = ["GENERATORS", "Generator", "fits", "generate"]

Generator: TypeAlias = Callable[..., Schedule]
Options: TypeAlias = Mapping[str, object]

# Patterns in which every rank owns a chunk: each gives an all-reduce, a reduce-scatter and an all-gather.
_SPREADING: dict[str, Callable[..., Pattern]] = {
    "ring": ring.ring,
    "multi_ring": ring.multi_ring,
    "mesh": mesh.mesh,
    "rdh": doubling.halving_doubling,
    "kangaring": kangaring.kangaring,
    "swing": torus.swing,
    "bucket": torus.bucket,
    "bruck": bruck.bruck,
}
# Patterns in which the root owns everything: each gives a broadcast and a reduce, and together an all-reduce.
_FROM_ROOT: dict[str, Callable[..., Pattern]] = {
    "mesh": mesh.star,
    "binomial": tree.binomial,
    "chain": tree.chain,
    "binary_tree": tree.binary_tree,
}
_READINGS: dict[str, Callable[[str, Pattern], Schedule]] = {
    "all_reduce": read.all_reduce,
    "reduce_scatter": read.reduce_scatter,
    "all_gather": read.all_gather,
}


def _reading(collective: str, algorithm: str, make: Callable[..., Pattern]) -> Generator:
    def generator(size: int, **options: object) -> Schedule:
        return _READINGS[collective](algorithm, make(size, **options))

    return generator


def _rooted(collective: str, algorithm: str, make: Callable[..., Pattern]) -> Generator:
    lower = read.broadcast if collective == "broadcast" else read.reduce

    def generator(size: int, *, root: int = 0, **options: object) -> Schedule:
        return lower(algorithm, make(size, root, **options), root)

    return generator


def _hierarchical(collective: str) -> Generator:
    def generator(
        size: int,
        *,
        nodes: int | None = None,
        intra: str = "ring",
        inter: str = "ring",
        slices: int = 1,
        intra_options: Options | None = None,
        inter_options: Options | None = None,
    ) -> Schedule:
        """Compose two levels; see `hierarchical`.

        Args:
            size: Ranks, numbered node by node.
            nodes: How many nodes; by default the smaller of the two factors of `size` that differ least.
            intra: Algorithm inside nodes: one that every rank owns a chunk in.
            inter: Algorithm between nodes; for an all-reduce any of its algorithms.
            slices: Cut the data in so many pieces, and pipeline them through the phases.
            intra_options: Further options of `intra`.
            inter_options: Further options of `inter`.
        """
        count = hierarchical.node_count(size, nodes)
        inside = _spreading(intra)(size // count, **(intra_options or {}))
        if collective == "all_reduce" and inter not in _SPREADING:
            between = generate("all_reduce", inter, count, **(inter_options or {}))  # type: ignore[arg-type]
            flat = read.all_reduce("hierarchical", inside)
            schedule, starts = hierarchical.with_inner(flat, between, size // count)
        else:
            across = _spreading(inter)(count, **(inter_options or {}))
            schedule = _READINGS[collective]("hierarchical", hierarchical.compose(across, inside))
            starts = hierarchical.stages(collective, across.steps, inside.steps)
        return pipelined(schedule, starts, slices)

    return generator


def _spreading(algorithm: str) -> Callable[..., Pattern]:
    if algorithm not in _SPREADING:
        raise ScheduleError(f"no level can be {algorithm!r} here; known are {', '.join(_SPREADING)}")
    return _SPREADING[algorithm]


def _all_reduce_by_tree(algorithm: str) -> Generator:
    def generator(size: int, **options: object) -> Schedule:
        return read.all_reduce(algorithm, _FROM_ROOT[algorithm](size, 0, **options))

    return generator


GENERATORS: dict[str, dict[str, Generator]] = {
    **{kind: {name: _reading(kind, name, make) for name, make in _SPREADING.items()} for kind in _READINGS},
    **{k: {name: _rooted(k, name, make) for name, make in _FROM_ROOT.items()} for k in ("broadcast", "reduce")},
    "all_to_all": {"mesh": mesh.all_to_all, "pairwise": direct.pairwise, "bruck": bruck.all_to_all},
    "gather": {"mesh": mesh.gather, "binomial": tree.gather},
    "scatter": {"mesh": mesh.scatter, "binomial": tree.scatter},
    "permute": {"mesh": mesh.permute},
}
for _kind in _READINGS:
    GENERATORS[_kind]["hierarchical"] = _hierarchical(_kind)
for _name in ("binomial", "chain", "binary_tree"):
    GENERATORS["all_reduce"][_name] = _all_reduce_by_tree(_name)
GENERATORS["all_reduce"]["recursive_doubling"] = doubling.recursive_doubling_all_reduce
GENERATORS["all_reduce"]["one_shot"] = direct.one_shot
GENERATORS["all_gather"]["recursive_doubling"] = _reading("all_gather", "recursive_doubling", doubling.halving_doubling)


def fits(algorithm: str, size: int) -> bool:
    """Return whether an algorithm, with its default options, takes this number of ranks."""
    if algorithm == "kangaring":
        return size % 2 == 0
    return algorithm != "swing" or size & (size - 1) == 0


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
        collective: Name of the collective.
        algorithm: Name of an algorithm that it has.
        size: Ranks in the group, at least 1.
        root: Group rank of the root, for rooted collectives.
        pairs: The (src, dst) pairs of a permute.
        options: What the algorithm takes besides: `order` or `orders` of rings, `dims` of a torus, `slices` of a
            pipelined tree, and of "hierarchical" `nodes`, `intra`, `inter`, `slices`, `intra_options`, `inter_options`.

    Raises:
        ScheduleError: If a name is unknown, the root is no rank, or the algorithm does not fit the size.
    """
    if collective not in GENERATORS:
        raise ScheduleError(f"unknown collective {collective!r}; known are {', '.join(GENERATORS)}")
    if algorithm not in GENERATORS[collective]:
        known = ", ".join(GENERATORS[collective])
        raise ScheduleError(f"{collective} has no algorithm {algorithm!r}; known are {known}")
    if size < 1 or not 0 <= root < size:
        raise ScheduleError(f"root {root} is not one of the {size} ranks of the group")
    if collective in ROOTED:
        options["root"] = root
    if collective == "permute":
        options["pairs"] = pairs
    return GENERATORS[collective][algorithm](size, **options)
