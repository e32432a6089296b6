"""Candidate algorithms of a collective on a placed group, before the number of bytes is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from topology import Cluster

from ..collectives.generators import generate
from ..collectives.narrowing import WIDER
from ..collectives.placement import place
from ..collectives.schedule import ROOTED
from ..errors import UsageError
from .composed import rooted_options, two_level_options
from .flat import PlanRequest, flat_options
from .geometry import Geometry
from .levels import Levelled, crossings, held_up_s_per_byte
from .library import library_options
from .narrow import NARROWED, Narrowed, narrowed_options
from .option import Flat, Option, Rejected
from .parameters import Parameters, parameters
from .placed import Placed, on
from .rounds import Rounds, rounds
from .shortcut import short_cut_options


@lru_cache(maxsize=4096)  # a mesh of a few thousand ranks has hundreds of groups, and they take turns
def candidates(
    op: str,
    cluster: Cluster,
    ranks: tuple[int, ...],
    root: int,
    pairs: tuple[tuple[int, int], ...] | None,
    peer_direct: bool,
    algorithm: str | None,
    exact: bool,
    plain: bool = False,
) -> tuple[list[Option], list[Rejected]]:
    """Place every algorithm of a collective on a group, or the named one. Arguments are those of `plan`.

    Returns:
        The options that apply, and for each of the other algorithms the reason why it does not.
    """
    cluster.check_group(ranks, warn=False)
    size = len(ranks)
    if not 0 <= root < size:
        raise UsageError(f"root: {root} is not one of the group's ranks 0..{size - 1}")
    if pairs is None:
        pairs = tuple((rank, (rank + 1) % size) for rank in range(size)) if size > 1 else ()
    request = PlanRequest(
        collective=op,
        geometry=Geometry(cluster=cluster, ranks=ranks),
        root=root if op in ROOTED else 0,
        pairs=pairs,
        algorithm=algorithm,
        exact=exact,
    )
    placement, figures = place(cluster, ranks), figures_of(request.geometry, peer_direct=peer_direct)
    if plain:
        assert algorithm is not None, "the plain form is that of a named algorithm"
        make = partial(generate, op, algorithm, size, root=request.root, pairs=pairs)
        return [Flat(algorithm, "", on(placement, rounds(make()), parameters=figures), make)], []
    found: list[tuple[Sequence[Option], list[Rejected]]] = [
        flat_options(request, placement, figures),
        rooted_options(request, placement, figures),
        two_level_options(request, placement, figures),
        short_cut_options(request),
        library_options(request, placement, figures),
    ]
    wider = WIDER.get(op)
    if wider is not None and algorithm in (None, NARROWED) and size > 1:
        of_all, _ = candidates(wider, cluster, ranks, 0, None, peer_direct, None, False)
        found.append((narrowed_options(of_all, wider, request.root), []))
    # Sliced options search for their best number of slices: they come last, when the price to beat is known.
    options = sorted((each for options, _ in found for each in options), key=lambda each: each.searches)
    if cluster.machine.fabric is not None and cluster.machine.fabric.levels:
        options = [each if isinstance(each, Narrowed) else _levelled(each, cluster, ranks) for each in options]
    return options, [each for _, rejected in found for each in rejected]


def _levelled(option: Option, cluster: Cluster, ranks: Sequence[int]) -> Levelled:
    """Let an option wait for the ways out of blocks; what a library carries out knows its busiest way, and no steps."""
    longer_s = 0.0 if option.of_library else held_up_s_per_byte(cluster, ranks, option.parts)
    return Levelled(option, crossings(cluster, ranks, option.parts), longer_s)


def figures_of(geometry: Geometry, *, peer_direct: bool) -> Parameters:
    """Return the figures that the machine's file gives for collectives of a group."""
    return parameters(
        geometry.cluster,
        peer_direct=peer_direct,
        ranks_per_process=max(len(node) for node in geometry.nodes),
        processes=len(geometry.nodes),
        nodes=len(geometry.nodes),
        networked=len(geometry.units) > 1,
    )


def placed_on(cluster: Cluster, ranks: tuple[int, ...], asked: Rounds, *, peer_direct: bool) -> Placed:
    """Put rounds on a group of a machine, with the figures of its collectives."""
    figures = figures_of(Geometry(cluster=cluster, ranks=ranks), peer_direct=peer_direct)
    return on(place(cluster, ranks), asked, parameters=figures)
