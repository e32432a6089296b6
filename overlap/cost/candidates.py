"""Candidate algorithms of a collective on a placed group, before the number of bytes is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from topology import Cluster

from ..collectives.generators import generate
from ..collectives.placement import place_group
from ..collectives.schedule import ROOTED
from ..errors import UsageError
from .composed import rooted_options, two_level_options
from .flat import PlanRequest, flat_options
from .geometry import Geometry
from .levels import block_exits
from .option import AlgorithmOption, Flat, Rejected
from .parameters import CostParameters, cost_parameters
from .placed import Placed, place_rounds
from .rounds import Rounds, read_rounds
from .shortcut import short_cut_options


@lru_cache(maxsize=4096)  # a mesh of a few thousand ranks has hundreds of groups, and they take turns
def list_options(
    op: str,
    cluster: Cluster,
    ranks: tuple[int, ...],
    root: int,
    pairs: tuple[tuple[int, int], ...] | None,
    peer_direct: bool,
    algorithm: str | None,
    exact: bool,
    plain: bool = False,
) -> tuple[list[AlgorithmOption], list[Rejected]]:
    """Place every algorithm of a collective on a group, or only the algorithm that is named.

    Arguments: see `select.plan`. With `plain`, which needs an `algorithm`, that algorithm gets its default options,
    even if they do not fit the wires of the group.

    Returns:
        The options that apply, and a `Rejected` with the reason for each algorithm that does not.

    Raises:
        UsageError: The root is no rank of the group.
        TopologyError: The group is illegal on the machine.
    """
    cluster.check_group(ranks, warn=False)
    size = len(ranks)
    if not 0 <= root < size:
        raise UsageError(f"root: expected a rank of the group, 0 to {size - 1}, got {root}")
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
    placement, figures = place_group(cluster, ranks), group_parameters(request.geometry, peer_direct=peer_direct)
    if plain:
        assert algorithm is not None, "the plain form is that of a named algorithm"
        make = partial(generate, op, algorithm, size, root=request.root, pairs=pairs)
        return [Flat(algorithm, "", place_rounds(placement, read_rounds(make()), parameters=figures), make)], []
    groups: list[tuple[Sequence[AlgorithmOption], list[Rejected]]] = [
        flat_options(request, placement, figures),
        rooted_options(request, placement, figures),
        two_level_options(request, placement, figures),
        short_cut_options(request),
    ]
    options = [option for options, _ in groups for option in options]
    if cluster.machine.fabric is not None and cluster.machine.fabric.levels:
        for option in options:
            option.exits = block_exits(option, cluster, ranks)
    # Options that search for their best number of slices are priced last: a known lower price shortens the search.
    options.sort(key=lambda option: option.searches)
    return options, [rejection for _, rejected in groups for rejection in rejected]


def group_parameters(geometry: Geometry, *, peer_direct: bool) -> CostParameters:
    """Return the overheads and efficiencies that the machine's file gives for collectives of a group.

    Args:
        geometry: Machine and ranks of the group.
        peer_direct: Whether network adapters read device memory themselves.
    """
    return cost_parameters(
        geometry.cluster,
        peer_direct=peer_direct,
        ranks_per_process=max(len(node) for node in geometry.nodes),
        processes=len(geometry.nodes),
        nodes=len(geometry.nodes),
        networked=len(geometry.units) > 1,
    )


def place_rounds_on_cluster(cluster: Cluster, ranks: tuple[int, ...], request: Rounds, *, peer_direct: bool) -> Placed:
    """Return rounds placed on a group of a machine, with the overheads that the machine's file gives.

    Args:
        cluster: The machine.
        ranks: World ranks in group order.
        request: The rounds, over as many ranks.
        peer_direct: Whether network adapters read device memory themselves.
    """
    figures = group_parameters(Geometry(cluster=cluster, ranks=ranks), peer_direct=peer_direct)
    return place_rounds(place_group(cluster, ranks), request, parameters=figures)
