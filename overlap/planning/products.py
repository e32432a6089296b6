"""Matrix products that a user has timed: read from a file, fitted to a chip's rates, written as a machine file.

The file is CSV with a header: columns m, n, k, dtype, and one of tflops, us, ms or s. Lines that begin with # are left
out. A rate is fitted for each dtype by least squares of relative errors.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from ..errors import UsageError
from ..simulation.compute_cost import short_dtype
from .calibrate import figure_line
from .device import Rate

_LEAST_ROWS = 4  # of a dtype: two are fitted, and each is predicted by the others
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One product and its time."""

    m: int
    n: int
    k: int
    dtype: str  # as machine files call it
    seconds: float

    @property
    def flops(self) -> float:
        """Its operations."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The rate of a dtype, and the errors of products that were left out one by one, as shares."""

    rate: Rate
    errors: tuple[float, ...]

    @property
    def typical(self) -> float:
        """Median size of the errors."""
        return median(map(abs, self.errors))

    @property
    def worst(self) -> float:
        """Largest size of the errors."""
        return max(map(abs, self.errors))


def read(path: str) -> list[Timed]:
    """Read timed products.

    Raises:
        UsageError: If the file cannot be read, or a row is no product; names file, row and column.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: {getattr(error, 'strerror', None) or error}; name a text file that can be read"
        ) from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip() and line[0] != "#"]
    rows = list(csv.DictReader(line for _, line in lines))
    columns = list(rows[0]) if rows else []
    timed = [name for name in ("tflops", *_SECONDS) if name in columns]
    if missing := [name for name in ("m", "n", "k", "dtype") if name not in columns]:
        raise UsageError(f"{path}: expected columns m, n, k, dtype and tflops, us, ms or s, found no {missing[0]}")
    if len(timed) != 1:
        raise UsageError(f"{path}: expected one column of tflops, us, ms or s, found {', '.join(timed) or 'none'}")
    return [_timed(row, timed[0], f"{path}:{number}") for row, (number, _) in zip(rows, lines[1:], strict=True)]


def _timed(row: Mapping[str, str | None], unit: str, where: str) -> Timed:
    def number(name: str) -> float:
        text = row[name] or ""
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise UsageError(f"{where}: {name}: expected a positive number, found {text!r}")
        return value

    m, n, k = (round(number(name)) for name in ("m", "n", "k"))
    figure = number(unit)
    seconds = 2.0 * m * n * k / (figure * 1e12) if unit == "tflops" else figure * _SECONDS[unit]
    return Timed(m=m, n=n, k=k, dtype=short_dtype((row["dtype"] or "").strip()), seconds=seconds)


def fit(rows: Sequence[Timed], path: str) -> dict[str, Fitted]:
    """Fit a rate to the products of each dtype.

    Raises:
        UsageError: If a dtype has too few products, or they make no rate.
    """
    fits = {}
    for dtype in dict.fromkeys(row.dtype for row in rows):
        products = [row for row in rows if row.dtype == dtype]
        if len(products) < _LEAST_ROWS:
            raise UsageError(f"{path}: {dtype}: expected {_LEAST_ROWS} products or more, found {len(products)}")
        rate = _rate(products, path)
        errors = []
        for index, row in enumerate(products):
            other = _rate(products[:index] + products[index + 1 :], path)
            errors.append((other.start_s + row.flops / other.flops_per_s) / row.seconds - 1)
        fits[dtype] = Fitted(rate=rate, errors=tuple(errors))
    return fits


def _rate(rows: Sequence[Timed], path: str) -> Rate:
    """Return the least squares of (start + flops / rate) / seconds = 1; no start is below nothing."""
    table = np.array([(1 / row.seconds, row.flops / row.seconds) for row in rows])
    scale = np.linalg.norm(table, axis=0)
    best, _, rank, _ = np.linalg.lstsq(table / scale, np.ones(len(rows)), rcond=5e-7)
    start_s = max(0.0, float(best[0] / scale[0])) if rank == 2 else 0.0  # one size shows no start
    each_s = float(np.sum(table[:, 1] * (1 - table[:, 0] * start_s)) / scale[1] ** 2)
    if each_s <= 0:
        raise UsageError(
            f"{path}: {rows[0].dtype}: expected larger products to take longer; these make no rate; measure them again"
        )
    return Rate(flops_per_s=1 / each_s, start_s=start_s)


def machine_file(base: str, name: str, path: str, fits: Mapping[str, Fitted]) -> str:
    """Return a machine file that extends another by the fitted products."""
    line = partial(figure_line, f"fitted: products in {Path(path).name}", "B")
    lines = [
        f"# Written by `overlap calibrate --products {Path(path).name}`.",
        f'extends = "{base}"',
        f'name = "{name}"',
    ]
    for dtype, fit in fits.items():
        lines += [
            "",
            f"# {len(fit.errors)} products, each left out: median error {fit.typical:.1%}, worst {fit.worst:.1%}.",
            f"[chip.products.{dtype}]",
            line("flops_per_s", fit.rate.flops_per_s),
            line("start_s", fit.rate.start_s),
        ]
    return "\n".join(lines) + "\n"
