"""`overlap advise FILE ...`: what to change in a run, and what that would bring."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ..timeline.files.merge import merged
from ..timeline.files.tracefile import read_trace
from ..timeline.replay.prediction import Prediction, advice_text, advise
from .console import Console

SCHEMA_VERSION = 1
"""Version of what `--json` prints; it rises when a field changes its meaning or goes."""

_DESCRIPTION = """\
Replay a recorded run with something changed, and list the five changes that would gain most: balance among ranks,
when results are awaited, how gradients are cut into buckets and in which order they travel, algorithms, streams and
their windows, fewer bytes, and the computes that make the step as long as it is. A replay lets everything begin as
soon as what it was seen to wait for is over.
"""

_EPILOG = """\
examples:
  overlap run --trace run.json train.py
  overlap advise run.json
  overlap advise rank0.json rank1.json --json          those of PyTorch's profiler, one file for each rank
  overlap timeline run.json --what-if "bucket_bytes=4MiB" --what-if "compute 'tokenise'=0.5x"
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace file, .json or .json.gz; several are merged")
    parser.add_argument("--width", type=int, metavar="N", help="columns; default: the terminal's")
    parser.add_argument("--json", action="store_true", help="print the predictions as JSON instead")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: If the file cannot be read or understood, or holds nothing.
    """
    timeline = merged([read_trace(file) for file in args.files])
    found = advise(timeline)
    if args.json:
        told = {"schema_version": SCHEMA_VERSION, "advice": [described(one) for one in found]}
        print(json.dumps(told, indent=2, sort_keys=True))
        return 0
    console = Console(width=args.width, highlight=False, markup=False, emoji=False)
    for line in advice_text(found, width=console.width):
        console.print(line, soft_wrap=True)
    return 0


def described(one: Prediction) -> dict[str, object]:
    """Return a prediction as JSON holds it: integers of nanoseconds."""
    told = asdict(one.predicted)
    told.pop("causes")
    return {
        "changes": [change.text for change in one.changes],
        "measured_ns": one.measured.wall_ns,
        "replayed_ns": one.replayed.wall_ns,
        "predicted_ns": one.predicted.wall_ns,
        "least_ns": one.least_ns,
        "most_ns": one.most_ns,
        "gain_ns": one.gain_ns,
        "predicted": told,
    }
