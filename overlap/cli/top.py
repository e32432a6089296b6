"""`overlap top`: what the ranks of a running world do, as it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from time import sleep

from ..errors import UsageError
from ..live.worlds import RunningWorld, Sampler, chosen, of_descendants
from ..notice import notify
from ..processes.watching import WorldOverError
from .livescreen import Panel, Paper, Show, full_screen, is_terminal
from .watching import add_secret_file, endpoint_of, watched

EVERY_S = 1.0
BETWEEN_S = 0.2  # looks for a program's next world
ON_PAPER_S = 10.0  # between lines where nothing can be drawn

_DESCRIPTION = """\
Show what the ranks of a running world do: compute and communication as bars, hidden and exposed, what a step takes, who
is waited for, bytes per second by what they travel over, and how many are in flight. Of a job here it reads the flight
records, which costs the job nothing; of one elsewhere, or on several hosts, it asks process 0, where that listens
(--rdzv-endpoint), and proves the job's secret as its processes do: by --secret-file, OVERLAP_SECRET_FILE or
OVERLAP_SECRET. A look takes at most a hundredth of a processor of any process. q or Ctrl-C ends it, the job runs on.
"""

_EPILOG = """\
examples:
  overlap top                       the world that began last; `overlap ls` lists all
  overlap top 5f2c0d1e              a job, or the id of one of its processes
  overlap top node0:29500 --secret-file job.secret      all processes of a job, on whatever hosts they are
  overlap top --once                one look, and the end
  overlap top --every 5 | tee log   a line every 5 seconds
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument(
        "job", nargs="?", metavar="JOB",
        help="name of a job, id of a process, or HOST:PORT; default: OVERLAP_RDZV_ENDPOINT, else the newest job here",
    )  # fmt: skip
    add_secret_file(parser)
    parser.add_argument("--every", type=float, metavar="S", help="look every S seconds; default: 1, or 10 in a pipe")
    parser.add_argument("--once", action="store_true", help="look once")
    parser.add_argument("--ascii", action="store_true", help="draw with # = ~ ! only")
    parser.add_argument("--below", type=int, help=argparse.SUPPRESS)  # of `run --live`: for its process


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: If there is no such world, or an option cannot be meant.
    """
    if args.every is not None and not 0.1 <= args.every <= 3600:
        raise UsageError(f"--every: {args.every:g} s; expected 0.1 to 3600")
    if args.below is not None:
        return _below(args)
    endpoint = endpoint_of(args.job)
    world = chosen(args.job) if endpoint is None else watched(endpoint, args.secret_file)
    drawn = is_terminal(sys.stdout)
    try:
        looks = Sampler(world, every_s=args.every or (EVERY_S if drawn or args.once else ON_PAPER_S))
        if args.once:
            Show(world, looks, ascii=args.ascii).once(sys.stdout)
        elif drawn:
            full_screen(Show(world, looks, ascii=args.ascii), sys.stdout)
        else:
            Paper(Show(world, looks, ascii=args.ascii), sys.stdout).run(lambda: world.lives)
    except KeyboardInterrupt:
        pass
    except WorldOverError as over:
        notify(str(over))
    finally:
        world.close()
    return 0


def _below(args: argparse.Namespace) -> int:
    """Show below the output of a program what it does, as long as its process lives."""
    parent = os.getppid()

    def goes_on() -> bool:
        return os.getppid() == parent

    while goes_on():
        if (world := of_descendants(args.below)) is not None:
            _draw_below(world, args, goes_on)
        sleep(BETWEEN_S)
    return 0


def _draw_below(world: RunningWorld, args: argparse.Namespace, goes_on: Callable[[], bool]) -> None:
    drawn = is_terminal(sys.stderr)
    looks = Sampler(world, every_s=args.every or (EVERY_S if drawn else ON_PAPER_S))
    show = Show(world, looks, ascii=args.ascii)
    surface = Panel(show, sys.stderr) if drawn else Paper(show, sys.stderr)
    try:
        surface.run(lambda: goes_on() and world.lives)
    finally:
        world.close()
