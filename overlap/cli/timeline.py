"""`overlap timeline FILE ...`: draw a trace file in the terminal, or print its figures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, BinaryIO

from ..errors import UsageError
from ..timeline.lateness import arrivals
from ..timeline.merge import merged, merged_header
from ..timeline.metrics import Breakdown, breakdowns, median_step
from ..timeline.parts import Part, pack_part
from ..timeline.ranklist import listed, unlisted
from ..timeline.spans import Span, Timeline
from ..timeline.tracefile import read_trace, write_merged
from ..timeline.verdict import verdict_of
from .failure import EXIT_FAILED
from .outputs import kept, written
from .program import output_path

if TYPE_CHECKING:
    from ..timeline.draw import TimelineView

SCHEMA_VERSION = 2
"""Version of what `--json` prints; it rises when a field changes its meaning or goes."""

_DESCRIPTION = """\
Show who computed, who communicated, what was hidden and what was exposed.

Every rank has a compute lane and lanes for its communication streams on one time axis. Communication under compute is
hidden and costs nothing; on its own it is exposed. Then bytes are on the wire, which overlap can hide; or none move
yet, because a rank comes late, and what that rank does then is what to look at:

    wall = compute only + overlapped + exposed + idle;    exposed = waiting for a rank + on the wire

The last line is the verdict: what the step takes, and the means of its ranks.
"""

_EPILOG = """\
examples:
  overlap run --trace run.trace.json train.py    record one
  overlap timeline run.trace.json                draw its median step
  overlap timeline run.trace.json --step 3 --ranks 0,4-7
  overlap timeline run.trace.json --step all --json
  overlap timeline run-process0.json run-process1.json -o run.json
                                                 make one file of those of several processes

The file is Chrome trace-event JSON: ui.perfetto.dev opens it too.
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace file, .json or .json.gz; several are merged")
    parser.add_argument("-o", "--output", metavar="OUT", help="write them as one trace file, and draw nothing")
    parser.add_argument("--step", metavar="N|all", help="step to show; default: the median one by wall time, or all")
    parser.add_argument("--ranks", metavar="LIST", help="ranks to show, such as 0,3-5; default: all")
    parser.add_argument(
        "--all", action="store_true", help="a row for each rank; otherwise ranks that are alike share one"
    )
    parser.add_argument("--width", type=int, metavar="N", help="columns, at least 40; default: the terminal's")
    parser.add_argument("--ascii", action="store_true", help="draw with # = ~ ! . only")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    parser.add_argument("--html", metavar="OUT", help="also write the drawing as a self-contained HTML file")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: If the file cannot be read or understood, or an option does not fit it.
    """
    args.html, args.output = output_path(args.html, option="--html"), output_path(args.output, option="--output")
    if args.output is not None:
        return 0 if _merge(args.files, args.output) else EXIT_FAILED
    timeline = merged([read_trace(file) for file in args.files])
    step = _step(args.step, timeline)
    ranks = _ranks(args.ranks)
    if args.json:
        print(json.dumps(report(timeline, step, ranks), indent=2, sort_keys=True))
        return 0
    return 0 if _draw(args, timeline, step, ranks) else EXIT_FAILED


def _merge(files: Sequence[str], path: str) -> bool:
    """Write one trace file of several; memory holds one of them as it was read, and one rank of the others."""
    with ExitStack() as spools:
        parts = [_part(file, spools.enter_context(TemporaryFile())) for file in files]
        merged_header([part.header for part in parts])  # or refuse
        return kept(lambda: write_merged(parts, path), path, option="--output")


def _part(file: str, spool: BinaryIO) -> Part:
    spool.write(pack_part(read_trace(file)))
    return Part(spool)


def report(timeline: Timeline, step: int | None, ranks: Sequence[int] | None) -> dict[str, object]:
    """Return the figures that `--json` prints: integers of nanoseconds, ratios from 0 to 1 or null."""
    verdict = verdict_of(timeline, step=step, ranks=ranks)
    return {
        "schema_version": SCHEMA_VERSION,
        "clock": timeline.clock,
        "dropped": timeline.dropped,
        "meta": timeline.meta,
        "step": step,
        "steps": timeline.steps(),
        "world_size": timeline.world_size,
        "ranks": [_figures(row) for row in breakdowns(timeline, step=step, ranks=ranks)],
        "wires": [{"rank": span.rank, "at_ns": span.start_ns, "what": span.name} for span in _wires(timeline, ranks)],
        "arrivals": [asdict(one) for one in arrivals(timeline, step=step)],
        "verdict": str(verdict),
        "causes": [asdict(cause) for cause in verdict.causes],
    }


def _wires(timeline: Timeline, ranks: Sequence[int] | None) -> list[Span]:
    """Return what has happened to connections: rails that were lost, and those that came back."""
    return [span for span in timeline.spans if span.kind == "wires" and (ranks is None or span.rank in ranks)]


def _figures(row: Breakdown) -> dict[str, int | float | None]:
    return {
        "rank": row.rank,
        "wall_ns": row.wall_ns,
        "compute_ns": row.compute_ns,
        "comm_ns": row.comm_ns,
        "compute_only_ns": row.compute_only_ns,
        "overlapped_ns": row.overlapped_ns,
        "exposed_ns": row.exposed_ns,
        "waiting_ns": row.waiting_ns,
        "wire_ns": row.wire_ns,
        "transfer_ns": row.transfer_ns,
        "queued_ns": row.queued_ns,
        "idle_ns": row.idle_ns,
        "overlap_ratio": row.overlap_ratio,
        "ideal_wall_ns": row.ideal_wall_ns,
        "possible_gain_ns": row.possible_gain_ns,
    }


def _draw(args: argparse.Namespace, timeline: Timeline, step: int | None, ranks: Sequence[int] | None) -> bool:
    """Draw; return False if the HTML file could not be written."""
    from ..timeline.draw import TimelineView
    from .console import Console

    if args.width is not None and args.width < 40:
        raise UsageError(f"--width: {args.width} is too narrow; at least 40 columns are needed")
    view = TimelineView(timeline, step=step, ranks=ranks, ascii=args.ascii, all=args.all)
    console = Console(width=args.width, highlight=False)
    if args.step is None and step is not None:
        console.print(f"showing step {step}, the median of {len(timeline.steps())} by wall time (--step N|all)")
    for span in _wires(timeline, ranks):
        at_s = (span.start_ns - timeline.spans[0].start_ns) / 1e9
        console.print(f"wires at {at_s:.3f} s, rank {span.rank}: {span.name}", markup=False, soft_wrap=True)
    console.print(view)
    return args.html is None or _write_html(view, args.html, console.width)


def _write_html(view: TimelineView, path: str, width: int) -> bool:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=width, color_system="truecolor", no_color=False)
    console.print(view)
    return written(console.export_html(), path, option="--html")


def _step(text: str | None, timeline: Timeline) -> int | None:
    if text is None:
        return median_step(timeline)
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        known = listed(timeline.steps()) or "none"
        raise UsageError(f"--step: {text!r} is neither a number nor 'all'; recorded steps: {known}") from None


def _ranks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return unlisted(text)
    except ValueError as error:
        raise UsageError(f"--ranks: {error}") from None
