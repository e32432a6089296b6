"""Output of `overlap bench`: runs the measurements, prints each row as soon as it is known, and writes JSON."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import trio

from ...collectives.kinds import Collective
from ...units import wrapped
from ..output import output_path, print_result
from .cases import SEED, Case
from .measuring import ProcessLayout, Result, measure_cases
from .options import cases, check_memory, layout, sampling
from .sampling import BATCH, BATCHED_BYTES, Sampling

_WRONG_EXIT = 1
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of the machine


def measure(args: argparse.Namespace) -> int:
    """Measure a collective over its sizes, print the table, and return the exit code."""
    worlds, how, where = cases(args), sampling(args), layout(args)
    args.json_file = output_path(args.json_file, option="--json-file")
    check_memory(worlds, MEMORY_BYTES)
    print_line = printer(args)
    print_line(title(worlds[0][0], how, where))
    print_line(header())
    rows = []
    for world in worlds:
        for result in measure_cases(world, how, where, check=bool(args.verify), algorithm=args.algorithm):
            rows.append(result)
            print_line(row(result))
    print_line(summary(rows))
    return finish(args, how, {"layout": asdict(where), "rows": describe_rows(rows)}, rows)


def printer(args: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints a line at once; it prints nothing where the JSON goes to stdout."""
    return (lambda text: None) if args.json else (lambda text: print(text, flush=True))


def finish(args: argparse.Namespace, how: Sampling, parts: Mapping[str, object], rows: Sequence[Result]) -> int:
    """Print or write the JSON, if it is asked for, and return the exit code."""
    is_written = print_result(args, lambda: document(how, parts), list)
    return _WRONG_EXIT if not is_written or any(row.wrong for row in rows) else 0


# -- the table -------------------------------------------------------------------------------------------------------

_COLUMNS = (
    ("size", "(B)", 10),
    ("count", "", 10),
    ("ranks", "", 5),
    ("time", "(us)", 8),
    ("p10", "(us)", 8),
    ("p90", "(us)", 8),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("wrong", "", 5),
)
"""Name, unit and width of each column; with a blank before each one the table has 79 columns."""


def remark(text: str) -> str:
    """Return a text as lines of at most 80 columns that begin with #."""
    return "\n".join(line for each in text.splitlines() for line in wrapped(each, first="# ", rest="# "))


def title(case: Case, sampling: Sampling, layout: ProcessLayout) -> str:
    """Return the operation and the way it is measured, as lines that begin with #."""
    place = "in place" if case.in_place else "out of place"
    factor = case.operation.kind.traits.busbw_factor
    text = (
        f"{_operation_text(case)}, {place}, {layout.describe()}\n{sampling.describe()}\n"
        f"GB is 10^9 bytes; busbw = algbw * {factor} with n ranks"
    )
    return remark(text)


def _operation_text(case: Case) -> str:
    """Return the operation, type, operator and root of all rows."""
    traits = case.operation.kind.traits
    parts = [case.operation.name]
    if case.operation.kind is not Collective.BARRIER:
        parts[0] += f" of {case.dtype.name}"
    parts += [case.op] if traits.reduces else []
    return ", ".join([*parts, *([f"root {case.root}"] if traits.rooted else [])])


def header() -> str:
    """Return the two lines of column names and units."""
    names, units, _ = zip(*_COLUMNS, strict=True)
    return "\n".join("#" + _align_columns(line)[1:].rstrip() for line in (names, units))


def row(measured: Result) -> str:
    """Return the line of the table for a measured case."""
    case, times = measured.case, measured.times
    return _align_columns(
        [
            str(case.size_bytes),
            str(case.count),
            str(case.ranks),
            *(number(value_ns / 1e3) for value_ns in (times.median_ns, times.p10_ns, times.p90_ns)),
            *_bandwidth_cells(measured),
            "N/A" if measured.wrong is None else str(measured.wrong),
        ]
    )


def summary(measured: Sequence[Result]) -> str:
    """Return the last line, which says whether results were right."""
    if any(result.wrong is None for result in measured):
        return "# results not checked (-c 0)"
    wrong = sum(result.wrong or 0 for result in measured)
    return f"# {wrong} wrong elements: FAILED" if wrong else "# every result checked: none wrong"


def number(value: float) -> str:
    """Return a figure with two decimals if it is small, and none if it is large."""
    return f"{value:.2f}" if value < 99.995 else f"{value:.1f}" if value < 9999.95 else f"{value:.0f}"


def _bandwidth_cells(measured: Result) -> tuple[str, str]:
    """Return algbw and busbw in GB/s; dashes for a barrier, which carries no data."""
    if measured.case.operation.kind is Collective.BARRIER:
        return "-", "-"
    return f"{measured.algbw_bytes_per_s / 1e9:.3f}", f"{measured.busbw_bytes_per_s / 1e9:.3f}"


def _align_columns(values: Sequence[str]) -> str:
    return "".join(f" {value:>{width}}" for value, (*_, width) in zip(values, _COLUMNS, strict=True))


# -- JSON ------------------------------------------------------------------------------------------------------------


def document(sampling: Sampling, parts: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON document of a run: its sampling, the machine, and `parts`.

    It lists only these figures of the machine: environments hold secrets, and results are passed around.
    """
    return {
        "sampling": asdict(sampling) | {"batch": BATCH, "batched_bytes": BATCHED_BYTES, "seed": SEED},
        "machine": {
            "cpu_count": os.cpu_count(),
            "system": platform.system(),
            "processor": platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "trio": trio.__version__,
        },
        **parts,
    }


def describe_rows(rows: Sequence[Result]) -> list[dict[str, object]]:
    """Return rows for JSON: times in nanoseconds for one operation, bandwidths in bytes per second."""
    return [
        {
            **{name: getattr(row.case, name) for name in ("size_bytes", "count", "ranks", "in_place")},
            **{name: getattr(row, name) for name in ("algbw_bytes_per_s", "busbw_bytes_per_s", "wrong")},
            **asdict(row.times),
            "operation": row.case.operation.name,
            "dtype": row.case.dtype.name,
            "op": row.case.op if row.case.operation.kind.traits.reduces else None,
            "root": row.case.root if row.case.operation.kind.traits.rooted else None,
        }
        for row in rows
    ]
