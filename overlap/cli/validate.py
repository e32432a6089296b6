"""`overlap validate`: predictions beside published measurements, of collectives and of training steps, in one table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ..cost.measurements import Measurement, cluster_of
from ..cost.validation import validate
from ..errors import UsageError
from ..planning.validation import Judged, judge, published, record
from ..units import columns, format_s, wrapped
from .output import as_json

SCHEMA_VERSION = 1

_WHAT = ("collectives", "steps")


_DESCRIPTION = """\
Predict published measurements of collectives and of training steps, and say how far off the predictions are, with the
rows to which figures were fitted and without them.
"""

_EPILOG = """\
examples:
  overlap validate                      collectives and steps, in one table
  overlap validate steps --chip H100    training steps on H100
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("what", nargs="?", choices=_WHAT, help="only these; default: both")
    parser.add_argument("--chip", metavar="NAME", help="only of this chip, such as H100")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--record", action="store_true", help="write the errors of left-out steps, from which bands are read"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Errors of one class of rows, as shares: of all of them, and of the left-out ones."""

    what: str  # "collectives" or "steps"
    of: str  # The class
    seen: Sequence[float]
    unseen: Sequence[float]


def main(args: argparse.Namespace) -> int:
    """Predict, print, and return the exit code.

    Raises:
        UsageError: If nothing is published of the chip.
    """
    lines: list[Line] = []
    judged: list[Judged] = []
    if args.what != "steps":
        lines += _collectives(args.chip)
    if args.what != "collectives":
        rows = [row for row in published() if args.chip in (None, row.cluster.machine.chip.name)]
        judged = judge(published() if args.record else rows)
        lines += _steps(judged)
    if not lines:
        raise UsageError(f"--chip: nothing is published of {args.chip!r}")
    if args.record:
        print(f"wrote {record(judged).name}")
    if args.json:
        print(as_json(_described(lines, judged), version=SCHEMA_VERSION), end="")
    else:
        print("\n".join(_page(lines, judged)))
    return 0


def _collectives(chip: str | None) -> list[Line]:
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in validate().collectives:
        assert isinstance(row.of, Measurement)
        machine = cluster_of(row.of.machine, strict=False).machine
        if chip not in (None, machine.chip.name):
            continue
        place = "across nodes" if " x" in row.of.machine else "one node"
        seen, unseen = found.setdefault(f"{machine.chip.name}, {place}, {row.of.dtype}", ([], []))
        seen.append(row.error)
        if not row.fits:
            unseen.append(row.error)
    return [Line(what="collectives", of=of, seen=seen, unseen=unseen) for of, (seen, unseen) in found.items()]


def _steps(judged: Sequence[Judged]) -> list[Line]:
    found: dict[str, list[Judged]] = {}
    for row in judged:
        found.setdefault(row.of.of, []).append(row)
    return [
        Line(what="steps", of=of, seen=[row.error for row in rows], unseen=[row.unseen for row in rows])
        for of, rows in found.items()
    ]


def _page(lines: Sequence[Line], judged: Sequence[Judged]) -> Iterator[str]:
    if judged:
        yield from columns(
            ("published step", "class", "measured", "predicted", "error", "left out", "fits"),
            [_row(row) for row in judged],
            width=120,
            words=[0, 1],
        )
        yield ""
        for row in judged:
            if row.of.noted:
                yield from wrapped(f"{row.of.id}: {row.of.noted}", rest="  ")
        yield ""
    heads = ("class", "rows", "median", "worst", "left out", "median", "worst")
    totals = [
        Line(
            what=what,
            of=f"all {what}",
            seen=[e for line in lines if line.what == what for e in line.seen],
            unseen=[e for line in lines if line.what == what for e in line.unseen],
        )
        for what in dict.fromkeys(line.what for line in lines)
    ]
    yield from columns(heads, [_figures(line) for line in (*lines, *totals)], width=120, words=[0])
    yield ""
    yield from wrapped(
        "rows: all, with those that figures were fitted to. left out: collectives that nothing was fitted to; steps, "
        "each predicted with the share `sustained` fitted to all others.",
        rest="  ",
    )


def _row(row: Judged) -> tuple[str, ...]:
    fits = {True: "yes", False: "NO", None: "unknown"}[row.fits]
    measured, predicted = format_s(row.of.measured_s), format_s(row.predicted_s)
    return row.of.id, row.of.of, measured, predicted, f"{row.error:+.1%}", f"{row.unseen:+.1%}", fits


def _figures(line: Line) -> tuple[str, ...]:
    return f"{line.what}, {line.of}" if not line.of.startswith("all") else line.of, *_of(line.seen), *_of(line.unseen)


def _of(errors: Sequence[float]) -> tuple[str, str, str]:
    sizes = [abs(each) for each in errors]
    return (str(len(sizes)), f"{median(sizes):.1%}", f"{max(sizes):.1%}") if sizes else ("0", "", "")


def _described(lines: Sequence[Line], judged: Sequence[Judged]) -> dict[str, object]:
    return {
        "classes": [
            {"what": line.what, "class": line.of, "errors": list(line.seen), "left_out": list(line.unseen)}
            for line in lines
        ],
        "steps": [
            {
                "id": row.of.id,
                "source": row.of.source,
                "class": row.of.of,
                "noted": row.of.noted,
                "measured_s": row.of.measured_s,
                "predicted_s": row.predicted_s,
                "left_out_s": row.left_out_s,
                "error": row.error,
                "left_out_error": row.unseen,
                "fits": row.fits,
            }
            for row in judged
        ],
    }
