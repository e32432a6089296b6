"""How long transfers of other sizes would take, fitted to those that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from .graph import Graph, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Time by size: `latency_ns + nbytes * ns_per_byte`."""

    latency_ns: float  # What does not depend on the size
    ns_per_byte: float  # What does
    sizes: int  # How many sizes it is fitted to. Of one alone nobody can tell what is latency (`Graph.latency_share`).

    def work_ns(self, nbytes: float) -> float:
        """Return how long a transfer takes that has the wires to itself."""
        return self.latency_ns + nbytes * self.ns_per_byte


def kind_of(node: Node) -> tuple[str, int]:
    """Return operation and size of the group of a transfer: what is alike in these is measured by one yardstick."""
    info = node.spans[0].info
    return (node.spans[0].name, len(node.ranks)) if info is None else (info.op, len(info.ranks) or len(node.ranks))


def nbytes_of(node: Node) -> int:
    """Return the bytes of a transfer; 0 if that is not known."""
    info = node.spans[0].info
    return 0 if info is None else info.nbytes


def fits(graph: Graph) -> dict[tuple[str, int], Fit]:
    """Fit each kind of transfer: through the medians of the smallest and of the largest size."""
    found: dict[tuple[str, int], dict[int, list[float]]] = {}
    for node in _transfers(graph):
        found.setdefault(kind_of(node), {}).setdefault(nbytes_of(node), []).append(node.work_ns)
    medians = {kind: {size: median(works) for size, works in by_size.items()} for kind, by_size in found.items()}
    return {kind: _fit(by_size, graph.latency_share) for kind, by_size in medians.items()}


def _fit(medians: dict[int, float], latency_share: float) -> Fit:
    least, most = min(medians), max(medians)
    if most < 2 * least or not most:
        latency_ns = latency_share * medians[most]
        return Fit(latency_ns=latency_ns, ns_per_byte=(medians[most] - latency_ns) / max(most, 1), sizes=1)
    slope = max((medians[most] - medians[least]) / (most - least), 0.0)
    return Fit(latency_ns=max(medians[least] - slope * least, 0.0), ns_per_byte=slope, sizes=len(medians))


def _transfers(graph: Graph) -> Iterable[Node]:
    return (node for node in graph.nodes if node.kind == "transfer")
