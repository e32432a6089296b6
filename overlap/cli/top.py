"""`overlap top`: the jobs that run on this host, and the work of a running job's ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import time

from ..errors import UsageError
from ..live.worlds import RunningWorld, Sampler, find_world, running
from ..settings import Option
from ..units import columns, number, switch
from .console import Console
from .livescreen import Show, is_terminal
from .options import add_options, shared_option

EVERY_S = 1.0
ON_PAPER_S = 10.0  # between lines where nothing can be drawn

_DESCRIPTION = """\
Without JOB, list the jobs that run on this host: every program of this user whose ranks live now.

With JOB, show the work of its ranks: compute and communication as bars, hidden and exposed, the time of a step, the
ranks that others wait for, bytes per second by wire, and operations in flight. The command reads the flight records of
this host's processes, which costs the job nothing; on another host, run it there (ssh HOST overlap top). A look takes
at most a hundredth of a processor. q or Ctrl-C ends it, the job runs on.
"""

_EPILOG = """\
examples:
  overlap top                       the jobs here
  overlap top 5f2c0d1e              a job, or the id of one of its processes
  overlap top train.py              the job of that program, if there is one
  ssh -t node1 overlap top          the processes of a job on another host
  overlap top --once                one look at the newest job
  overlap top --every 5 | tee log   a line every 5 seconds, of the newest job
  overlap top --list --json         the list for programs
"""


OPTIONS = {
    "list": Option(read=switch, help="list jobs, one a line; the default without JOB"),
    "json": shared_option("json", "of the list"),
    "every": Option(read=number, metavar="S", help="look every S seconds; default: 1, or 10 in a pipe"),
    "once": Option(read=switch, help="look once"),
    "ascii": shared_option("ascii"),
}


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument(
        "job", nargs="?", metavar="JOB",
        help="name of a job, its program, or id of a process; default: with --every or --once the newest job",
    )  # fmt: skip
    add_options(parser, OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: If there is no such job, or an option has an impossible value.
    """
    if args.every is not None and not 0.1 <= args.every <= 3600:
        raise UsageError(f"--every: {args.every:g} s; expected 0.1 to 3600")
    watches = args.once or args.every is not None or args.job is not None
    if args.list or args.json or not watches:
        return _list_worlds(args)
    if args.job is not None and ":" in args.job:
        host = args.job.rpartition(":")[0]
        raise UsageError(f"{args.job}: the ranks of a job are seen on the host where they run: ssh {host} overlap top")
    world = find_world(args.job)
    drawn = is_terminal(sys.stdout)
    try:
        looks = Sampler(world, every_s=args.every or (EVERY_S if drawn or args.once else ON_PAPER_S))
        show = Show(world, looks, sys.stdout, ascii=bool(args.ascii))
        if args.once:
            show.once()
        elif drawn:
            show.full_screen()
        else:
            show.on_paper()
    except KeyboardInterrupt:
        pass
    finally:
        world.close()
    return 0


# -- the list ----------------------------------------------------------------------------------------------------------


def _list_worlds(args: argparse.Namespace) -> int:
    """Print all worlds of the user on this host, as a table or as JSON, and return the exit code 0."""
    entries = _read_entries()
    if args.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2, sort_keys=True))
    elif not entries:
        print("no world of yours runs on this host")
    else:
        rows = [_entry_cells(entry) for entry in entries]
        print("\n".join(columns(_HEADS, rows, width=Console().width, words=[0, 1, 6], uncut=[0])))
    return 0


def _read_entries() -> list[_Entry]:
    """Return the entries of all worlds that run on this host, and close their records."""
    worlds = running()
    try:
        return [_describe_world(world) for world in worlds]
    finally:
        for world in worlds:
            world.close()


@dataclass(frozen=True, slots=True)
class _Entry:
    """One running world: a line of the list."""

    job: str
    script: str
    ranks: int
    processes: int
    here: int
    step: int | None
    age_s: int
    pids: Sequence[int]


def _describe_world(world: RunningWorld) -> _Entry:
    """Return the entry of a world; its step is the one of the rank that is furthest behind, None before the first."""
    steps = [table.last_step for process in world.processes for table in process.ranks() if table.last_step >= 0]
    return _Entry(
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


def _entry_cells(entry: _Entry) -> list[str]:
    """Return the cells of a world, with its processes on this host if others are elsewhere."""
    here = str(entry.processes) if entry.here == entry.processes else f"{entry.here} of {entry.processes}"
    step, pids = "" if entry.step is None else str(entry.step), ", ".join(map(str, entry.pids))
    return [entry.job, entry.script or "?", str(entry.ranks), here, step, str(entry.age_s), pids]
