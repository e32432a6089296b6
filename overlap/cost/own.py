"""Fit of the figures of the plain machine, `local`, to collectives measured on this computer.

Inside a process: the costs of meeting and of work in threads, and the bandwidths of memory and caches. Between
processes that share memory: the cost of meeting; a byte costs the time of one processor inside. Between other
processes: the costs of starting an operation and its messages, of a byte, and of a reducer. Every third row is left out
of the fit, and shows how well the others predict it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np

from topology import Cluster, Figure, Machine, WireOverheads, cluster
from topology.figures import Overheads

from ..defaults import INLINE_BYTES
from .fitting import FittedRow, FittedRows, Sample, left_out_rows
from .flat import PlanRequest
from .geometry import Geometry
from .searching import descend
from .select import plan
from .shortcut import short_cut_options

_SPAN = log(30)  # a figure is searched between a 30th and 30 times the value of `local`
_STEPS = 10  # cuts in the golden ratio: in the last turn to 2 %
_TURNS = {True: 4, False: 2}  # turns for figures of shared memory, which are priced fast, and for others
_SOURCE = "measured: overlap calibrate --here"

# Starting points for figures that the plain machine does not have.
_BEGINNINGS = {
    "meeting_s": 20e-6,
    "phase_s": 30e-6,
    "piece_s": 2e-6,
    "handing_s": 150e-6,
    "cached_bytes": 1e6,
    "cached_bytes_per_s": 50e9,
    "spread_bytes": 64e6,
    "spread_bytes_per_s": 40e9,
    "copied_bytes_per_s": 30e9,
}
_INSIDE = (
    "meeting_s",
    "piece_s",
    "cached_bytes",
    "cached_bytes_per_s",
    "memory_bytes_per_s",
    "handing_s",
    "spread_bytes",
    "spread_bytes_per_s",
    "copied_bytes_per_s",
)
_JOINED = ("launch_s", "step_s", "busy_s", "busy_bytes_per_s", "reducer_bytes_per_s")
_SHARING = ("meeting_s", "phase_s", "memory_bytes_per_s")  # the last one of a single processor


@dataclass(frozen=True, kw_only=True)
class OwnFit(FittedRows):
    """Fitted figures of this computer, with the rows."""

    inside: Mapping[str, float]  # figures by name, for ranks of one process
    # figures by name, for ranks of several processes; empty if none were measured. With `phase_s`, they share memory.
    between: Mapping[str, float]


def fit_own(samples: Sequence[Sample], *, cores: int, shared_memory: bool = False) -> OwnFit:
    """Find the figures that predict samples best: least sum of the logarithms of predicted over measured.

    Args:
        samples: Samples inside one process and, if there are any, between several.
        cores: Number of processors that all processes share.
        shared_memory: Whether processes read each other's memory.
    """
    local = cluster("local").machine
    inside, between = {name: _start_value(local, name) for name in _INSIDE}, dict[str, float]()
    left_out = left_out_rows([str(sample.processes) for sample in samples])  # other sizes of each collective
    seen = [sample for sample, out in zip(samples, left_out, strict=True) if not out]
    within = [sample for sample in seen if sample.processes == 1]
    across = [sample for sample in seen if sample.processes > 1]
    if within:
        inside = _improve_figures(inside, lambda x: _loss(within, set_figures(local, x, {}, cores)), turns=_TURNS[True])
    if across:
        starts = {name: _start_value(local, name, between=True) for name in (_SHARING if shared_memory else _JOINED)}
        turns = _TURNS[shared_memory]
        between = _improve_figures(starts, lambda x: _loss(across, set_figures(local, inside, x, cores)), turns=turns)
    machine = set_figures(local, inside, between, cores)
    rows = (
        FittedRow(sample=sample, predicted_s=_predicted_s(sample, machine), left_out=out)
        for sample, out in zip(samples, left_out, strict=True)
    )
    return OwnFit(inside=inside, between=between, rows=tuple(rows))


def set_figures(machine: Machine, inside: Mapping[str, float], between: Mapping[str, float], cores: int) -> Machine:
    """Return the machine with other figures; its other fields stay."""
    collectives = machine.collectives
    figures: dict[str, Any] = {name: _fitted_figure(value) for name, value in inside.items()}
    if "handing_s" in inside:
        figures["inline_bytes"] = Figure(value=float(INLINE_BYTES), source="overlap/defaults.py", confidence="A")
    usual = replace(collectives.usual, **figures)
    between_nodes = collectives.between_nodes
    if "phase_s" in between and between_nodes is not None:
        shared: dict[str, Any] = {name: _fitted_figure(value) for name, value in between.items()}
        between_nodes = replace(between_nodes, **{**figures, **shared}, cores=_fitted_figure(cores), shared_memory=True)
    elif between and between_nodes is not None:
        network = machine.network
        kind = network.link if network else "none"
        wires = tuple(_fitted_wire(wire, between) if wire.kind == kind else wire for wire in between_nodes.wires)
        between_nodes = replace(
            between_nodes,
            launch_s=_fitted_figure(between["launch_s"]),
            reducer_bytes_per_s=_fitted_figure(between["reducer_bytes_per_s"]),
            cores=_fitted_figure(cores),
            wires=wires,
        )
    return replace(machine, collectives=replace(collectives, usual=usual, between_nodes=between_nodes))


def _fitted_wire(wire: WireOverheads, figures: Mapping[str, float]) -> WireOverheads:
    """Return the overheads of a wire with fitted times of a message; its other figures stay."""
    return replace(
        wire,
        step_s=_fitted_figure(figures["step_s"]),
        gap_s=_fitted_figure(figures["step_s"]),
        incast_s=_fitted_figure(figures["step_s"]),
        busy_s=_fitted_figure(figures["busy_s"]),
        busy_bytes_per_s=_fitted_figure(figures["busy_bytes_per_s"]),
    )


def _fitted_figure(value: float) -> Figure:
    return Figure(value=value, source=_SOURCE, confidence="D")


def _start_value(machine: Machine, name: str, *, between: bool = False) -> float:
    """Return the machine's present figure as the start of the search, or a fixed one where it has none."""
    overheads: Overheads | None = machine.collectives.between_nodes if between else machine.collectives.usual
    assert overheads is not None, "the plain machine has figures between processes"
    network = machine.network.link if machine.network else "none"
    wire = next((wire for wire in overheads.wires if wire.kind == network), None)
    figure = getattr(overheads, name, None) or getattr(wire, name, None)
    return float(figure.value) if figure is not None and name not in _BEGINNINGS else _BEGINNINGS[name]


def _improve_figures(
    starts: Mapping[str, float], loss: Callable[[dict[str, float]], float], *, turns: int
) -> dict[str, float]:
    """Improve one figure after the other, in ever smaller ranges."""

    def bounds(turn: int, logarithm: float) -> tuple[float, float]:
        """Return the range of a figure's logarithm in a turn: around its present value, narrower after the first."""
        span = _SPAN / (4**turn if turn < 2 else 8)
        return logarithm - span, logarithm + span

    return descend(starts, loss, bounds, turns=turns, steps=_STEPS)


def _loss(samples: Sequence[Sample], machine: Machine) -> float:
    """Return the sum of the absolute logarithms of predicted over measured times."""
    errors = np.array([log(_predicted_s(sample, machine) / sample.time_s) for sample in samples])
    return float(np.abs(errors).sum())  # other programs spoil single rows, so a fit of squares would follow them


def _predicted_s(sample: Sample, machine: Machine) -> float:
    """Return the predicted time of a sample: by the direct path where its ranks share memory, else by the best plan."""
    where = Cluster.of(machine, nodes=sample.processes, ranks=len(sample.ranks))
    between = machine.collectives.between_nodes
    if sample.processes > 1 and not (between is not None and between.shared_memory):
        return plan(sample.collective, sample.nbytes, where).predicted_s
    geometry = Geometry(cluster=where, ranks=sample.ranks)  # ranks that share memory use the direct path where they can
    (option,), _ = short_cut_options(PlanRequest(collective=sample.collective, geometry=geometry))
    return option.price(sample.nbytes).total_s
