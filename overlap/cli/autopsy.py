"""`overlap autopsy FILE ...`: reads from flight records which rank ended a run, where, and what it waited for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ..errors import UsageError
from ..flight.autopsy import MOST_ROWS, World, newest_world, table, verdict
from ..flight.folder import ENDING, default_folder, runs, working_folder
from ..flight.reading import Flight, read_flight
from ..notice import notify

_NONE = "autopsy: no flight records in {}: no run has failed here, or they are elsewhere"
_TOLD = 8  # unreadable files that are named

_DESCRIPTION = """\
Say which rank ended a run, where it was, and what it waited for; then show every rank.

Every process keeps a flight record: the last operations of its ranks, in a file that outlives it however it ends. It
is removed when its world ends well; those of attempts that were started again stay. Of several machines, bring the
files together first. A run that still goes on, or hangs, can be looked at as well: reading disturbs nobody.
"""

_EPILOG = """\
examples:
  overlap autopsy                        your last run in this directory that failed, or that still goes on;
                                         without one there, your last run on this machine
  overlap autopsy records/               what is in a folder, such as that of --flight-dir
  overlap autopsy a.flight b.flight      these files
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("files", nargs="*", metavar="FILE", help="flight records, or folders with such")
    parser.add_argument("--all", action="store_true", help=f"every rank, not only the first {MOST_ROWS}")


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: If no record can be read.
    """
    flights = _readable(args.files)
    nearness = (lambda flight: 0) if args.files else _nearness
    world, others = newest_world(flights, lambda flight: runs(flight.host, flight.pid, flight.born), nearness)
    first = world.flights[0]
    attempt = f", attempt {first.attempt}" if first.attempt else ""
    ranks, nodes = _counted(first.world_size, "rank"), _counted(first.processes, "node")
    print(", ".join([f"job {first.job}{attempt}: {ranks}", nodes, *_origin(first)]))
    print("\n".join([*verdict(world), "", *table(world, most_rows=1 << 30 if args.all else MOST_ROWS)]))
    if others:
        last = "the last" if args.files else _last(world)
        print(f"(of {others + 1} runs in these files this is {last}; name the files of another to see that)")
    return 0


def _nearness(flight: Flight) -> int:
    """Return how near a record is: 2 of this user's runs in this directory, 1 of this user's elsewhere, else 0."""
    with suppress(OSError):  # its run has just removed it
        if os.stat(flight.path).st_uid == os.getuid():
            return 2 if flight.folder and flight.folder == working_folder() else 1
    return 0


def _last(world: World) -> str:
    """Say why this run was chosen of all in the default folder."""
    near = max(map(_nearness, world.flights))
    if near == 2:
        return "your last that began in this directory"
    where = next((f" (it began in {flight.folder})" for flight in world.flights if flight.folder), "")
    return f"{'your last' if near else 'the last, of another user'}{where}, as none of yours began in this directory"


def _origin(flight: Flight) -> Iterator[str]:
    """Say of which program a run is, and when it began, as far as its record says so."""
    if flight.script:
        yield flight.script
    with suppress(OverflowError, ValueError, OSError):  # no instant
        yield f"begun {datetime.fromtimestamp(flight.started_ns // 10**9)}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _default() -> str:
    return os.environ.get("OVERLAP_FLIGHT_DIR") or str(default_folder())


def _files(named: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in named or [_default()]:
        inside = [Path(name)]
        if not named or Path(name).is_dir():  # links to records elsewhere may lead nowhere
            inside = sorted(path for path in Path(name).glob(f"*{ENDING}") if path.is_file())
        if not inside:
            raise UsageError(_NONE.format(name))
        found += map(str, inside)
    return found


def _readable(named: Sequence[str]) -> list[Flight]:
    """Return the readable records; print one line for each other file, unless its run has just removed it."""
    flights, refusals = [], []
    for file in _files(named):
        try:
            flights.append(read_flight(file))
        except UsageError as error:
            if file in named or Path(file).exists():
                refusals.append(f"autopsy: {error}")
    more = [f"autopsy: and {len(refusals) - _TOLD} files more that cannot be read"] if len(refusals) > _TOLD else []
    if not flights:
        raise UsageError("\n".join([*refusals[:_TOLD], *more]) or _NONE.format(", ".join(named) or _default()))
    for line in [*refusals[:_TOLD], *more]:
        notify(line)
    return flights
