"""The figures of the plain machine, `local`, from what was measured on this computer.

Inside a process: what meeting costs each rank, and the bandwidth of memory and caches. Between processes: what starting
an operation and its messages costs, what a byte costs, and what a reducer adds. Every third row is left out of the
fit, and tells how well the others predict it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from topology import Cluster, Figure, Machine, WireOverheads, cluster
from topology.overheads import Overheads

from ..select import DIRECT, plan
from .left_out import Fitted, FittedRows, left_out_rows

__all__ = ["OwnFit", "OwnSample", "fit_own", "machine_of"]

_SPAN = log(30)  # a figure is looked for between a 30th and 30 times of what `local` says
_GOLDEN = (5**0.5 - 1) / 2
_STEPS = 10  # cuts in the golden ratio: in the last turn to 2 %
_TURNS = 2
_SOURCE = "measured: overlap calibrate --here"

# What small vectors get of caches, where a search for it begins; the plain machine has none.
_CACHED = {"cached_bytes": 4e6, "cached_bytes_per_s": 50e9}
_INSIDE = ("meeting_s", "memory_bytes_per_s", *_CACHED)
_BETWEEN = ("launch_s", "step_s", "busy_s", "busy_bytes_per_s", "reducer_bytes_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSample:
    """One measured collective.

    Attributes:
        collective: its name.
        nbytes: of the whole vector.
        ranks: that took part.
        processes: that they were in.
        time_s: that it took.
    """

    collective: str
    nbytes: int
    ranks: int
    processes: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class OwnFit(FittedRows[OwnSample]):
    """What was found.

    Attributes:
        inside: figures by name, of ranks of one process.
        between: the same of ranks of several; empty if none were measured.
    """

    inside: Mapping[str, float]
    between: Mapping[str, float]


def fit_own(samples: Sequence[OwnSample], *, cores: int) -> OwnFit:
    """Find the figures that predict samples best: least sum of the logarithms of predicted over measured.

    Args:
        samples: Inside one process and, if there are any, between several.
        cores: That all processes share.
    """
    own = cluster("local").machine
    inside, between = {name: _told(own, name) for name in _INSIDE}, dict[str, float]()
    left_out = left_out_rows([str(each.processes) for each in samples])  # of each collective other sizes
    seen = [each for each, out in zip(samples, left_out, strict=True) if not out]
    within = [each for each in seen if each.processes == 1]
    across = [each for each in seen if each.processes > 1]
    if within:
        inside = _found(inside, lambda told: _loss(within, machine_of(own, told, {}, cores)))
    if across:
        starts = {name: _told(own, name, between=True) for name in _BETWEEN}
        between = _found(starts, lambda told: _loss(across, machine_of(own, inside, told, cores)))
    machine = machine_of(own, inside, between, cores)
    rows = (
        Fitted(sample=sample, predicted_s=_predicted_s(sample, machine), left_out=out)
        for sample, out in zip(samples, left_out, strict=True)
    )
    return OwnFit(inside=inside, between=between, rows=tuple(rows))


def machine_of(machine: Machine, inside: Mapping[str, float], between: Mapping[str, float], cores: int) -> Machine:
    """Return the machine with other figures; all that it says besides stays."""
    told = machine.collectives
    figures = {name: _figure(value) for name, value in inside.items()}
    usual = replace(
        told.usual,
        meeting_s=figures["meeting_s"],
        memory_bytes_per_s=figures["memory_bytes_per_s"],
        cached_bytes=figures["cached_bytes"],
        cached_bytes_per_s=figures["cached_bytes_per_s"],
    )
    found = told.between_nodes
    if between and found is not None:
        network = machine.network
        kind = network.link if network else "none"
        wires = tuple(_wire(wire, between) if wire.kind == kind else wire for wire in found.wires)
        found = replace(
            found,
            launch_s=_figure(between["launch_s"]),
            reducer_bytes_per_s=_figure(between["reducer_bytes_per_s"]),
            cores=_figure(cores),
            wires=wires,
        )
    return replace(machine, collectives=replace(told, usual=usual, between_nodes=found))


def _wire(wire: WireOverheads, told: Mapping[str, float]) -> WireOverheads:
    return replace(
        wire,
        step_s=_figure(told["step_s"]),
        gap_s=_figure(told["step_s"]),
        incast_s=_figure(told["step_s"]),
        busy_s=_figure(told["busy_s"]),
        busy_bytes_per_s=_figure(told["busy_bytes_per_s"]),
    )


def _figure(value: float) -> Figure:
    return Figure(value=value, source=_SOURCE, confidence="D")


def _told(machine: Machine, name: str, *, between: bool = False) -> float:
    """Return what the file says."""
    of: Overheads | None = machine.collectives.between_nodes if between else machine.collectives.usual
    assert of is not None, "the plain machine says what processes cost"
    network = machine.network.link if machine.network else "none"
    wire = next((wire for wire in of.wires if wire.kind == network), None)
    figure = getattr(of, name, None) or getattr(wire, name, None)
    return float(figure.value) if figure is not None else _CACHED[name]


def _found(starts: Mapping[str, float], loss: Callable[[dict[str, float]], float]) -> dict[str, float]:
    """Improve one figure after the other, in ever smaller ranges."""
    found = dict(starts)
    for turn in range(_TURNS):
        for name in found:
            span = _SPAN / 4**turn

            def of(step: float, name: str = name, middle: float = log(found[name])) -> float:
                return loss({**found, name: exp(middle + step)})

            found[name] *= exp(_lowest(of, -span, span))
    return found


def _lowest(of: Callable[[float], float], low: float, high: float) -> float:
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    of_left, of_right = of(left), of(right)
    for _ in range(_STEPS):
        if of_left <= of_right:
            high, right, of_right = right, left, of_left
            left = high - _GOLDEN * (high - low)
            of_left = of(left)
        else:
            low, left, of_left = left, right, of_right
            right = low + _GOLDEN * (high - low)
            of_right = of(right)
    return left if of_left <= of_right else right


def _loss(samples: Sequence[OwnSample], machine: Machine) -> float:
    errors = np.array([log(_predicted_s(each, machine) / each.time_s) for each in samples])
    return float(np.abs(errors).sum())  # what else ran meanwhile spoils single rows, which must not draw the others


def _predicted_s(sample: OwnSample, machine: Machine) -> float:
    where = Cluster.of(machine, nodes=sample.processes, ranks=sample.ranks)
    only = DIRECT if sample.processes == 1 else None  # what ranks of a process take whenever they can
    return plan(sample.collective, sample.nbytes, where, algorithm=only).predicted_s
