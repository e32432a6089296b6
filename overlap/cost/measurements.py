"""Published measurements of collectives: rows of measurements.toml, to fit the model to or to judge it by.

A row that names a fitted figure was used for calibration; the model has not seen the others. This module computes no
predictions: see `validation`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from topology import Cluster, cluster

Unit = Literal["us", "algbw GB/s", "nw_bw MB/s"]


_MACHINES = Path(__file__).with_name("machines")


def measured_cluster(machine: str, *, strict: bool | None = None) -> Cluster:
    """Return the cluster of a measurement.

    Args:
        machine: A name for `topology.cluster`, or a file of the folder `machines`, with its nodes.
        strict: See `topology.cluster`.
    """
    name, _, nodes = machine.partition(" ")
    if name.endswith(".toml"):
        machine = f"{_MACHINES / name} {nodes}".strip()
    return cluster(machine, strict=strict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One collective that somebody measured."""

    machine: str  # a name for `topology.cluster`, or a file of the folder `machines`
    ranks: int  # number of ranks that took part
    group: tuple[int, ...] = ()  # the world ranks that took part; all ranks of the machine if empty
    collective: str  # name of the collective
    nbytes: int  # size of the whole vector: the larger one of a rank's input and output
    # if not 0, the figure is the time minus the time of this many bytes, because the software's fixed costs changed.
    beyond_bytes: int = 0
    dtype: str = "float32"  # type of the elements
    peer_direct: bool = True  # whether adapters read device memory themselves
    version: str = ""  # version of the library, if it is older than the machine's
    figure: float  # the published value
    # unit of the figure. "algbw GB/s" is bytes over time (nccl-tests), "nw_bw MB/s" that times 2(n-1)/n for an
    # all-reduce and (n-1)/n for the others (hccl_demo; its all-gather counts the bytes of one rank).
    unit: Unit
    source: str  # place of publication
    fits: str = ""  # the figure of the model that was fitted to this row, empty if the model has not seen it

    @property
    def travelling(self) -> float:
        """Bytes that the published bandwidth counts: all of the vector, or those that a rank sends."""
        if self.unit != "nw_bw MB/s":
            return float(self.nbytes)
        passes = 2 if self.collective == "all_reduce" else 1
        return self.nbytes * passes * (self.ranks - 1) / self.ranks

    @property
    def measured_s(self) -> float:
        """Published figure as a time in seconds."""
        return self.figure / 1e6 if self.unit == "us" else self.travelling / (self.figure * _BYTES_PER_S[self.unit])

    def as_published(self, duration_s: float) -> float:
        """Return a time in seconds in the unit of the published figure."""
        return duration_s * 1e6 if self.unit == "us" else self.travelling / duration_s / _BYTES_PER_S[self.unit]


_BYTES_PER_S: Mapping[str, float] = {"algbw GB/s": 1e9, "nw_bw MB/s": 1e6}


def at_library_version(cluster: Cluster, version: str) -> Cluster:
    """Return a cluster with another version of its machine's library."""
    machine = cluster.machine
    assert machine.collectives.library is not None
    library = replace(machine.collectives.library, version=version)
    return replace(cluster, machine=replace(machine, collectives=replace(machine.collectives, library=library)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """Range of sizes in which one algorithm was seen to take over from another."""

    machine: str  # a name for `topology.cluster`
    ranks: int  # number of ranks; the group consists of the first ranks of the machine
    collective: str  # name of the collective
    below: str  # the algorithm that is faster below the knee
    above: str  # the algorithm that is faster above the knee
    least_bytes: int  # the knee is not below this size
    most_bytes: int  # the knee is not above this size
    seen: str  # evidence: a measured range, or the statement of a document and the accuracy goal of the model
    source: str  # place of publication


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Throughputs of a training run with two settings."""

    machine: str  # a name for `topology.cluster`
    parameters: float  # number of parameters of the trained model
    itemsize: int  # bytes of a gradient and of a parameter
    host_copies: float  # samples per second with network traffic staged in host memory
    peer_direct: float  # samples per second with traffic directly from and to device memory
    source: str  # place of publication


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFigure:
    """A published figure that the model takes without a fit."""

    name: str  # name of the figure
    figure: str  # value, with its unit
    source: str  # place of publication


def _numbered_figures(row: dict[str, Any], key: str) -> Iterator[tuple[int, float, str]]:
    """Yield each number (a size, or a number of ranks) in the table `key` of a row, its figure, and the fitted name."""
    fits = row.pop("fits", {})
    for number, figure in row.pop(key).items():
        yield int(number), float(figure), fits.get(number, "")


def _read_measurements(row: dict[str, Any]) -> Iterator[Measurement]:
    """Yield a measurement for each size of a row of the file; sizes are in units of `scale` bytes."""
    scale, beyond, group = row.pop("scale", 1), row.pop("beyond", 0), tuple(row.pop("group", ()))
    for size, figure, fits in _numbered_figures(row, "figures"):
        nbytes, beyond_bytes = size * scale, beyond * scale
        yield Measurement(**row, nbytes=nbytes, beyond_bytes=beyond_bytes, group=group, figure=figure, fits=fits)


def _read_knees(row: dict[str, Any]) -> Iterator[Knee]:
    for collective in row.pop("collectives"):
        yield Knee(**row, collective=collective)


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

COLLECTIVES = tuple(measurement for row in _FILE["collectives"] for measurement in _read_measurements(row))
"""Collectives with a published time or bandwidth and configuration."""

KNEES = tuple(each for row in _FILE["knees"] for each in _read_knees(row))
"""Sizes at which documents and measurements see one algorithm take over from another."""

TRAINING = Training(**_FILE["training"])
"""The training run with a published throughput for a setting on and off."""

GIVEN = tuple(PublishedFigure(**row) for row in _FILE["given"])
"""Published latencies that are the model's own figures: there is nothing to predict."""
