"""Everything that a collective could become on a placed group, before the number of bytes is known."""

from __future__ import annotations

from functools import lru_cache

from topology import Cluster

from ..collectives.placement import place
from ..collectives.schedule import ROOTED
from ..errors import UsageError
from .flat import PlanRequest, flat_options
from .geometry import Geometry
from .hierarchy import two_level_options
from .option import Option, Rejected
from .parameters import parameters
from .rooted import rooted_options
from .shortcut import short_cut_options
from .sliced import Sliced


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
) -> tuple[list[Option], list[Rejected]]:
    """Place every algorithm, or the one that is named. Arguments are those of `plan`.

    Returns:
        Those that apply, and the reasons of those that do not.
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
    together = max(len(node) for node in request.geometry.nodes)
    figures = parameters(
        cluster,
        peer_direct=peer_direct,
        ranks_per_process=together,
        processes=len(request.geometry.nodes),
        networked=len(request.geometry.units) > 1,
    )
    placement = place(cluster, ranks)
    found = (
        flat_options(request, placement, figures),
        rooted_options(request, placement, figures),
        two_level_options(request, placement, figures),
        short_cut_options(request),
    )
    # Those that have to look for their best form come last, when it is known what they must beat.
    options = sorted((each for options, _ in found for each in options), key=lambda each: isinstance(each, Sliced))
    return options, [each for _, rejected in found for each in rejected]
