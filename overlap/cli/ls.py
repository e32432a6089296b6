"""`overlap ls`: the worlds that run on this host."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from time import time

from ..live.worlds import RunningWorld, running
from ..timeline.columns import columns
from .console import Console

_DESCRIPTION = """\
List the worlds that run on this host: every program whose ranks live now, of this user. `overlap top` shows what one
does.
"""

_EPILOG = """\
examples:
  overlap ls
  overlap ls --json
  OVERLAP_FLIGHT_DIR=records overlap ls      those that keep their flight records there
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("--json", action="store_true", help="print them as JSON instead")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    worlds = running()
    try:
        told = [_told(world) for world in worlds]
    finally:
        for world in worlds:
            world.close()
    if args.json:
        print(json.dumps([asdict(one) for one in told], indent=2, sort_keys=True))
    elif not told:
        print("no world runs on this host")
    else:
        rows = [_row(one) for one in told]
        print("\n".join(columns(_HEADS, rows, width=Console().width, words=[0, 1, 6])))
    return 0


@dataclass(frozen=True, slots=True)
class _Told:
    job: str
    script: str
    ranks: int
    processes: int
    here: int
    step: int | None
    age_s: int
    pids: list[int]


def _told(world: RunningWorld) -> _Told:
    steps = [glance.step for each in world.processes for glance in each.ranks() if glance.step >= 0]
    return _Told(
        job=world.job,
        script=world.script,
        ranks=world.size,
        processes=world.process_count,
        here=len(world.processes),
        step=min(steps, default=None),
        age_s=int(time() - world.started_ns / 1e9),
        pids=world.pids,
    )


_HEADS = ("job", "program", "ranks", "processes", "step", "for/s", "process ids")


def _row(one: _Told) -> list[str]:
    here = str(one.processes) if one.here == one.processes else f"{one.here} of {one.processes}"
    step = "" if one.step is None else str(one.step)
    return [one.job, one.script or "?", str(one.ranks), here, step, str(one.age_s), ", ".join(map(str, one.pids))]
