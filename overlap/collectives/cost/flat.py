"""Which algorithms a group can run as one schedule over all its ranks, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..generators import GENERATORS, bruck, doubling, generate, mesh, ring, torus
from ..layouts import READINGS, device_cube, kangarings
from ..pattern import Pattern
from ..placement import Placement
from ..schedule import ROOTED, Schedule
from .geometry import Geometry
from .option import Flat, Rejected
from .parameters import Parameters
from .placed import on
from .rings import ring_rounds
from .rounds import Rounds, rounds

__all__ = ["Expansion", "Request", "expanded", "flat_options", "pattern_of"]

# Beyond this many ranks tables of p * p messages are neither generated nor costed where others exist.
_MOST_DIRECT = 512
_DIRECT = ("mesh", "one_shot", "bruck", "rdh", "recursive_doubling")

Fit: TypeAlias = tuple[str, Callable[[], Pattern]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be planned, but for the number of bytes.

    Attributes:
        collective: its name.
        geometry: of the group.
        root: of a rooted collective.
        pairs: of a permute.
    """

    collective: str
    geometry: Geometry
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """An algorithm fitted to a group.

    Attributes:
        detail: what distinguishes it on this group; may be empty.
        rounds: what it does.
        make: generates its table.
    """

    detail: str
    rounds: Rounds
    make: Callable[[], Schedule]


def flat_options(request: Request, placement: Placement, parameters: Parameters) -> tuple[list[Flat], list[Rejected]]:
    """Fit every algorithm of a collective to a group.

    Returns:
        Those that apply, and the reasons of those that do not.
    """
    options: list[Flat] = []
    rejected: list[Rejected] = []
    for algorithm in GENERATORS[request.collective]:
        if algorithm == "hierarchical":
            continue
        found = expanded(request, algorithm)
        if isinstance(found, Rejected):
            rejected.append(found)
        else:
            placed = on(placement, found.rounds, parameters=parameters)
            options.append(Flat(algorithm, found.detail, placed, found.make))
    return options, rejected


def expanded(request: Request, algorithm: str) -> Expansion | Rejected:
    """Fit one algorithm to a group."""
    g, collective = request.geometry, request.collective
    why = why_not(algorithm, g)
    if why is None and collective in READINGS and algorithm in _DIRECT and g.size > _MOST_DIRECT:
        why = f"its table grows with the square of {g.size} ranks"
    if why is not None:
        return Rejected(algorithm=algorithm, why=why)
    detail, make = _table(request, algorithm)
    if algorithm in ("ring", "multi_ring") and g.size > 1:
        asked = ring_rounds(collective, [g.ring_order] if algorithm == "ring" else g.rings)
    else:
        asked = rounds(make())
    return Expansion(detail=detail, rounds=asked, make=make)


def _table(request: Request, algorithm: str) -> tuple[str, Callable[[], Schedule]]:
    """Return what distinguishes an algorithm on this group, and its generator."""
    g, collective = request.geometry, request.collective
    if collective in READINGS and (fit := pattern_of(algorithm, g)) is not None:
        detail, pattern = fit
        return detail, lambda: READINGS[collective](algorithm, pattern())
    root = request.root if collective in ROOTED else 0
    return "", lambda: generate(collective, algorithm, g.size, root=root, pairs=request.pairs)


def why_not(algorithm: str, g: Geometry) -> str | None:
    """Return why an algorithm does not apply to a group, None if it does."""
    if algorithm == "multi_ring" and not g.rings:
        return "its devices hold no ring of wires"
    if algorithm == "kangaring":
        return _why_no_kangaring(g)
    if algorithm in ("swing", "bucket"):
        return _why_no_torus(algorithm, g)
    return None


def _why_no_kangaring(g: Geometry) -> str | None:
    if not g.cluster.whole_devices(g.ranks):
        return "it needs all ranks of every device in the group"
    if g.cluster.ranks_per_device % 2:
        return f"it pairs ranks of a device, and a device has {g.cluster.ranks_per_device}"
    if g.units > 1:
        return "only the network joins its nodes"
    return None if g.rings else "its devices hold no ring of wires"


def _why_no_torus(algorithm: str, g: Geometry) -> str | None:
    grid = g.grid()
    if grid is None or not all(grid.wraps):
        return "it needs one rank on each device of a torus, in order"
    if algorithm == "swing" and any(side & (side - 1) for side in grid.dims):
        return f"it needs sides that are powers of two, and they are {grid.dims}"
    return None


def pattern_of(algorithm: str, g: Geometry) -> Fit | None:
    """Return an algorithm in which every rank owns a chunk, fitted to a group: its detail and its pattern.

    None for algorithms that are no such pattern, and for those that the group cannot run.
    """
    size, grid = g.size, g.grid()
    if algorithm == "rdh" and g.why_no_cube() is None:
        return f"over {len(g.devices)} devices as a cube", lambda: device_cube(g.devices)
    if algorithm == "multi_ring" and g.rings:
        return f"{len(g.rings)} rings", lambda: ring.multi_ring(size, orders=g.rings)
    if algorithm == "kangaring" and _why_no_kangaring(g) is None:
        orders = _pair_orders(g)
        return f"{len(orders)} rings", lambda: kangarings(size, g.pairs(), orders)
    if grid is not None and algorithm in ("swing", "bucket") and _why_no_torus(algorithm, g) is None:
        make = torus.swing if algorithm == "swing" else torus.bucket
        return f"sides {grid.dims}", lambda: make(size, dims=grid.dims)
    plain: Mapping[str, Callable[[], Pattern]] = {
        "mesh": lambda: mesh.mesh(size),
        "ring": lambda: ring.ring(size, order=g.ring_order),
        "rdh": lambda: doubling.halving_doubling(size),
        "bruck": lambda: bruck.bruck(size),
    }
    return ("", plain[algorithm]) if algorithm in plain else None


def _pair_orders(g: Geometry) -> list[list[int]]:
    """Return the rings as orders of pairs."""
    pair_of = {rank: number for number, pair in enumerate(g.pairs()) for rank in pair}
    return [list(dict.fromkeys(pair_of[rank] for rank in order)) for order in g.rings]
