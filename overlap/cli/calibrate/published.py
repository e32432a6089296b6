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
    print_result(args, lambda: describe(validation), lambda: _page(validation), version=SCHEMA_VERSION)
    return 1 if args.enforce and not validation.as_asked else 0


def describe(validation: Validation) -> dict[str, object]:
    """Return a validation for JSON: seconds, bytes, errors as shares."""
    return {
        "rows": [_described(row) for row in validation.rows],
        "crossovers": [
            asdict(row.knee) | {"predicted_bytes": row.predicted_bytes, "inside": row.inside}
            for row in validation.crossovers
        ],
        "given": [asdict(row) for row in GIVEN],
        "classes": [
            asdict(row) | {"unseen": _as_json(row.unseen), "all": _as_json(row.all), "as_asked": row.as_asked}
            for row in validation.classes
        ],
        "unseen": _as_json(validation.unseen),
        "all": _as_json(validation.all),
        "as_asked": validation.as_asked,
    }


def _described(row: ValidationRow) -> dict[str, object]:
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


def _page(validation: Validation) -> list[str]:
    lines: list[str] = []
    for _, rows in groupby(validation.collectives, key=_title):
        lines += [*_group(list(rows)), ""]
    both = {_of(row).machine for row in validation.collectives if not _of(row).peer_direct}
    if direct := [row for row in validation.collectives if _of(row).machine in both]:
        lines += [*_peer_direct(direct, validation.training), ""]
    if validation.crossovers:
        lines += [*_crossovers(validation.crossovers), ""]
    return [*lines, *_summary(validation)]


def _of(row: ValidationRow) -> Measurement:
    assert isinstance(row.of, Measurement)
    return row.of


def _title(row: ValidationRow) -> str:
    measured = _of(row)
    how = "" if measured.peer_direct else ", host copies"
    how += f" ({format_ranks(measured.group)})" if measured.group else ""
    how += f", time beyond that of {format_bytes(measured.beyond_bytes)}" if measured.beyond_bytes else ""
    published = "" if measured.unit == "us" else f", published as {measured.unit}"
    operation = f"{measured.collective} of {measured.dtype} on {measured.ranks} ranks of {measured.machine}"
    return f"{operation}{how}{published} ({measured.source})"


def _group(rows: Sequence[ValidationRow]) -> list[str]:
    heads = ("size", "measured", "predicted", "error", "")
    return [*wrapped(_title(rows[0]), rest="  "), *_table(heads, map(_row, rows), words=[4])]


def _row(row: ValidationRow) -> list[str]:
    size = format_bytes(_of(row).nbytes)
    used = f"fits {row.fits}" if row.fits else "predicted" + (", extrapolated" if row.extrapolated else "")
    return [size, format_s(row.measured), format_s(row.predicted), f"{row.error:+.1%}", used]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int]) -> list[str]:
    return [f"  {line}" for line in columns(heads, list(rows), words=words)]


def _peer_direct(rows: Sequence[ValidationRow], training: ValidationRow | None) -> list[str]:
    """Return the table of the document: the cost of the host's copies, from one model with two settings."""
    lines = [f"Peer Direct on {_of(rows[0]).machine}, one model with two settings, in {_of(rows[0]).unit}"]
    pairs = []
    for collective, pair in groupby(rows, key=lambda row: _of(row).collective):
        figures = [figure for row in pair for figure in (_of(row).figure, _of(row).as_published(row.predicted))]
        pairs.append([collective, *(f"{figure:,.0f}" for figure in figures)])
    lines += _table(("", "host copies", "predicted", "Peer Direct", "predicted"), pairs, words=[0])
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


def _crossovers(crossovers: Sequence[Crossover]) -> list[str]:
    lines = ["where one algorithm takes over from another"]
    for title, alike in groupby(crossovers, key=_change):
        found = ", ".join(f"{each.knee.collective} {_found(each)}" for each in alike)
        lines += [*wrapped(title, first="  ", rest="    "), f"    {found}"]
    return lines


def _change(crossover: Crossover) -> str:
    knee = crossover.knee
    return f"{knee.below} to {knee.above} on {knee.ranks} ranks of {knee.machine} ({knee.seen})"


def _found(crossover: Crossover) -> str:
    if crossover.predicted_bytes is None:
        return "nowhere near"
    return format_bytes(crossover.predicted_bytes) + ("" if crossover.inside else " (OUTSIDE)")


def _summary(validation: Validation) -> list[str]:
    crossovers = validation.crossovers
    inside = sum(crossover.inside for crossover in crossovers)
    lines = [
        *([f"{inside} of {len(crossovers)} crossovers where they were seen"] if crossovers else []),
        "taken as published, not predicted: " + ", ".join(f"{each.name} {each.figure}" for each in GIVEN),
    ]
    return [*_classes(validation), "", *(part for line in lines for part in wrapped(line, rest="  "))]


def _classes(validation: Validation) -> list[str]:
    """Return the planner's accuracy by class of rows, without and with the rows that figures were fitted to."""
    everything = ["all", "", *_figures(validation.unseen), *_figures(Accuracy.of(validation.collectives)), ""]
    heads = ("class", "dtype", "not fitted to", "median", "worst", "all rows", "median", "worst", "asked")
    rows = [*map(_class, validation.classes), everything]
    return ["the planner, by class of rows", *_table(heads, rows, words=[0, 1, 8])]


def _class(of: Class) -> list[str]:
    asked = f"{of.asked.median:.0%}, {of.asked.worst:.0%}: {'met' if of.as_asked else 'MISSED'}"
    return [of.name, of.dtype, *_figures(of.unseen), *_figures(of.all), asked if of.unseen.rows else "all fitted"]


def _as_json(of: Accuracy) -> dict[str, float]:
    return {"rows": of.rows, "median": of.median, "worst": of.worst}


def _figures(of: Accuracy) -> list[str]:
    return [str(of.rows), f"{of.median:.1%}", f"{of.worst:.1%}"] if of.rows else ["0", "", ""]
