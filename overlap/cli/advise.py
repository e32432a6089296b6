"""`overlap advise FILE ...`, the former name of `overlap timeline --advise FILE ...`, for one more version."""

from __future__ import annotations

import argparse

from ..notice import notify
from .timeline import advised

_SUCCESSOR = "`overlap advise` is now `overlap timeline --advise`; the old name goes with the next version"


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description = f"{_SUCCESSOR}."
    parser.add_argument("files", nargs="+", metavar="FILE", help="trace file, .json or .json.gz; several are merged")
    parser.add_argument("--width", type=int, metavar="N", help="columns; default: the terminal's")
    parser.add_argument("--json", action="store_true", help="print the predictions as JSON instead")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code; errors are those of `overlap timeline`."""
    notify(_SUCCESSOR)
    return advised(args)
