"""Generators of schedules, by collective and algorithm.

To add an algorithm, write a function like these and enter it in `GENERATORS`. In the costs that docstrings state, n is
the number of bytes of the whole vector: of a rank's input or result, whichever is larger.
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
from .families import FROM_ROOT, READINGS, SPREADING
from .sizes import fits, misfit

__all__ = ["GENERATORS", "Generator", "fits", "generate", "misfit"]

Generator: TypeAlias = Callable[..., Schedule]


def _make_pattern_generator(collective: str, algorithm: str, make: Callable[..., Pattern]) -> Generator:
    """Return the generator that reads the pattern of `make(size, **options)` as a collective of `READINGS`."""
    make_schedule = READINGS[collective]  # reads the edges forwards, backwards, or both ways

    def generator(size: int, **options: object) -> Schedule:
        return make_schedule(algorithm, make(size, **options))

    return generator


def _make_rooted_generator(collective: str, algorithm: str, make: Callable[..., Pattern]) -> Generator:
    """Return the generator of a broadcast from the pattern of `make(size, root, **options)`, or of a reduce.

    A reduce reads the pattern backwards.
    """
    make_schedule = read.broadcast if collective == "broadcast" else read.reduce

    def generator(size: int, *, root: int = 0, **options: object) -> Schedule:
        return make_schedule(algorithm, make(size, root, **options), root)

    return generator


def _make_gather_generator(scatter: Generator) -> Generator:
    """Return the generator of the gather that sends a scatter's messages in reverse."""

    def generator(size: int, **options: object) -> Schedule:
        return reverse_scatter(scatter(size, **options))

    return generator


def _rdh_all_reduce(size: int, *, devices: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Return Rabenseifner's all-reduce: halving and doubling over ranks, or over the `devices` of a machine.

    If the ranks are no power of two, the surplus ranks first give their input to a neighbour.
    """
    pattern = doubling.folded_halving_doubling(size) if devices is None else layouts.rdh(size, devices=devices)
    return read.all_reduce("rdh", pattern)


# Names of patterns read backwards, where they differ from the names forwards.
_BACKWARDS = {"scatter_all_gather": "reduce_scatter_gather"}

_SCATTERS: dict[str, Generator] = {
    "mesh": mesh.scatter, "binomial": tree.scatter, "multi_ring": along_rings.scatter
}  # fmt: skip

GENERATORS: dict[str, dict[str, Generator]] = {
    **{
        kind: {name: _make_pattern_generator(kind, name, make) for name, make in SPREADING.items()} for kind in READINGS
    },
    "broadcast": {name: _make_rooted_generator("broadcast", name, make) for name, make in FROM_ROOT.items()},
    "reduce": {
        _BACKWARDS.get(n, n): _make_rooted_generator("reduce", _BACKWARDS.get(n, n), make)
        for n, make in FROM_ROOT.items()
    },
    "all_to_all": {"mesh": mesh.all_to_all, "pairwise": mesh.pairwise, "bruck": doubling.bruck_all_to_all},
    "gather": {name: _make_gather_generator(make) for name, make in _SCATTERS.items()},
    "scatter": {**_SCATTERS},
    "permute": {"mesh": mesh.permute},
}
for _name in ("binomial", "chain", "binary_tree"):
    GENERATORS["all_reduce"][_name] = _make_pattern_generator("all_reduce", _name, partial(FROM_ROOT[_name], root=0))
GENERATORS["all_reduce"]["double_binary_tree"] = _make_pattern_generator(
    "all_reduce", "double_binary_tree", tree.double_tree_over_all
)
GENERATORS["all_reduce"]["recursive_doubling"] = doubling.recursive_doubling_all_reduce
GENERATORS["all_reduce"]["rdh"] = _rdh_all_reduce
GENERATORS["all_reduce"]["one_shot"] = mesh.one_shot
GENERATORS["all_reduce"]["rank_order"] = rank_order.all_reduce
GENERATORS["all_reduce"]["rank_chain"] = _make_pattern_generator("all_reduce", "rank_chain", rank_order.chain)
GENERATORS["reduce_scatter"]["rank_order"] = rank_order.reduce_scatter
GENERATORS["all_gather"]["recursive_doubling"] = _make_pattern_generator(
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
    """Return the table of transfers of a collective by an algorithm, not yet proved.

    Args:
        collective: One of `GENERATORS`, such as "all_reduce".
        algorithm: One of `GENERATORS[collective]`, such as "ring".
        size: Ranks in the group, at least 1.
        root: Group rank of the root, for rooted collectives.
        pairs: The (src, dst) pairs of a permute.
        options: Options of the algorithm; each is described at the generator: `order` of "ring", `orders` of
            "multi_ring", `dims` of "swing" and "bucket", `slices` of "chain" and of trees, `devices` of "rdh",
            `couples` and `orders` of "kangaring", `rings` of a "multi_ring" scatter or gather; `gather`, `scatter`,
            `gather_options` and `rings` of "scatter_all_gather"; the arguments of `composed.hierarchical`.

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
