"""Validation of predicted steps: published ones beside predictions, with and without the rows used for fitting.

One figure was fitted to these rows: `sustained`, the share of the benchmarks' rates that is left in a whole step, one
for all GPUs. Each row is therefore also predicted with that figure fitted to all other rows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import ceil, exp, log
from pathlib import Path
from statistics import mean, median

import topology
from topology import Cluster

from .. import Virtual
from .configurations import load
from .device import Device
from .estimates import Estimate, estimate
from .layout import Layout
from .model import Model

PLAIN_EFFICIENCY = 0.5
"""Share of the peak that computes reach where no products were measured, as in good implementations of large models."""

COVERED = 0.8
"""Share of the left-out rows of its class that a band covers."""

_LEAST_CLASS_ROWS = 4  # rows: a class with fewer gets the band of all classes


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """A training step that somebody ran and published."""

    id: str  # Its name
    source: str  # Where it was published
    step_class: str  # Chip and dtype of products
    model: Model  # The trained model
    layout: Layout  # Its layout
    cluster: Cluster  # The machines
    measured_s: float  # The time of a step
    noted: str = ""  # Differences between the row and the model

    def predict(self) -> Estimate:
        """Predict the step with the measured rates of its device, or a plain efficiency without them."""
        device = Device.of(self.cluster)
        virtual = Virtual(efficiency=1.0 if device else PLAIN_EFFICIENCY)
        return estimate(self.model, self.layout, self.cluster, virtual, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """A published step and its predictions."""

    published: PublishedStep  # The published step
    predicted_s: float  # With all figures as they are
    compute: float  # Share of the predicted step that is computed
    fits: bool | None  # Whether the prediction fits the memory; it did
    left_out_s: float  # Predicted with `sustained` fitted to the other rows

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of the measured time."""
        return self.predicted_s / self.published.measured_s - 1

    @property
    def unseen(self) -> float:
        """Error of the prediction that was fitted without this row, as a share of the measured time."""
        return self.left_out_s / self.published.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBand:
    """Errors of predicted steps of one class, as shares of the measured times."""

    name: str  # The class, or "all classes"
    rows: int  # Number of published steps behind it
    typical: float  # The median of their sizes
    covering: float  # The size that `COVERED` of them do not exceed
    worst: float  # The largest

    @classmethod
    def over(cls, name: str, errors: Iterable[float]) -> StepBand:
        """Return the band of a class, from the errors of its rows."""
        sizes = sorted(map(abs, errors))
        last = ceil(COVERED * len(sizes) - 1e-9) - 1  # less 1e-9: 0.8 * 5 may be a little more than 4
        return cls(name=name, rows=len(sizes), typical=median(sizes), covering=sizes[last], worst=sizes[-1])


def step_class(cluster: Cluster, dtype: str) -> str:
    """Return the class of a step: its chip, and whether products are in eight bits."""
    kind = "fp8" if dtype.startswith("float8") else "fp32" if dtype == "float32" else "bf16"
    return f"{cluster.machine.chip.name} {kind}"


@cache
def published_steps() -> tuple[PublishedStep, ...]:
    """Return all published training steps, from steps.toml."""
    rows = tomllib.loads((_published_folder() / "steps.toml").read_text(encoding="utf-8"))["step"]
    return tuple(_parse_step(row) for row in rows)


def _parse_step(row: Mapping[str, object]) -> PublishedStep:
    """Return a published step from its row in steps.toml."""
    name, _, nodes = str(row["cluster"]).partition(" ")
    where = str(_published_folder() / name) if name.endswith(".toml") else name
    cluster = topology.cluster(f"{where} {nodes}".strip(), strict=False)
    sequence, figures = row.get("sequence"), row["layout"]
    assert isinstance(figures, dict)
    shared = figures.get("tp", 1) * figures.get("pp", 1) * figures.get("cp", 1)
    layout = Layout(dp=cluster.world_size // shared, **{"global_batch": row["global_batch"], **figures})
    return PublishedStep(
        id=str(row["id"]),
        source=str(row["source"]),
        step_class=step_class(cluster, layout.dtype),
        model=load(str(row["model"]), {"sequence": sequence} if isinstance(sequence, int) else None),
        layout=layout,
        cluster=cluster,
        measured_s=float(str(row["measured_s"])),
        noted=str(row.get("noted", "")),
    )


def compare_steps(rows: Sequence[PublishedStep]) -> list[StepComparison]:
    """Predict published steps; steps of measured devices also with `sustained` fitted to the others.

    Only the computes of a step change with that figure.
    """
    steps = [row.predict() for row in rows]
    measured = [step.device is not None for step in steps]
    shares = [step.parts.compute_ns / step.parts.step_ns for step in steps]
    speeds = [_needed_speed(row, step, share) for row, step, share in zip(rows, steps, shares, strict=True)]
    comparisons = []
    for index, (row, step) in enumerate(zip(rows, steps, strict=True)):
        other_speeds = [speed for row_index, speed in enumerate(speeds) if measured[row_index] and row_index != index]
        factor = exp(mean(map(log, other_speeds))) if measured[index] and other_speeds else 1.0
        left_out_s = step.step_s * (shares[index] / factor + 1 - shares[index])
        comparisons.append(
            StepComparison(
                published=row, predicted_s=step.step_s, compute=shares[index], fits=step.fits, left_out_s=left_out_s
            )
        )
    return comparisons


def _needed_speed(row: PublishedStep, step: Estimate, share: float) -> float:
    """Return the factor by which faster computes would give the step its measured time."""
    computed_s = row.measured_s - step.step_s * (1 - share)
    # At least a tenth of the step is computed: a smaller rest is an error of the communication.
    return step.step_s * share / max(computed_s, 0.1 * row.measured_s)


# -- bands -----------------------------------------------------------------------------------------------------------


def class_band(cluster: Cluster, dtype: str) -> StepBand:
    """Return the band of left-out steps of a class; if these are few, the wider one of it and that of all classes."""
    errors = left_out_errors()
    name = step_class(cluster, dtype)
    class_errors = [error for row_class, error in errors.values() if row_class == name]
    everything = StepBand.over("all classes", [error for _, error in errors.values()])
    if not class_errors:
        return everything
    own_band = StepBand.over(name, class_errors)
    if len(class_errors) >= _LEAST_CLASS_ROWS:
        return own_band
    return max(own_band, everything, key=lambda band: band.covering)


@cache
def left_out_errors() -> Mapping[str, tuple[str, float]]:
    """Return the (class, error) of each published step when it is left out, from the file that `record` writes."""
    rows = tomllib.loads((_published_folder() / "unseen.toml").read_text(encoding="utf-8"))
    return {name: (str(row["class"]), float(row["error"])) for name, row in rows.items()}


def format_errors(rows: Sequence[StepComparison]) -> str:
    """Return the text of the file of errors, from which bands are computed."""
    command = "overlap calibrate --published steps --record"
    lines = [f"# Errors of predictions of published steps, each left out. Written by `{command}`."]
    lines += [
        f'{row.published.id} = {{ class = "{row.published.step_class}", error = {row.unseen:.4f} }}' for row in rows
    ]
    return "\n".join(lines) + "\n"


def record(rows: Sequence[StepComparison]) -> Path:
    """Write the file of errors of left-out steps, and return its path."""
    path = _published_folder() / "unseen.toml"
    path.write_text(format_errors(rows), encoding="utf-8")
    return path


def _published_folder() -> Path:
    """Return the folder of the published rows."""
    return Path(str(files(__package__))) / "published"
