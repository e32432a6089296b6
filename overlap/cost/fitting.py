"""Fit of the `[collectives]` figures of a machine to measured collectives, and the error of rows left out.

FittedRow figures: the launch of an operation, its further launch between nodes, and the shares of bandwidth that wires
inside nodes and the network give. Every third row of each collective is left out, and shows how well the others
predict it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import median

import numpy as np

from topology import Cluster, Figure, Machine, WireOverheads
from topology.figures import Overheads

from ..collectives.placement import Floats
from .searching import descend
from .select import plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured collective: its ranks, its bytes, and its time."""

    collective: str  # name of the collective
    nbytes: int  # size of the whole vector
    dtype: str = "float32"  # type of the elements
    ranks: tuple[int, ...]  # world ranks that took part
    processes: int = 1  # number of processes of the ranks, if they ran on this computer
    time_s: float  # measured time


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRow:
    """A sample and the fitted machine's prediction for it."""

    sample: Sample  # the measured collective
    predicted_s: float  # predicted time
    left_out: bool  # whether no figure was fitted to this sample

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of the measured time."""
        return self.predicted_s / self.sample.time_s - 1


@dataclass(frozen=True, kw_only=True)
class FittedRows:
    """Rows that a fit used or left out, each with its prediction, and their errors."""

    rows: tuple[FittedRow, ...]  # all samples

    def errors(self, *, left_out: bool) -> tuple[int, float, float]:
        """Return the number of rows that were left out, or were not, with the median and the worst error, as shares."""
        errors = [abs(row.error) for row in self.rows if row.left_out is left_out]
        return len(errors), median(errors) if errors else 0.0, max(errors, default=0.0)


def left_out_rows(kinds: Sequence[str]) -> list[bool]:
    """Return for each row whether the fit leaves it out: every third of a kind that has at least three rows."""
    seen, third = dict[str, int](), []
    for kind in kinds:
        number = seen.get(kind, 0)
        seen[kind] = number + 1
        third.append(number % 3 == 1)
    return [out and seen[kind] > 2 for out, kind in zip(third, kinds, strict=True)]


_LEAST_SHARE = 0.02
_STEPS = 9  # cuts of the range of a share: to 1 % of 50 times
_TURNS = 2


@dataclass(frozen=True, kw_only=True)
class MachineFit(FittedRows):
    """Fitted figures of a machine, with the rows."""

    launches: Launches  # time to launch an operation
    shares: Mapping[str, float]  # share of the bandwidth that wires give, by kind of wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Fitted times to launch an operation: inside a node, and the extra time between nodes; None if not measured."""

    # launch of every operation; None if no row stayed inside a node: the figure of the machine's file stays then.
    inside_s: float | None
    between_s: float | None  # the further time of an operation that needs the network; None if no row needed it


def with_shares(machine: Machine, launches: Launches, shares: Mapping[str, float], source: str) -> Machine:
    """Return a machine with other figures of collectives; its other figures stay."""
    figures = machine.collectives
    link = machine.network.link if machine.network else ""

    def add_figures(overheads: Overheads) -> Overheads:
        """Return overheads with the fitted efficiencies of wires and launches; all others stay."""
        wires = {wire.kind: wire for wire in overheads.wires}
        for kind, share in shares.items():
            wires[kind] = replace(wires.get(kind, WireOverheads(kind=kind)), efficiency=_fitted_figure(share, source))
        if link and launches.between_s is not None:
            between = wires.get(link, WireOverheads(kind=link))
            wires[link] = replace(between, launch_s=_fitted_figure(launches.between_s, source))
        launch = overheads.launch_s if launches.inside_s is None else _fitted_figure(launches.inside_s, source)
        return replace(overheads, launch_s=launch, wires=tuple(wires.values()))

    between_nodes = None if figures.between_nodes is None else add_figures(figures.between_nodes)
    return replace(machine, collectives=replace(figures, usual=add_figures(figures.usual), between_nodes=between_nodes))


def _fitted_figure(value: float, source: str) -> Figure:
    return Figure(value=value, source=source, confidence="B")


def fit(cluster: Cluster, samples: Sequence[Sample]) -> MachineFit:
    """Find the figures that predict samples best: least squares of the logarithms of predicted over measured.

    Cost: some dozens of plans for each collective.
    """
    left_out = left_out_rows([sample.collective for sample in samples])
    seen = [sample for sample, out in zip(samples, left_out, strict=True) if not out]
    kinds = _wire_kinds(cluster, samples)

    def loss(shares: Mapping[str, float]) -> float:
        """Return the loss of a machine with these shares, and the launches that suit them best."""
        times_s = _predicted_s(cluster, seen, shares)
        return _loss(seen, np.array(_add_launches_s(cluster, seen, times_s, _fit_launches(cluster, seen, times_s))))

    turns, whole = _TURNS if len(kinds) > 1 else 1, (log(_LEAST_SHARE), 0.0)
    shares = descend(dict.fromkeys(kinds, 0.8), loss, lambda turn, share: whole, turns=turns, steps=_STEPS)
    without_s = _predicted_s(cluster, samples, shares)
    launches = _fit_launches(cluster, seen, without_s[~np.array(left_out)])
    rows = (
        FittedRow(sample=sample, predicted_s=time_s, left_out=out)
        for sample, time_s, out in zip(
            samples, _add_launches_s(cluster, samples, without_s, launches), left_out, strict=True
        )
    )
    return MachineFit(launches=launches, shares=shares, rows=tuple(rows))


def crosses(sample: Sample, cluster: Cluster) -> bool:
    """Return whether the ranks of a sample are on several nodes of the cluster."""
    return len({cluster.place(rank).node for rank in sample.ranks}) > 1


def wire_s(cluster: Cluster, sample: Sample) -> float:
    """Return the time that the busiest wire carries a sample at its full rate, by the best known algorithm."""
    none = Launches(inside_s=0.0, between_s=0.0)
    whole = dict.fromkeys(_wire_kinds(cluster, [sample]), 1.0)
    machine = replace(cluster, machine=with_shares(cluster.machine, none, whole, "upper bound"))
    busiest = plan(sample.collective, sample.nbytes, machine, sample.ranks, dtype=sample.dtype).busiest
    return busiest.busy_s if busiest else 0.0


def _fit_launches(cluster: Cluster, samples: Sequence[Sample], without_s: Floats) -> Launches:
    """Return the launches that make the predictions best when they are added."""
    between = np.array([crosses(sample, cluster) for sample in samples])
    inside_s, all_s = (
        _fit_launch_s([s for s, out in zip(samples, some, strict=True) if out], without_s[some]) if some.any() else None
        for some in (~between, between)
    )
    figure = cluster.machine.collectives.usual.launch_s
    known_s = inside_s if inside_s is not None else figure.value if figure else 0.0
    return Launches(inside_s=inside_s, between_s=None if all_s is None else max(0.0, all_s - known_s))


def _add_launches_s(cluster: Cluster, samples: Sequence[Sample], without_s: Floats, launches: Launches) -> list[float]:
    """Return predictions in seconds with a launch added to each, and a second one if it crosses nodes."""
    figure = cluster.machine.collectives.usual.launch_s
    inside_s = launches.inside_s if launches.inside_s is not None else figure.value if figure else 0.0
    return [
        float(time_s) + inside_s + (launches.between_s or 0.0) * crosses(sample, cluster)
        for sample, time_s in zip(samples, without_s, strict=True)
    ]


def _wire_kinds(cluster: Cluster, samples: Sequence[Sample]) -> list[str]:
    """Return the kinds of wires that bound the samples: inside nodes, and between them."""
    nodes = max(len({cluster.place(rank).node for rank in sample.ranks}) for sample in samples)
    wires, network = cluster.machine.wires.link, cluster.machine.network
    inside = [wires] if wires != "none" else ["chip"]
    return [*inside, *([network.link] if network and nodes > 1 else [])]


def _predicted_s(cluster: Cluster, samples: Sequence[Sample], shares: Mapping[str, float]) -> Floats:
    """Predict samples on a machine with these shares, without any launch."""
    none = Launches(inside_s=0.0, between_s=0.0)
    machine = replace(cluster, machine=with_shares(cluster.machine, none, shares, "being fitted"))
    return np.array(
        [plan(s.collective, s.nbytes, machine, s.ranks, dtype=s.dtype).predicted_s for s in samples], np.float64
    )


def _fit_launch_s(samples: Sequence[Sample], without_s: Floats) -> float:
    """Return the launch that makes all predictions best, among the launches that are right for one sample."""
    choices: list[float] = [
        0.0,
        *(s.time_s - time_s for s, time_s in zip(samples, without_s.tolist(), strict=True) if s.time_s > time_s),
    ]
    return float(min(choices, key=lambda launch_s: _loss(samples, without_s + launch_s)))


def _loss(samples: Sequence[Sample], predicted_s: Floats) -> float:
    """Return the sum of squared logarithms of predicted over measured times."""
    measured_s = np.array([sample.time_s for sample in samples])
    return float((np.log(np.maximum(predicted_s, 1e-12) / measured_s) ** 2).sum())
