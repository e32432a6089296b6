"""`overlap ls`: the worlds that run on this host."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import time

from ..live.worlds import RunningWorld, running
from ..processes.sockets import parse_endpoint
from ..timeline.draw.columns import columns
from .console import Console
from .watching import add_secret_file, watched

_DESCRIPTION = """\
List the worlds that run on this host: every program whose ranks live now, of this user; or the one whose process 0
listens at HOST:PORT, with all its processes wherever they are. `overlap top` shows what one does.
"""

_EPILOG = """\
examples:
  overlap ls
  overlap ls --json
  overlap ls node0:29500 --secret-file job.secret
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("job", nargs="?", metavar="HOST:PORT", help="a job elsewhere; default: all here")
    add_secret_file(parser)
    parser.add_argument("--json", action="store_true", help="print them as JSON instead")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    told = _here() if args.job is None else [_elsewhere(args.job, args.secret_file)]
    if args.json:
        print(json.dumps([asdict(one) for one in told], indent=2, sort_keys=True))
    elif not told:
        print("no world of yours runs on this host")
    else:
        rows = [_row(one) for one in told]
        print("\n".join(columns(_HEADS, rows, width=Console().width, words=[0, 1, 6])))
    return 0


def _here() -> list[_Told]:
    worlds = running()
    try:
        return [_told(world) for world in worlds]
    finally:
        for world in worlds:
            world.close()


def _elsewhere(named: str, secret_file: str | None) -> _Told:
    world = watched(parse_endpoint(named), secret_file)
    try:
        seen = world.processes.values()
        return _Told(
            job=world.job,
            script=world.script,
            ranks=world.size,
            processes=next(iter(seen)).processes,
            here=len(seen),
            step=min((table.last_step for each in seen for table in each.ranks if table.last_step >= 0), default=None),
            age_s=int(world.age_s),
            pids=[f"{each.host}:{each.pid}" for each in seen],
        )
    finally:
        world.close()


@dataclass(frozen=True, slots=True)
class _Told:
    job: str
    script: str
    ranks: int
    processes: int
    here: int
    step: int | None
    age_s: int
    pids: Sequence[int | str]


def _told(world: RunningWorld) -> _Told:
    steps = [table.last_step for each in world.processes for table in each.ranks() if table.last_step >= 0]
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
