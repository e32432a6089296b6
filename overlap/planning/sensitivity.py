"""What a step would take if a figure of the machine were another: each of them is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from topology import Cluster
from topology.machine import LinkSpec

from .. import Interference, Virtual
from ..simulation.conditions import ALL
from .estimates import Estimate, estimate

SWAY = 0.2
"""By how much a figure is changed, up and down."""

# Measured slow-downs of matrix products beside collectives, and of collectives beside them, are from nothing to that
# much on GPUs whose cores move the bytes; nothing is published of machines with processors of their own for it.
SLOWER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Of one figure."""

    figure: str  # Its name
    change: str  # What was done to it
    # Share by which the step is longer if it is `SWAY` lower; negative if shorter. None if there is no lower.
    low: float | None
    high: float  # The same if it is higher


def sensitivities(of: Estimate, *, algorithm: str | None = None) -> Iterator[Sensitivity]:
    """Simulate a step again and again; each is yielded when it is known.

    Args:
        of: What is to be changed.
        algorithm: As of the estimate.
    """

    def longer(cluster: Cluster, virtual: Virtual) -> float:
        again = estimate(of.model, of.layout, cluster, virtual, algorithm=algorithm)
        return again.parts.step_ns / of.parts.step_ns - 1

    for kind, name in _wires(of.cluster):
        low, high = (longer(_faster(of.cluster, kind, 1 + sway), of.virtual) for sway in (-SWAY, SWAY))
        yield Sensitivity(figure=name, change=_CHANGE, low=low, high=high)
    at = of.virtual.efficiency
    low = longer(of.cluster, replace(of.virtual, efficiency=at * (1 - SWAY)))
    high = longer(of.cluster, replace(of.virtual, efficiency=min(1.0, at * (1 + SWAY))))
    yield Sensitivity(figure="efficiency of computes", change=_CHANGE, low=low, high=high)
    if of.virtual.interference.off:
        both = Interference(compute={ALL: 1 + SLOWER}, communication={ALL: 1 + SLOWER})
        high = longer(of.cluster, replace(of.virtual, interference=both))
        change = f"0 to {SLOWER:.0%}"
        yield Sensitivity(figure="slow-down of compute and communication", change=change, low=None, high=high)


_CHANGE = f"+-{SWAY:.0%}"


def _wires(cluster: Cluster) -> list[tuple[str, str]]:
    network = cluster.machine.network
    outer = [(network.link, "NIC bandwidth")] if network is not None and cluster.nodes > 1 else []
    inner = [
        (spec.kind, f"{spec.kind} bandwidth")
        for spec in cluster.machine.links
        if spec.kind == cluster.machine.wires.link
        or (cluster.machine.ultraserver is not None and spec.kind == cluster.machine.ultraserver.link)
    ]
    return [*outer, *inner]


def _faster(cluster: Cluster, kind: str, factor: float) -> Cluster:
    """Return the cluster with other wires of one kind."""
    links = tuple(_scaled(spec, factor) if spec.kind == kind else spec for spec in cluster.machine.links)
    return replace(cluster, machine=replace(cluster.machine, links=links))


def _scaled(spec: LinkSpec, factor: float) -> LinkSpec:
    figure = spec.bandwidth_bytes_per_s
    return replace(spec, bandwidth_bytes_per_s=replace(figure, value=figure.value * factor))
