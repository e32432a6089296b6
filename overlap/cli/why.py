"""`overlap why PATH ...`: says why a job is stuck or how it ended."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..flight.hang import judge


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description = "Say which rank is behind, differs or failed, in which operation, and at which line."
    parser.add_argument("paths", nargs="*", metavar="PATH", help="dumps, flight records, or folders of these")
    parser.add_argument("--all", action="store_true", help="every rank, not only those that fit on a page")
    parser.add_argument("--json", action="store_true", help="the verdict as data")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: If nothing can be read.
    """
    hang = judge([Path(name) for name in args.paths])
    print(json.dumps(hang.as_dict(), indent=2) if args.json else "\n".join(hang.page(whole=args.all)))
    return 0
