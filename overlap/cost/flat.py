"""One-level options: algorithms that a group can run as one schedule over all its ranks, and reasons against others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ..collectives.generators import GENERATORS, fits, generate, misfit
from ..collectives.generators.along_rings import Rings
from ..collectives.generators.composed import PHASES
from ..collectives.generators.families import READINGS, SLICED
from ..collectives.generators.rank_order import ONLY_FOR_ORDER as _FOR_ORDER
from ..collectives.placement import Placement
from ..collectives.schedule import IN_RANK_ORDER, ROOTED, Schedule
from .geometry import Geometry
from .option import AlgorithmOption, Flat, Rejected
from .parameters import CostParameters
from .placed import Placed, place_rounds
from .regular import ring_rounds
from .rounds import Rounds, read_rounds

ELSEWHERE = ("hierarchical", "scatter_all_gather", "reduce_scatter_gather")
"""Algorithms that are costed phase by phase."""

# Beyond this many ranks, an algorithm with p * p messages is not considered if the collective has other ones.
_MOST_DIRECT = 512
_DIRECT = ("mesh", "one_shot", "bruck", "rdh", "recursive_doubling")
# Beyond this many ranks on equal nodes, only two-level algorithms are considered.
_MOST_LEVEL = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Request for a plan, without the number of bytes."""

    collective: str  # name of the collective
    geometry: Geometry  # machine and ranks of the group
    root: int = 0  # root of a rooted collective
    pairs: tuple[tuple[int, int], ...] = ()  # pairs of a permute
    algorithm: str | None = None  # the only algorithm to consider; None: all
    exact: bool = False  # whether to consider only algorithms that reduce in the order of ranks

    def considers(self, algorithm: str) -> bool:
        """Return whether the request allows an algorithm.

        A request that names an algorithm allows this one only. Otherwise it allows all, except that "rank_order" and
        "rank_chain" need `exact`. With `exact`, only algorithms that reduce in the order of ranks are allowed.
        """
        if self.exact and algorithm not in IN_RANK_ORDER:
            return False
        return self.algorithm == algorithm or (self.algorithm is None and (self.exact or algorithm not in _FOR_ORDER))


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedAlgorithm:
    """An algorithm fitted to a group."""

    detail: str  # how it is fitted to the group, in words, such as "4 rings"; may be empty
    rounds: Rounds  # messages and work of the algorithm
    make: Callable[..., Schedule]  # generates the table; takes further options of the algorithm


def flat_options(
    request: PlanRequest, placement: Placement, parameters: CostParameters
) -> tuple[list[AlgorithmOption], list[Rejected]]:
    """Return the priced one-level candidates for a collective on a group, and the algorithms that do not apply.

    Args:
        request: The collective and its group.
        placement: Where the ranks of the group are.
        parameters: Overheads and efficiencies.

    Returns:
        Options that apply, and the reasons against the other algorithms. Algorithms that the request does not allow are
        in neither list.
    """
    options: list[AlgorithmOption] = []
    rejected: list[Rejected] = []
    for algorithm in GENERATORS[request.collective]:
        if algorithm in ELSEWHERE or not request.considers(algorithm):
            continue
        if is_too_wide(request):
            rejected.append(Rejected(algorithm=algorithm, why=WIDE))
            continue
        fitted = fit_algorithm(request, algorithm, slices=1)
        if isinstance(fitted, Rejected):
            rejected.append(fitted)
        else:
            options.append(_make_flat_option(algorithm, fitted, placement, parameters))
    return options, rejected


def is_too_wide(request: PlanRequest) -> bool:
    """Return whether a group is too large for one-level algorithms: it has two levels, and more than 1,024 ranks.

    A request that names an algorithm, or asks for the order of ranks, has no such limit.
    """
    g = request.geometry
    named = request.algorithm is not None or request.exact
    return not named and request.collective in PHASES and g.size > _MOST_LEVEL and g.hierarchical_misfit_reason is None


WIDE = f"beyond {_MOST_LEVEL} ranks only two-level algorithms are considered"
"""Reason against one-level algorithms on large groups."""


def _make_flat_option(
    algorithm: str, fitted: FittedAlgorithm, placement: Placement, parameters: CostParameters
) -> AlgorithmOption:
    """Return the priced option of a one-level algorithm; an algorithm of `SLICED` may cut the data into slices."""
    whole = place_rounds(placement, fitted.rounds, parameters=parameters)

    def place_sliced(slices: int) -> Placed:
        return place_rounds(placement, read_rounds(fitted.make(slices=slices)), parameters=parameters)

    return Flat(algorithm, fitted.detail, whole, fitted.make, sliced=place_sliced if algorithm in SLICED else None)


def fit_algorithm(request: PlanRequest, algorithm: str, *, slices: int | None = None) -> FittedAlgorithm | Rejected:
    """Return an algorithm fitted to a group, or the reason why it does not apply.

    Args:
        request: The collective and its group.
        algorithm: Name of the algorithm.
        slices: Number of slices, if the algorithm sends slices; None: its default.
    """
    g, collective = request.geometry, request.collective
    why = misfit_reason(algorithm, g)
    if why is None and collective in READINGS and algorithm in _DIRECT and g.size > _MOST_DIRECT:
        why = f"its table grows with the square of {g.size} ranks"
    # A chain, and a ring from a root, pass data from rank to rank.
    one_by_one = algorithm == "chain" or (algorithm == "multi_ring" and collective not in READINGS)
    if one_by_one and g.size > _MOST_DIRECT:
        why = f"it has as many steps as there are ranks, {g.size}"
    if why is not None:
        return Rejected(algorithm=algorithm, why=why)
    detail, options = fitting_options(algorithm, g) if collective in READINGS else ("", {})
    if collective not in READINGS and algorithm == "multi_ring":
        detail, options = _rings_text(len(g.rings)), {"rings": g.device_rings}
    root = request.root if collective in ROOTED else 0
    make = partial(generate, collective, algorithm, g.size, root=root, pairs=request.pairs, **options)
    if collective in READINGS and algorithm in ("ring", "multi_ring") and g.size > 1:
        messages = ring_rounds(collective, [g.ring_order] if algorithm == "ring" else g.rings)
    else:
        messages = read_rounds(make(slices=slices) if algorithm in SLICED and slices else make())
    return FittedAlgorithm(detail=detail, rounds=messages, make=make)


def misfit_reason(algorithm: str, g: Geometry) -> str | None:
    """Return why an algorithm does not apply to a group, as text; None if it applies."""
    if (lacks := misfit(algorithm, g.size)) is not None:
        return f"it {lacks}"
    if algorithm == "multi_ring" and not g.rings:
        return "its devices hold no ring of wires"
    if algorithm == "kangaring":
        return _kangaring_misfit_reason(g)
    if algorithm in ("swing", "bucket"):
        return _torus_misfit_reason(algorithm, g)
    return None


def _kangaring_misfit_reason(g: Geometry) -> str | None:
    """Return why a group cannot run kangaring, which pairs ranks of each device on rings of wires; None if it can."""
    if not g.cluster.whole_devices(g.ranks):
        return "it needs all ranks of every device in the group"
    if g.cluster.ranks_per_device % 2:
        return f"it pairs ranks of a device, and a device has {g.cluster.ranks_per_device}"
    if len(g.units) > 1:
        return "only the network joins its nodes"
    return None if g.rings else "its devices hold no ring of wires"


def _torus_misfit_reason(algorithm: str, g: Geometry) -> str | None:
    """Return why a group cannot run swing or bucket, algorithms of a torus; None if it can."""
    grid = g.grid()
    if grid is None or not all(grid.wraps):
        return "it needs one rank on each device of a torus, in order"
    if algorithm == "swing" and not all(fits(algorithm, side) for side in grid.dims):
        return f"it needs even sides, and they are {grid.dims}"
    return None


def fitting_options(algorithm: str, g: Geometry) -> tuple[str, Mapping[str, object]]:
    """Return how an algorithm is fitted to a group: in words, such as "4 rings", and as options of its generator.

    Both are empty for an algorithm that has nothing to fit.
    """
    if algorithm == "ring":
        return "", {"order": g.ring_order}
    if algorithm == "multi_ring":
        return _rings_text(len(g.rings)), {"orders": g.rings}
    if algorithm == "rdh" and g.cube_misfit_reason is None:
        return f"over {len(g.devices)} devices as a cube", {"devices": g.devices}
    if algorithm == "kangaring":
        orders = _rings_of_pairs(g)
        return _rings_text(len(orders)), {"couples": g.pairs(), "orders": orders}
    grid = g.grid() if algorithm in ("swing", "bucket") else None
    return ("", {}) if grid is None else (f"sides {grid.dims}", {"dims": grid.dims})


def scatter_rings(scatter: str, g: Geometry) -> Rings | None:
    """Return the rings along which the algorithm `scatter` sends a root's data; None if it uses no rings."""
    return g.device_rings if scatter == "multi_ring" else None


def _rings_of_pairs(geometry: Geometry) -> list[list[int]]:
    """Return each ring of a group, in both directions, as the indexes of pairs of ranks in `Geometry.pairs`."""
    pair_of = {rank: number for number, pair in enumerate(geometry.pairs()) for rank in pair}
    return [list(dict.fromkeys(pair_of[rank] for rank in order)) for order in geometry.rings]


def _rings_text(count: int) -> str:
    return f"{count} ring{'s' * (count != 1)}"
