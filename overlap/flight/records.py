"""Choice of flight records: they are grouped by world, and the world that the reader most likely means is chosen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ..errors import UsageError
from ..notice import notify
from .folder import ENDING, default_folder, is_alive, working_folder
from .reading import Flight, read_flight

_NONE = "why: no flight records in {}: no run has failed here, or they are elsewhere"
_MOST_REFUSALS = 8  # unreadable files that messages name
# Largest difference between the starts of records of one world, by whether they are of one host. Processes begin their
# records within milliseconds of each other, but clocks of different machines may differ by minutes.
_TOGETHER_NS = {True: 5 * 10**9, False: 300 * 10**9}


@dataclass(frozen=True)
class RecordedWorld:
    """The flight records of the processes of one world."""

    flights: Sequence[Flight]  # By process
    runs: Callable[[Flight], bool]  # Whether the process of a record still runs

    @property
    def end_ns(self) -> int:
        """The last instant in any of the records, in nanoseconds since 1970."""
        endings = [flight.ending.at_ns for flight in self.flights if flight.ending is not None]
        return max([table.last_ns for flight in self.flights for table in flight.ranks] + endings)


def choose_world(
    flights: Sequence[Flight], runs: Callable[[Flight], bool], nearness: Callable[[Flight], int] = lambda flight: 0
) -> tuple[RecordedWorld, int]:
    """Return the newest of the worlds that are nearest to the reader, and the number of other worlds.

    Args:
        flights: The records, at least one.
        runs: Whether the process of a record still runs.
        nearness: How near a record is to the reader: a larger number is nearer. By default all are equally near.
    """
    left, worlds = sorted(flights, key=lambda flight: flight.started_ns), []
    while left:
        # Take the world of the newest record, with all of its records.
        worlds.append(flights_of_world(left[-1], left))
        taken = set(map(id, worlds[-1]))
        left = [flight for flight in left if id(flight) not in taken]
    # Of equally near worlds `max` takes the first, which is the newest.
    nearest = max(worlds, key=lambda world: max(map(nearness, world)))
    return RecordedWorld(nearest, runs), len(worlds) - 1


def flights_of_world(own: Flight, flights: Iterable[Flight]) -> list[Flight]:
    """Return the records of the world of `own`, one for each process, in the order of processes.

    Records are of one world if `world_key` is equal and they began within `_TOGETHER_NS` of `own`. Of several records
    of one process index, the one that began nearest to `own` is taken.

    Args:
        own: One record of the world.
        flights: Records of any worlds.
    """
    nearest = {own.process: own}
    for flight in sorted(flights, key=lambda flight: _start_gap_ns(flight, own)):
        if world_key(flight) == world_key(own) and _start_gap_ns(flight, own) < _TOGETHER_NS[flight.host == own.host]:
            nearest.setdefault(flight.process, flight)
    return [nearest[process] for process in sorted(nearest)]


def world_key(flight: Flight) -> tuple[object, ...]:
    """Return (job, attempt, world, processes, world size), which all flight records of one world have in common."""
    return flight.job, flight.attempt, flight.world, flight.processes, flight.world_size


def _start_gap_ns(flight: Flight, own: Flight) -> int:
    return abs(flight.started_ns - own.started_ns)


def newest_recorded_world(files: Sequence[str]) -> tuple[RecordedWorld, str, list[str]]:
    """Find the world that began last among some flight records.

    Args:
        files: Flight records, or folders with some; empty: the default folder.

    Returns:
        The world; a line that describes its job; and, if the records have other worlds too, a list with one hint.

    Raises:
        UsageError: No record can be read.
    """
    flights = _read_flights(files)
    # Named files are all equally near. In the default folder, runs of this user in this directory come first.
    nearness = (lambda flight: 0) if files else _nearness_to_reader
    world, other_count = choose_world(flights, lambda flight: is_alive(flight.host, flight.pid, flight.born), nearness)
    first = world.flights[0]
    attempt = f", attempt {first.attempt}" if first.attempt else ""
    ranks = f"{first.world_size} rank{'s' * (first.world_size != 1)}"
    processes = f"{first.processes} process{'es' * (first.processes != 1)}"
    last = "the last" if files else _choice_reason(world)
    hint = f"(of {other_count + 1} runs in these files this is {last}; name the files of another to see that)"
    job = ", ".join([f"job {first.job}{attempt}: {ranks}", processes, *_describe_origin(first)])
    return world, job, [hint] if other_count else []


def _nearness_to_reader(flight: Flight) -> int:
    """Return how near a run is to the reader: 2: this user's, in this directory; 1: this user's; 0: another user's."""
    with suppress(OSError):  # the run has just removed its record
        if os.stat(flight.path).st_uid == os.getuid():
            return 2 if flight.folder and flight.folder == working_folder() else 1
    return 0


def _choice_reason(world: RecordedWorld) -> str:
    """Return why this run was chosen among all in the default folder, as text that follows "this is"."""
    near = max(map(_nearness_to_reader, world.flights))
    if near == 2:
        return "your last that began in this directory"
    where = next((f" (it began in {flight.folder})" for flight in world.flights if flight.folder), "")
    return f"{'your last' if near else 'the last, of another user'}{where}, as none of yours began in this directory"


def _describe_origin(flight: Flight) -> Iterator[str]:
    """Yield the program of a run, and when it began, as text, as far as the record has them."""
    if flight.script:
        yield flight.script
    with suppress(OverflowError, ValueError, OSError):  # a damaged record: the number is no date
        yield f"begun {datetime.fromtimestamp(flight.started_ns // 10**9)}"


def _default_path() -> str:
    return os.environ.get("OVERLAP_FLIGHT_DIR") or str(default_folder())


def _find_files(named: Sequence[str]) -> list[str]:
    """Return the paths of records, named or in folders; without names, those of the default folder.

    A named record need not exist. Raises UsageError if a folder has no records.
    """
    files: list[str] = []
    for name in named or [_default_path()]:
        inside = [Path(name)]
        if not named or Path(name).is_dir():
            # `is_file` leaves out links to records that have been removed.
            inside = sorted(path for path in Path(name).glob(f"*{ENDING}") if path.is_file())
        if not inside:
            raise UsageError(_NONE.format(name))
        files += map(str, inside)
    return files


def _read_flights(named: Sequence[str]) -> list[Flight]:
    """Read the records of `_find_files`, and print a line for each bad one; raise UsageError if all are."""
    flights, refusals = [], []
    for file in _find_files(named):
        try:
            flights.append(read_flight(file))
        except UsageError as error:
            # A run may have removed a file of a folder since it was listed; a file that is named is always reported.
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
    """Return the records of the world of a process that ended a moment ago, or None if its record is not in the folder.

    All other processes of the world count as running.

    Args:
        pid: Id of the process.
        folder: The folder of flight records; None: the default folder.
    """
    where = Path(folder) if folder is not None else default_folder()
    own = max(_read_glob(where, f"*-{pid}{ENDING}"), key=lambda flight: flight.started_ns, default=None)
    if own is None:
        return None
    # The part of the name before the process is the same for all processes of a world.
    name = Path(own.path).name.rpartition(f"-process{own.process}-")[0]
    return RecordedWorld(
        flights_of_world(own, _read_glob(where, f"{name}-*{ENDING}")), lambda flight: flight.pid != pid
    )


def _read_glob(folder: Path, pattern: str) -> Iterator[Flight]:
    """Yield the flight records in a folder that match a pattern and can be read."""
    for path in folder.glob(pattern):
        with suppress(UsageError):  # damaged, or removed since it was listed
            yield read_flight(path)
