"""Trust in predictions: the errors of collectives and of steps on published rows that nothing was fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from topology import Cluster

from ..cost.parameters import is_measured
from ..cost.validation import Accuracy, Class, accuracy_classes
from .layout import Layout
from .parts import MESSAGE, StepOperation, StepParts
from .validation import StepBand, class_band


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Errors, as shares."""

    typical: float  # The median one
    worst: float  # The largest
    rows: int  # Number of published rows behind them
    of: str  # Chip, place and dtype of these rows
    measured: bool  # Whether the size lies within published sizes of that very shape


def band_of(cluster: Cluster, operation: StepOperation) -> Band:
    """Return the band of an operation: that of its chip, network or not, and dtype, or of the nearest that is known."""
    where = "across nodes" if len({cluster.place(rank).node for rank in operation.ranks}) > 1 else "one node"
    found = _nearest(cluster.machine.name.split()[0], f"{cluster.machine.chip.name}, {where}", operation.dtype)
    size, inside = operation.nbytes, False
    if operation.op != MESSAGE:
        inside = is_measured(cluster, len(operation.ranks), operation.op, size, operation.dtype)
    return _joined(found, inside)


@cache
def _nearest(machine: str, name: str, dtype: str) -> list[Class]:
    """Return the classes of a name and dtype; where nothing is known, of any dtype, then any chip, then all."""
    own = [each for each in accuracy_classes(machine) if each.name == name and each.unseen.rows]
    if own:
        return [each for each in own if each.dtype == dtype] or own
    return _of_place(name.split(", ")[1]) or _of_place(None)


@cache
def _of_place(place: str | None) -> list[Class]:
    return [each for each in accuracy_classes(place=place) if each.unseen.rows]


def _joined(classes: Sequence[Class], inside: bool) -> Band:
    unseen = Accuracy.together(each.unseen for each in classes)
    names = f"{classes[0].name}, {classes[0].dtype}" if len(classes) == 1 else _shared([each.name for each in classes])
    return Band(
        typical=unseen.median,
        worst=unseen.worst,
        rows=unseen.rows,
        of=names,
        measured=inside,
    )


def _shared(names: Sequence[str]) -> str:
    chips, places = ({name.split(", ")[part] for name in names} for part in (0, 1))
    return ", ".join(each.pop() if len(each) == 1 else other for each, other in ((chips, "all chips"), (places, "all")))


def band_of_step(cluster: Cluster, layout: Layout, parts: StepParts) -> StepBand:
    """Return the band of a step: of published steps that were left out, or of its communication if that is wider."""
    typical = worst = 0.0
    for operation, amount in parts.operations.items():
        if amount.wire_ns:
            band = band_of(cluster, operation)
            typical += band.typical * amount.wire_ns / parts.step_ns
            worst += band.worst * amount.wire_ns / parts.step_ns
    of = class_band(cluster, layout.dtype)
    return replace(of, typical=max(of.typical, typical), covering=max(of.covering, typical), worst=max(of.worst, worst))
