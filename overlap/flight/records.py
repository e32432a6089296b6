"""Choice of flight records: the run that is meant, of all that lie in a folder; and the worlds that they are of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ..errors import UsageError
from ..notice import notify
from .folder import ENDING, default_folder, runs, working_folder
from .reading import Flight, read_flight

_NONE = "why: no flight records in {}: no run has failed here, or they are elsewhere"
_MOST_REFUSALS = 8  # unreadable files that are named
# Processes begin their records when all have met, within milliseconds; clocks of machines that nobody sets differ more.
_TOGETHER_NS = {True: 5 * 10**9, False: 300 * 10**9}


@dataclass(frozen=True)
class RecordedWorld:
    """The flight records of the processes of one world."""

    flights: Sequence[Flight]  # By process
    runs: Callable[[Flight], bool]  # Tells whether the process of a record still runs

    @property
    def end_ns(self) -> int:
        """The last instant, in nanoseconds since 1970, that any of the records has."""
        endings = [flight.ending.at_ns for flight in self.flights if flight.ending is not None]
        return max([table.last_ns for flight in self.flights for table in flight.ranks] + endings)


def newest_world(
    flights: Sequence[Flight], runs: Callable[[Flight], bool], nearness: Callable[[Flight], int] = lambda flight: 0
) -> tuple[RecordedWorld, int]:
    """Return the world that began last, and the number of other worlds in the records.

    Args:
        flights: The records.
        runs: Tells whether the process of a record still runs.
        nearness: Of a record to the reader: the newest of the nearest worlds is returned.
    """
    left, worlds = sorted(flights, key=lambda flight: flight.started_ns), []
    while left:
        worlds.append(flights_of_world(left[-1], left))
        taken = set(map(id, worlds[-1]))
        left = [flight for flight in left if id(flight) not in taken]
    nearest = max(worlds, key=lambda world: max(map(nearness, world)))  # the first of several, which is the newest
    return RecordedWorld(nearest, runs), len(worlds) - 1


def flights_of_world(own: Flight, flights: Iterable[Flight]) -> list[Flight]:
    """Return the records of the world of `own`, one for each process; of equal names, the nearest in time."""
    nearest = {own.process: own}
    for flight in sorted(flights, key=lambda flight: _start_gap_ns(flight, own)):
        if world_key(flight) == world_key(own) and _start_gap_ns(flight, own) < _TOGETHER_NS[flight.host == own.host]:
            nearest.setdefault(flight.process, flight)
    return [nearest[process] for process in sorted(nearest)]


def world_key(flight: Flight) -> tuple[object, ...]:
    """Return the facts that all flight records of one world have in common."""
    return flight.job, flight.attempt, flight.world, flight.processes, flight.world_size


def _start_gap_ns(flight: Flight, own: Flight) -> int:
    return abs(flight.started_ns - own.started_ns)


def recent_world(named: Sequence[str]) -> tuple[RecordedWorld, str, list[str]]:
    """Return the world of some records that began last, a line on its job, and lines on other worlds.

    Args:
        named: Flight records, or folders of these; without any, the default folder.

    Raises:
        UsageError: If no record can be read.
    """
    flights = _read_flights(named)
    nearness = (lambda flight: 0) if named else _nearness
    world, older = newest_world(flights, lambda flight: runs(flight.host, flight.pid, flight.born), nearness)
    first = world.flights[0]
    attempt = f", attempt {first.attempt}" if first.attempt else ""
    ranks = f"{first.world_size} rank{'s' * (first.world_size != 1)}"
    processes = f"{first.processes} process{'es' * (first.processes != 1)}"
    last = "the last" if named else _why_chosen(world)
    more = [f"(of {older + 1} runs in these files this is {last}; name the files of another to see that)"]
    return (
        world,
        ", ".join([f"job {first.job}{attempt}: {ranks}", processes, *_describe_origin(first)]),
        more if older else [],
    )


def _nearness(flight: Flight) -> int:
    """Return how near a record is: 2: by this user in this directory, 1: by this user elsewhere, 0: by another user."""
    with suppress(OSError):  # its run has just removed it
        if os.stat(flight.path).st_uid == os.getuid():
            return 2 if flight.folder and flight.folder == working_folder() else 1
    return 0


def _why_chosen(world: RecordedWorld) -> str:
    """Return why this run was chosen among all in the default folder, as a part of a sentence."""
    near = max(map(_nearness, world.flights))
    if near == 2:
        return "your last that began in this directory"
    where = next((f" (it began in {flight.folder})" for flight in world.flights if flight.folder), "")
    return f"{'your last' if near else 'the last, of another user'}{where}, as none of yours began in this directory"


def _describe_origin(flight: Flight) -> Iterator[str]:
    """Yield the program of a run, and when it began, as far as the record has them."""
    if flight.script:
        yield flight.script
    with suppress(OverflowError, ValueError, OSError):  # no instant
        yield f"begun {datetime.fromtimestamp(flight.started_ns // 10**9)}"


def _default_path() -> str:
    return os.environ.get("OVERLAP_FLIGHT_DIR") or str(default_folder())


def _find_files(named: Sequence[str]) -> list[str]:
    """Return the paths of named flight records, and of those in named folders; none named: in the default folder."""
    files: list[str] = []
    for name in named or [_default_path()]:
        inside = [Path(name)]
        if not named or Path(name).is_dir():  # links to records elsewhere may lead nowhere
            inside = sorted(path for path in Path(name).glob(f"*{ENDING}") if path.is_file())
        if not inside:
            raise UsageError(_NONE.format(name))
        files += map(str, inside)
    return files


def _read_flights(named: Sequence[str]) -> list[Flight]:
    """Return the readable records; print one line for each other file, unless its run has just removed it."""
    flights, refusals = [], []
    for file in _find_files(named):
        try:
            flights.append(read_flight(file))
        except UsageError as error:
            if file in named or Path(file).exists():
                refusals.append(f"why: {error}")
    if (more := len(refusals) - _MOST_REFUSALS) > 0:
        refusals[_MOST_REFUSALS:] = [f"why: and {more} files more that cannot be read"]
    if not flights:
        raise UsageError("\n".join(refusals) or _NONE.format(", ".join(named) or _default_path()))
    for line in refusals:
        notify(line)
    return flights


def world_of_process(pid: int, folder: str | os.PathLike[str] | None) -> RecordedWorld | None:
    """Return the records of the world of a process that has ended a moment ago; None without its record here.

    Args:
        folder: Where flight records lie; None: in the default folder.
    """
    where = Path(folder) if folder is not None else default_folder()
    own = max(_readable(where, f"*-{pid}{ENDING}"), key=lambda flight: flight.started_ns, default=None)
    if own is None:
        return None
    name = Path(own.path).name.rpartition(f"-process{own.process}-")[0]  # the same of all processes of a world
    return RecordedWorld(flights_of_world(own, _readable(where, f"{name}-*{ENDING}")), lambda flight: flight.pid != pid)


def _readable(folder: Path, pattern: str) -> Iterator[Flight]:
    """Yield the flight records in a folder that match a pattern and can be read."""
    for path in folder.glob(pattern):
        with suppress(UsageError):  # damaged, or gone meanwhile: its process has ended well
            yield read_flight(path)
