"""One process of ours among several: `overlap run -m overlap.cli.bench.member SPEC` measures what `measure` does.

The process of rank 0 prints a line of JSON for each row.
"""

from __future__ import annotations

import json
import sys

from ... import run
from .measure import on_rank
from .peer import Spec

__all__ = ["main"]


def main(text: str) -> None:
    """Measure every row, each in a world of its own."""
    spec = Spec.from_json(text)
    for case in spec.cases():
        told = run(on_rank, case, spec.sampling(), spec.check)[0]
        if told is not None:
            print(json.dumps({"told": told}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
