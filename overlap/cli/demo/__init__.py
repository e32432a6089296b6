"""`overlap demo`: trains the same model without overlap and with it, and shows the difference."""

# In the order data flows:
#
#   model      the classifier: blocks, gradients, weights; pure numpy
#   training   the two loops, and the run in which they take turns
#   report     progress, figures, pictures and verdict

from __future__ import annotations

import argparse
from dataclasses import replace

from ...data import digits
from ...errors import UsageError
from ...settings import Option
from ...timeline import TimelineView
from ...timeline.files.trace import write_trace
from ...units import parse_integer
from ..console import Console
from ..options import add_options, shared_option
from ..output import output_path
from .report import draw_median_steps, introduction_text, make_step_printer, median_steps, summary_text, verdict_text
from .training import Task, compare_trainings, measure_fitting_bandwidth

__all__ = ["add_arguments", "main"]

MAX_RANKS = 64  # threads that compute at the same time: more of them would only show a busy machine

DESCRIPTION = """\
Show what overlap does: train a classifier of handwritten digits, data-parallel, over links paced to a stated speed,
once with all communication after the backward pass, once with each gradient travelling while the next one is
computed.

Both compute exactly the same numbers; the report says how much time overlap saved, and what is left.
"""

EPILOG = """\
examples:
  overlap demo
  overlap demo --ranks 4 --trace demo.trace.json
  overlap timeline demo.trace.json --step 3

examples/21_with_and_without.py of a checkout shows every training strategy like this, in virtual time.

The data are 1797 images from the UCI Machine Learning Repository (E. Alpaydin, C. Kaynak, 1998, CC BY 4.0).
"""


OPTIONS = {
    "ranks": shared_option("ranks", "default: 8"),
    "steps": Option(read=parse_integer, metavar="N", help="training steps of each model; default: 20"),
    "trace": shared_option("trace"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    add_options(parser, OPTIONS)
    parser.set_defaults(ranks=8, steps=20)


def main(args: argparse.Namespace) -> int:
    """Run the command, and return 0, or 1 if the weights of any two models differ.

    Raises:
        UsageError: If an option has an impossible value; before anything starts.
    """
    if not 2 <= args.ranks <= MAX_RANKS:
        raise UsageError(f"--ranks: expected 2 to {MAX_RANKS}, got {args.ranks}")
    if args.steps < 1:
        raise UsageError(f"--steps: expected 1 or more, got {args.steps}")
    output_path(args.trace)
    console = Console(highlight=False, markup=False, emoji=False)
    task = Task(ranks=args.ranks, steps=args.steps)
    task = replace(task, bandwidth_bytes_per_s=measure_fitting_bandwidth(task))
    console.print(introduction_text(task, images=len(digits().split()[0]), width=console.width), soft_wrap=True)
    comparison = compare_trainings(task, make_step_printer(console, steps=2 * task.steps))
    steps = median_steps(comparison)
    if args.trace:
        write_trace(comparison.timeline, args.trace)
        console.print(f"\nwrote {args.trace}; `overlap timeline {args.trace}` draws it", soft_wrap=True)
    console.print()
    for line in draw_median_steps(comparison, steps, width=console.width, ascii=console.plain, color=console.coloured):
        console.print(line)
    view = TimelineView(comparison.timeline, step=steps.overlapped.index)
    console.print(summary_text(comparison, steps), soft_wrap=True)
    console.print(verdict_text(view, width=console.width), soft_wrap=True)
    return 0 if comparison.identical else 1
