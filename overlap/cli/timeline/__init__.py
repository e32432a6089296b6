"""`overlap timeline FILE ...`: draw a trace file in the terminal, or print tables of its operations."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError
from ...explain.oddities import describe_oddities
from ...explain.profiles import explain_profiles
from ...explain.rank import RankReport, measure_profile
from ...launch.report import EXIT_FAILED
from ...notice import notify
from ...ranklist import format_rank_list, parse_rank_list
from ...settings import Option
from ...timeline.files.children import read_files
from ...timeline.files.kineto import profile_timeline
from ...timeline.files.merge import merged
from ...timeline.files.packed import is_profile, naming_file_in_errors, read_beginning
from ...timeline.files.profile import read_profile
from ...timeline.files.reading import read_trace
from ...timeline.files.trace import write_trace
from ...timeline.measure.steps import median_step
from ...timeline.spans import Timeline
from ...units import parse_yes_no
from ..options import add_options, check_width, shared_option
from ..output import output_path, try_to_write

DESCRIPTION = """\
Show which ranks computed, which communicated, and how much communication was hidden or exposed.

Every rank has a compute lane and lanes for its communication streams on one time axis. Communication under compute is
hidden and costs nothing; on its own it is exposed. Exposed bytes on the wire are time that overlap can hide. Exposed
waiting comes from a rank that is late; look at what that rank does meanwhile:

    wall = compute only + overlapped + exposed + kept + copy + queued + idle
    exposed = waiting for a rank + on the wire

Kept is time in which a program computed on its event loop, so that nothing of its process went on; copy is time in
which a device did nothing but copy or set memory. Profiles of PyTorch are shown as well: `overlap why` says what the
host did while a device was idle. The last line is the verdict: how long the step takes, and the means of its ranks.
"""

EPILOG = """\
examples:
  overlap run --trace run.trace.json train.py
  overlap timeline run.trace.json --step 3 --rank 0,4-7
  overlap timeline run.trace.json --ops --critical-path

  overlap timeline run.trace.json -o run.svg
  overlap timeline run-process0.json run-process1.json -o run.json

The file is Chrome trace-event JSON: ui.perfetto.dev opens it too.
"""


OPTIONS = {
    "output": shared_option("output", "the files as one trace file, or, to FILE.svg, the picture; print nothing"),
    "step": shared_option("step", "by wall time; all: every step"),
    "rank": Option(read=str, metavar="LIST", help="ranks to show, such as 0,3-5; default: all"),
    "all": shared_option("all", "otherwise ranks that are alike share a row"),
    "width": shared_option("width"),
    "ascii": shared_option("ascii"),
    "ops": Option(read=parse_yes_no, help="the cost of each operation, by place in the program"),
    "critical_path": Option(read=parse_yes_no, help="the chain of work that made the step as long as it is"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace file, .json or .json.gz; several are merged")
    add_options(parser, OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: The file cannot be read or understood, or an option does not fit it.
    """
    args.output = output_path(args.output, option="--output")
    _refuse_options_with_output(args)
    if args.output is not None and not args.output.endswith(".svg"):
        timeline = merged([read_trace(file) for file in args.files])
        written = try_to_write(lambda: write_trace(timeline, args.output), args.output, option="--output")
        return 0 if written else EXIT_FAILED
    check_width(args.width)
    timeline, profiles = _read_files(args.files)
    if wrong := describe_oddities(timeline):
        notify(wrong)
    ranks = _read_ranks(args.rank)
    step, sentence = _read_step(args.step, timeline), None
    if profiles:
        shown = [profile for profile in profiles if ranks is None or profile.rank in ranks] or profiles
        found = explain_profiles(shown, step=None if args.step is None else step)
        sentence, step = found.verdict, found.step if args.step is None else step
    from ...timeline.draw.view import TimelineView
    from . import show

    view = TimelineView(timeline, step=step, ranks=ranks, ascii=args.ascii, all=args.all, sentence=sentence)
    if args.output is not None:
        return 0 if show.write_svg(view, args.output) else EXIT_FAILED
    show.print_pages(args, timeline, step, ranks, view)
    return 0


def _read_files(files: Sequence[str]) -> tuple[Timeline, list[RankReport]]:
    """Return the timeline of files, and reports on those of PyTorch's profiler, each of which is read once."""
    are_profiles = [os.path.isfile(file) and is_profile(read_beginning(Path(file))) for file in files]
    if not any(are_profiles):
        return merged([read_trace(file) for file in files]), []
    if not all(are_profiles):
        read_trace(files[are_profiles.index(False)])  # refused by its name if it cannot be read
        raise UsageError(
            "timeline: some of the files are profiles of PyTorch, and some are not: name files of one kind"
        )
    timelines, reports = [], []
    for profile in read_files(_read_profile, [Path(file) for file in files]):
        if isinstance(profile, UsageError):
            raise profile
        timelines.append(profile[0])
        reports.append(profile[1])
    return merged(timelines), reports


def _read_profile(path: Path) -> tuple[Timeline, RankReport]:
    with naming_file_in_errors(path):
        profile = read_profile(path)
        return profile_timeline(profile), measure_profile(profile)


_PICTURE = ("step", "rank", "all", "ascii")
"""Options of a picture, which `-o FILE.svg` takes."""


def _refuse_options_with_output(args: argparse.Namespace) -> None:
    """Raise `UsageError` if `-o` is given together with an option that it does not support."""
    if args.output is None:
        return
    for option in (*(() if args.output.endswith(".svg") else _PICTURE), "width", "ops", "critical_path"):
        if getattr(args, option) not in (None, False):
            flag = f"--{option.replace('_', '-')}"
            raise UsageError(
                f"{flag}: not possible with -o, which writes one trace file, or FILE.svg; leave out {flag} or -o"
            )


def _read_step(text: str | None, timeline: Timeline) -> int | None:
    """Return the step of `--step`: without it the median one, for "all" None. Raises `UsageError` for other text."""
    if text is None:
        return median_step(timeline)
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        recorded = format_rank_list(timeline.steps()) or "none"
        raise UsageError(f"--step: {text!r} is neither a number nor 'all'; recorded steps: {recorded}") from None


def _read_ranks(text: str | None) -> tuple[int, ...] | None:
    """Return the ranks that `--rank` lists, or None if it is not given."""
    if text is None:
        return None
    try:
        return parse_rank_list(text)
    except ValueError as error:
        raise UsageError(f"--rank: {error}") from None
