"""How fast costing is: for the benchmark."""

from __future__ import annotations

from time import perf_counter

from topology import cluster

from ..generators import generate
from ..placement import Placement, place
from ..schedule import Schedule
from .maxplus import cost
from .parameters import parameters
from .placed import on
from .rounds import rounds
from .star import Star

__all__ = ["ring_costing_s"]

_NODE_RANKS = 64


def ring_costing_s(ranks: int = 1024) -> tuple[float, float]:
    """Return the seconds that costing a ring all-reduce takes, from its table: without contention, and with link loads.

    Link loads are those of trn2.48xlarge nodes, whose wires are numbered before.

    Args:
        ranks: A multiple of 64.
    """
    machine = cluster("trn2.48xlarge", nodes=ranks // _NODE_RANKS)
    plain = generate("all_reduce", "ring", ranks)
    along = generate("all_reduce", "ring", ranks, order=machine.ring_order())
    placement = place(machine)
    return (
        _timed(plain, Star(ranks, latency_s=2e-6, bytes_per_s=12.5e9), contention=False),
        _timed(along, placement, contention=True, warm=True),
    )


def _timed(schedule: Schedule, placement: Placement, *, contention: bool, warm: bool = False) -> float:
    known = parameters(cluster("trn2.48xlarge"))
    if warm:
        on(placement, rounds(schedule), parameters=known)
    start_s = perf_counter()
    cost(on(placement, rounds(schedule), parameters=known, contention=contention), 1e9)
    return perf_counter() - start_s
