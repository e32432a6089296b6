"""One process of ours among several: `overlap run -m overlap.cli.bench.member ASSIGNMENT` measures as `measure` does.

The process of rank 0 prints a line of JSON for each row.
"""

from __future__ import annotations

import json
import sys

from ... import run
from .cases import Assignment
from .measuring import on_rank

__all__ = ["main"]


def main(text: str) -> None:
    """Measure every row, each in a world of its own."""
    assignment = Assignment.from_json(text)
    for case in assignment.in_turn():
        told = run(on_rank, case, assignment.sampling, assignment.check)[0]
        if told is not None:
            print(json.dumps({"told": told}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
