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
class TimedProduct:
    """One measured matrix product of (m x k) and (k x n) numbers."""

    m: int
    n: int
    k: int
    dtype: str  # as machine files call it
    seconds: float

    @property
    def flops(self) -> float:
        """Operations of the product."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRate:
    """The rate of a dtype, and the errors of products that were left out one by one, as shares."""

    rate: Rate
    errors: tuple[float, ...]

    @property
    def typical(self) -> float:
        """Median of the absolute errors."""
        return median(map(abs, self.errors))

    @property
    def worst(self) -> float:
        """Largest absolute error."""
        return max(map(abs, self.errors))


def read(path: str) -> list[TimedProduct]:
    """Read timed products from a CSV file.

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
    units = [name for name in ("tflops", *_SECONDS) if name in columns]
    if missing := [name for name in ("m", "n", "k", "dtype") if name not in columns]:
        raise UsageError(f"{path}: expected columns m, n, k, dtype and tflops, us, ms or s, found no {missing[0]}")
    if len(units) != 1:
        raise UsageError(f"{path}: expected one column of tflops, us, ms or s, found {', '.join(units) or 'none'}")
    return [_parse_row(row, units[0], f"{path}:{number}") for row, (number, _) in zip(rows, lines[1:], strict=True)]


def _parse_row(row: Mapping[str, str | None], unit: str, where: str) -> TimedProduct:
    """Return the product of a row, whose time is in `unit`: "tflops", "us", "ms" or "s"."""

    def positive_number(name: str) -> float:
        """Return the number in a column of the row; refuse anything but a positive one."""
        text = row[name] or ""
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise UsageError(f"{where}: {name}: expected a positive number, found {text!r}")
        return value

    m, n, k = (round(positive_number(name)) for name in ("m", "n", "k"))
    figure = positive_number(unit)
    seconds = 2.0 * m * n * k / (figure * 1e12) if unit == "tflops" else figure * _SECONDS[unit]
    return TimedProduct(m=m, n=n, k=k, dtype=short_dtype((row["dtype"] or "").strip()), seconds=seconds)


def fit(rows: Sequence[TimedProduct], path: str) -> dict[str, FittedRate]:
    """Fit a rate to the products of each dtype.

    Raises:
        UsageError: If a dtype has too few products, or they make no rate.
    """
    fits = {}
    for dtype in dict.fromkeys(row.dtype for row in rows):
        products = [row for row in rows if row.dtype == dtype]
        if len(products) < _LEAST_ROWS:
            raise UsageError(f"{path}: {dtype}: expected {_LEAST_ROWS} products or more, found {len(products)}")
        rate = _fit_rate(products, path)
        errors = []  # of each product, predicted by the rate of all others
        for index, row in enumerate(products):
            rate_of_others = _fit_rate(products[:index] + products[index + 1 :], path)
            errors.append((rate_of_others.start_s + row.flops / rate_of_others.flops_per_s) / row.seconds - 1)
        fits[dtype] = FittedRate(rate=rate, errors=tuple(errors))
    return fits


def _fit_rate(rows: Sequence[TimedProduct], path: str) -> Rate:
    """Return the rate for which (start_s + flops / rate) / seconds is nearest to 1; start_s is at least 0."""
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


def machine_file(base: str, name: str, path: str, fits: Mapping[str, FittedRate]) -> str:
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
