"""`overlap calibrate --published`: predictions of the cost model beside published measurements."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from topology import format_ranks

from ...cost.measurements import GIVEN, TRAINING, Measurement, Start
from ...cost.validation import Accuracy, Class, Crossover, Judged, Validation, validate
from ...errors import UsageError
from ...units import format_bytes, format_s, wrapped
from ..output import as_json
from .steps import show_steps

SCHEMA_VERSION = 3


def show_published(args: argparse.Namespace) -> int:
    """Print the comparison, and return the exit code: 1 if `--check` finds less accuracy than is asked.

    Raises:
        UsageError: If nothing is published of the machine, or an option is of a calibration.
    """
    for option in ("here", "between", "cluster", "op", "ranks", "name", "output", "logs"):
        if getattr(args, option):
            raise UsageError(f"--published: compares published measurements; leave out {option}")
    other, of = ("check", "collectives") if args.published == "steps" else ("record", "steps")
    if getattr(args, other):
        raise UsageError(f"--{other}: only with --published {of}")
    if args.published == "steps":
        return show_steps(args)
    found = validate(args.machine)
    if args.json:
        print(as_json(describe(found), version=SCHEMA_VERSION), end="")
    else:
        print("\n".join(_page(found)))
    return 1 if args.check and not found.as_asked else 0


def describe(found: Validation) -> dict[str, object]:
    """Return a validation for JSON: seconds, bytes, errors as shares."""
    return {
        "rows": [_described(row) for row in found.rows],
        "crossovers": [
            asdict(each.knee) | {"predicted_bytes": each.predicted_bytes, "inside": each.inside}
            for each in found.crossovers
        ],
        "given": [asdict(each) for each in GIVEN],
        "classes": [
            asdict(each) | {"unseen": _as_json(each.unseen), "all": _as_json(each.all), "as_asked": each.as_asked}
            for each in found.classes
        ],
        "unseen": _as_json(found.unseen),
        "all": _as_json(found.all),
        "as_asked": found.as_asked,
    }


def _described(row: Judged) -> dict[str, object]:
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


def _page(found: Validation) -> list[str]:
    lines: list[str] = []
    for _, rows in groupby((*found.collectives, *found.starts), key=_title):
        lines += [*_group(list(rows)), ""]
    both = {_of(row).machine for row in found.collectives if not _of(row).peer_direct}
    if direct := [row for row in found.collectives if _of(row).machine in both]:
        lines += [*_peer_direct(direct, found.training), ""]
    if found.crossovers:
        lines += [*_crossovers(found.crossovers), ""]
    return [*lines, *_summary(found)]


def _of(row: Judged) -> Measurement:
    assert isinstance(row.of, Measurement)
    return row.of


def _title(row: Judged) -> str:
    if isinstance(row.of, Start):
        programs = {0: "programs without collectives", 1: "programs with one all_reduce of 32 KiB bfloat16"}
        what = programs.get(row.of.operations, f"programs with {row.of.operations} all_reduces of 32 KiB bfloat16")
        return f"{what} on {row.of.machine} ({row.of.source})"
    of = _of(row)
    how = "" if of.peer_direct else ", host copies"
    how += f" ({format_ranks(of.group)})" if of.group else ""
    how += f", time beyond that of {format_bytes(of.beyond_bytes)}" if of.beyond_bytes else ""
    published = "" if of.unit == "us" else f", published as {of.unit}"
    return f"{of.collective} of {of.dtype} on {of.ranks} ranks of {of.machine}{how}{published} ({of.source})"


def _group(rows: Sequence[Judged]) -> list[str]:
    size = "ranks" if isinstance(rows[0].of, Start) else "size"
    return [
        *wrapped(_title(rows[0]), rest="  "),
        f"  {size:>10}  {'measured':>9}  {'predicted':>9}  {'error':>7}",
        *(_row(row) for row in rows),
    ]


def _row(row: Judged) -> str:
    size = str(row.of.ranks) if isinstance(row.of, Start) else format_bytes(_of(row).nbytes)
    times = f"{format_s(row.measured):>9}  {format_s(row.predicted):>9}  {row.error:>+7.1%}"
    used = f"fits {row.fits}" if row.fits else "predicted" + (", extrapolated" if row.extrapolated else "")
    return f"  {size:>10}  {times}  {used}"


def _peer_direct(rows: Sequence[Judged], training: Judged | None) -> list[str]:
    """Return the table of the document: the cost of the host's copies, from one model with two settings."""
    lines = [
        f"Peer Direct on {_of(rows[0]).machine}, one model with two settings, in {_of(rows[0]).unit}",
        f"  {'':14}  {'host copies':^21}  {'Peer Direct':>16}",
        f"  {'':14}" + f"  {'measured':>10} {'predicted':>10}" * 2,
    ]
    for collective, pair in groupby(rows, key=lambda row: _of(row).collective):
        figures = [(_of(row).figure, _of(row).as_published(row.predicted)) for row in pair]
        lines.append(f"  {collective:14}" + "".join(f"  {a:>10,.0f} {b:>10,.0f}" for a, b in figures))
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


def _summary(found: Validation) -> list[str]:
    inside = sum(each.inside for each in found.crossovers)
    starts = [row for row in found.starts if not row.fits]
    lines = [
        *([f"{inside} of {len(found.crossovers)} crossovers where they were seen"] if found.crossovers else []),
        *([f"starting programs, beside the planner: {_accuracy(Accuracy.of(starts))}"] if starts else []),
        "taken as published, not predicted: " + ", ".join(f"{each.name} {each.figure}" for each in GIVEN),
    ]
    return [*_classes(found), "", *(part for line in lines for part in wrapped(line, rest="  "))]


def _classes(found: Validation) -> list[str]:
    """Return the planner's accuracy by class of rows, without and with the rows that figures were fitted to."""
    return [
        f"{'the planner, by class of rows':<37} {'rows not fitted to':^20} {'all rows':^20}".rstrip(),
        f"{'class':<27} {'dtype':<9}" + f"{'rows':>5} {'median':>7} {'worst':>7}" * 2 + "  asked",
        *(_class(each) for each in found.classes),
        f"{'all':<37}{_figures(found.unseen)}{_figures(Accuracy.of(found.collectives))}",
    ]


def _class(of: Class) -> str:
    asked = f"{of.asked.median:.0%}, {of.asked.worst:.0%}: {'met' if of.as_asked else 'MISSED'}"
    figures = f"{_figures(of.unseen)}{_figures(of.all)}"
    return f"{of.name:<27} {of.dtype:<9}{figures}  {asked if of.unseen.rows else 'all fitted'}"


def _as_json(of: Accuracy) -> dict[str, float]:
    return {"rows": of.rows, "median": of.median, "worst": of.worst}


def _figures(of: Accuracy) -> str:
    return f"{of.rows:>5} {of.median:>7.1%} {of.worst:>7.1%}" if of.rows else f"{0:>5} {'':>7} {'':>7}"


def _accuracy(of: Accuracy) -> str:
    return f"{of.rows} rows, median error {of.median:.1%}, worst {of.worst:.1%}" if of.rows else "none"
