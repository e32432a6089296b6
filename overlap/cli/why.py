"""`overlap why PATH ...`: says in one sentence why a job is slow or stuck, with its causes and advice."""

from __future__ import annotations

import argparse
import os
import sys

from ..errors import UsageError
from ..explain.against import Comparison, compare_reports
from ..explain.causes import WORDING
from ..explain.entry import explain_files
from ..explain.limits import Limit, parse_limit
from ..explain.page import page_columns, page_lines, wrap_line
from ..explain.report import SCHEMA_VERSION, Why
from ..notice import notify
from ..settings import Option
from ..timeline.files.packed import LIMIT_VARIABLE
from ..units import parse_bytes, parse_integer
from .options import add_options, shared_option
from .output import print_page_or_json

DESCRIPTION = """\
Say in one sentence why a job is slow or stuck, on which line, and what to try.

It reads traces of PyTorch's profiler (Kineto; packed or not, one file of each rank), traces of ours, and dumps of
flight recorders; PATH is a file, or a folder of one job. Every nanosecond of a step has one cause, and the causes add
up. What a trace cannot show is said: "cannot be told", and why.
"""

EPILOG = """\
examples:
  overlap why rank0.json.gz           a trace of PyTorch's profiler
  overlap why traces/                 the traces of several ranks of one job
  overlap why new/ --compare old/     regression or noise, by their steps
  overlap why new/ --compare old.json --fail-if regression --fail-if "sync > 5%"
  overlap why traces/ --json > why.json
"""

REGRESSION = "regression"

OPTIONS = {
    "all": shared_option("all", "of a stuck job"),
    "step": shared_option("step", read=parse_integer),
    "compare": shared_option("compare", "say whether the steps of this one are longer"),
    "fail_if": shared_option(
        "fail_if", "'regression' (needs --compare), 'step > 40ms', 'launch > 20%%'; names are the causes'"
    ),
    "json": shared_option("json"),
    "unpacked": Option(
        read=parse_bytes, metavar="SIZE", help="most bytes that packed files may unpack to, in all; default: 8GiB"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "paths", nargs="*", metavar="PATH",
        help="traces, dumps or flight records of one job, or a folder with them; default: the last flight record here",
    )  # fmt: skip
    add_options(parser, OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: A file cannot be read, files are not of one job, or a condition of `--fail-if` is invalid.
    """
    if args.unpacked is not None:
        os.environ[LIMIT_VARIABLE] = str(args.unpacked)  # for processes that read files, too
    tests = [_parse_condition(test, comparing=args.compare is not None) for test in args.fail_if or ()]
    report = explain_files(args.paths, step=args.step, progress=_print_progress, whole=bool(args.all))
    comparison = (
        None
        if args.compare is None
        else compare_reports(report, explain_files([args.compare], progress=_print_progress))
    )
    against = {"against": {"judgement": comparison.judgement, "sentence": comparison.sentence}} if comparison else {}
    heading = [*wrap_line(comparison.sentence, page_columns()), ""] if comparison else []
    print_page_or_json(
        args, lambda: report.as_dict() | against, lambda: [*heading, *page_lines(report)], version=SCHEMA_VERSION
    )
    failed = [sentence for test in tests if (sentence := _met_condition_text(test, report, comparison))]
    for sentence in failed:
        notify(f"why: --fail-if: {sentence}")
    return 1 if failed else 0


def _print_progress(done: int, count: int) -> None:
    """Show on a terminal which of several files is read now, on a line that the next call overwrites."""
    if sys.stderr.isatty() and count > 1:
        end = "\r" if done + 1 < count else "\n"
        print(f"reading file {done + 1} of {count}", end=end, file=sys.stderr, flush=True)


def _parse_condition(test: str, *, comparing: bool) -> Limit | None:
    """Return the limit of a condition of `--fail-if`, or None for `regression`.

    Raises `UsageError` if it is neither of the two, or `regression` without `--compare`.
    """
    if test.strip() != REGRESSION:
        return parse_limit(test, ("step", *WORDING))
    if not comparing:
        raise UsageError("--fail-if: regression needs --compare OTHER")
    return None


def _met_condition_text(limit: Limit | None, report: Why, comparison: Comparison | None) -> str:
    """Return a sentence if a condition of `--fail-if` is met, otherwise ""; limit None is `regression`."""
    if limit is None:
        return comparison.sentence if comparison and comparison.judgement == REGRESSION else ""
    value: float = report.step_ns if limit.name == "step" else report.cost_ns(limit.name)
    if limit.unit == "%":
        value = 100 * value / (sum(cause.duration_ns for cause in report.causes) or 1)
    return limit.failure_text(value)
