"""Published measurements of collectives: rows of measurements.toml, which show where a price is an extrapolation.

A row that names a fitted figure was used for calibration; the model has not seen the others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One collective that somebody measured."""

    machine: str  # a name for `topology.cluster`
    ranks: int  # number of ranks that took part
    group: tuple[int, ...] = ()  # the world ranks that took part; all ranks of the machine if empty
    collective: str  # name of the collective
    nbytes: int  # size of the whole vector: the larger one of a rank's input and output
    # if not 0, the figure is the time minus the time of this many bytes, because the software's fixed costs changed.
    beyond_bytes: int = 0
    dtype: str = "float32"  # type of the elements
    peer_direct: bool = True  # whether adapters read device memory themselves
    figure: float  # the published value
    # unit of the figure. "nw_bw MB/s" is bytes over time, times 2(n-1)/n for an all-reduce and (n-1)/n for the others
    # (hccl_demo; its all-gather counts the bytes of one rank).
    unit: Literal["us", "nw_bw MB/s"]
    source: str  # place of publication
    fits: str = ""  # the figure of the model that was fitted to this row, empty if the model has not seen it


def _read_measurements(row: dict[str, Any]) -> Iterator[Measurement]:
    """Yield a measurement for each size of a row of the file; sizes are in units of `scale` bytes."""
    scale, beyond, group = row.pop("scale", 1), row.pop("beyond", 0), tuple(row.pop("group", ()))
    fits = row.pop("fits", {})
    for size, figure in row.pop("figures").items():
        yield Measurement(
            **row,
            nbytes=int(size) * scale,
            beyond_bytes=beyond * scale,
            group=group,
            figure=float(figure),
            fits=fits.get(size, ""),
        )


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

COLLECTIVES = tuple(measurement for row in _FILE["collectives"] for measurement in _read_measurements(row))
"""Collectives with a published time or bandwidth and configuration."""
