"""`overlap calibrate --published`: predictions of the cost model beside published measurements."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from topology import format_ranks

from ...cost.measurements import GIVEN, TRAINING, Measurement
from ...cost.validation import Accuracy, Class, Crossover, Validation, ValidationRow, validate
from ...errors import UsageError
from ...units import columns, format_bytes, format_s, wrapped
from ..output import print_result
from .steps import show_steps

SCHEMA_VERSION = 3


def show_published(args: argparse.Namespace) -> int:
    """Print the comparison, and return the exit code: 1 if `--enforce` finds less accuracy than is asked.

    Raises:
        UsageError: If nothing is published of the machine, or an option is of a calibration.
    """
    for option in ("here", "between", "cluster", "collective", "ranks", "name", "output", "logs"):
        if getattr(args, option):
            raise UsageError(f"--published: compares published measurements; leave out {option}")
    other, of = ("enforce", "collectives") if args.published == "steps" else ("record", "steps")
    if getattr(args, other):
        raise UsageError(f"--{other}: only with --published {of}")
    if args.published == "steps":
        return show_steps(args)
    validation = validate(args.machine)
    print_result(args, lambda: describe(validation), lambda: _page_lines(validation), version=SCHEMA_VERSION)
    return 1 if args.enforce and not validation.as_asked else 0


def describe(validation: Validation) -> dict[str, object]:
    """Return a validation for JSON: seconds, bytes, errors as shares."""
    return {
        "rows": [_json_row(row) for row in validation.rows],
        "crossovers": [
            asdict(row.knee) | {"predicted_bytes": row.predicted_bytes, "inside": row.inside}
            for row in validation.crossovers
        ],
        "given": [asdict(row) for row in GIVEN],
        "classes": [
            asdict(row) | {"unseen": _json_errors(row.unseen), "all": _json_errors(row.all), "as_asked": row.as_asked}
            for row in validation.classes
        ],
        "unseen": _json_errors(validation.unseen),
        "all": _json_errors(validation.all),
        "as_asked": validation.as_asked,
    }


def _json_row(row: ValidationRow) -> dict[str, object]:
    """Return a row for JSON: its measurement, the prediction, the error, and whether figures were fitted to it."""
    quantity = "ratio" if row.of is TRAINING else "s"
    return asdict(row.of) | {
        "fits": row.fits,
        "quantity": quantity,
        "measured": row.measured,
        "predicted": row.predicted,
        "error": row.error,
        "used_for": "calibration" if row.fits else "prediction",
        "extrapolated": row.extrapolated,
    }


def _page_lines(validation: Validation) -> list[str]:
    """Return the page: tables of collectives, of host copies and of crossovers, then the accuracy by class."""
    lines: list[str] = []
    for _, rows in groupby(validation.collectives, key=_group_title):
        lines += [*_group_lines(list(rows)), ""]
    both = {_measurement(row).machine for row in validation.collectives if not _measurement(row).peer_direct}
    if direct := [row for row in validation.collectives if _measurement(row).machine in both]:
        lines += [*_peer_direct_lines(direct, validation.training), ""]
    if validation.crossovers:
        lines += [*_crossover_lines(validation.crossovers), ""]
    return [*lines, *_summary_lines(validation)]


def _measurement(row: ValidationRow) -> Measurement:
    """Return the measured collective of a row, which is not a training."""
    assert isinstance(row.of, Measurement)
    return row.of


def _group_title(row: ValidationRow) -> str:
    """Return the title of a table, which all its rows share: operation, type, ranks, machine and source."""
    measured = _measurement(row)
    how = "" if measured.peer_direct else ", host copies"
    how += f" ({format_ranks(measured.group)})" if measured.group else ""
    how += f", time beyond that of {format_bytes(measured.beyond_bytes)}" if measured.beyond_bytes else ""
    published = "" if measured.unit == "us" else f", published as {measured.unit}"
    operation = f"{measured.collective} of {measured.dtype} on {measured.ranks} ranks of {measured.machine}"
    return f"{operation}{how}{published} ({measured.source})"


def _group_lines(rows: Sequence[ValidationRow]) -> list[str]:
    heads = ("size", "measured", "predicted", "error", "")
    return [*wrapped(_group_title(rows[0]), rest="  "), *_indented_table(heads, map(_row_cells, rows), words=[4])]


def _row_cells(row: ValidationRow) -> list[str]:
    """Return the cells of one collective: size, times, error, and whether a figure was fitted to it."""
    size = format_bytes(_measurement(row).nbytes)
    used = f"fits {row.fits}" if row.fits else "predicted" + (", extrapolated" if row.extrapolated else "")
    return [size, format_s(row.measured), format_s(row.predicted), f"{row.error:+.1%}", used]


def _indented_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int]) -> list[str]:
    return [f"  {line}" for line in columns(heads, list(rows), words=words)]


def _peer_direct_lines(rows: Sequence[ValidationRow], training: ValidationRow | None) -> list[str]:
    """Return the table of the document: the cost of the host's copies, from one model with two settings."""
    first = _measurement(rows[0])
    lines = [f"Peer Direct on {first.machine}, one model with two settings, in {first.unit}"]
    pairs = []
    for collective, pair in groupby(rows, key=lambda row: _measurement(row).collective):
        measured_predicted = ((_measurement(row), row.predicted) for row in pair)
        figures = [figure for row, value in measured_predicted for figure in (row.figure, row.as_published(value))]
        pairs.append([collective, *(f"{figure:,.0f}" for figure in figures)])
    lines += _indented_table(("", "host copies", "predicted", "Peer Direct", "predicted"), pairs, words=[0])
    if training:
        lines += wrapped(
            f"training throughput with Peer Direct over without: {training.measured:.2f} measured, "
            f"{training.predicted:.2f} predicted ({training.error:+.1%}) for a step that is all communication; "
            "with compute, calibrated on one of the two, the other is missed by far: examples/08_bert_peer_direct.py "
            f"({TRAINING.source})",
            first="  ",
            rest="    ",
        )
    return lines


def _crossover_lines(crossovers: Sequence[Crossover]) -> list[str]:
    """Return the sizes at which the predicted algorithm changes, one paragraph for each pair of algorithms."""
    lines = ["where one algorithm takes over from another"]
    for title, alike in groupby(crossovers, key=_change_text):
        found = ", ".join(f"{each.knee.collective} {_crossover_size(each)}" for each in alike)
        lines += [*wrapped(title, first="  ", rest="    "), f"    {found}"]
    return lines


def _change_text(crossover: Crossover) -> str:
    knee = crossover.knee
    return f"{knee.below} to {knee.above} on {knee.ranks} ranks of {knee.machine} ({knee.seen})"


def _crossover_size(crossover: Crossover) -> str:
    """Return the predicted size of a crossover in words, marked if it is outside the published range."""
    if crossover.predicted_bytes is None:
        return "nowhere near"
    return format_bytes(crossover.predicted_bytes) + ("" if crossover.inside else " (OUTSIDE)")


def _summary_lines(validation: Validation) -> list[str]:
    """Return the accuracy by class, the share of right crossovers, and the figures that are not predicted."""
    crossovers = validation.crossovers
    inside = sum(crossover.inside for crossover in crossovers)
    lines = [
        *([f"{inside} of {len(crossovers)} crossovers where they were seen"] if crossovers else []),
        "taken as published, not predicted: " + ", ".join(f"{each.name} {each.figure}" for each in GIVEN),
    ]
    return [*_accuracy_table(validation), "", *(part for line in lines for part in wrapped(line, rest="  "))]


def _accuracy_table(validation: Validation) -> list[str]:
    """Return the planner's accuracy by class of rows, without and with the rows that figures were fitted to."""
    everything = ["all", "", *_error_cells(validation.unseen), *_error_cells(Accuracy.of(validation.collectives)), ""]
    heads = ("class", "dtype", "not fitted to", "median", "worst", "all rows", "median", "worst", "asked")
    rows = [*map(_accuracy_row, validation.classes), everything]
    return ["the planner, by class of rows", *_indented_table(heads, rows, words=[0, 1, 8])]


def _accuracy_row(of: Class) -> list[str]:
    """Return the cells of a class of rows: its errors without and with fitted rows, and whether the aim is met."""
    asked = f"{of.asked.median:.0%}, {of.asked.worst:.0%}: {'met' if of.as_asked else 'MISSED'}"
    return [
        of.name,
        of.dtype,
        *_error_cells(of.unseen),
        *_error_cells(of.all),
        asked if of.unseen.rows else "all fitted",
    ]


def _json_errors(of: Accuracy) -> dict[str, float]:
    return {"rows": of.rows, "median": of.median, "worst": of.worst}


def _error_cells(of: Accuracy) -> list[str]:
    return [str(of.rows), f"{of.median:.1%}", f"{of.worst:.1%}"] if of.rows else ["0", "", ""]
