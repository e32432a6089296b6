"""Worlds that run on this host, found by the flight records of their processes, and snapshots of worlds over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from time import process_time, time_ns

from ..errors import UsageError
from ..flight.folder import ENDING, default_folder, runs
from ..flight.reading import OpenRecord
from .figures import RankSnapshot, WorldFigures, figures

MOST_SHARE = 0.01
"""Of one processor: a sample that takes longer is followed by a longer pause."""

_NS = 10**9


class Sampler:
    """Figures of a world, one sample after another, each of the time since the last.

    Args:
        world: The world.
        every_s: How often, if that is cheap enough; each snapshot covers that time.
    """

    def __init__(self, world: RunningWorld, *, every_s: float) -> None:
        self._world, self._every_s = world, every_s
        self.pause_s: float = every_s
        self._is_first = True

    def take_sample(self) -> WorldFigures:
        """Return the figures of the ranks since the last sample; `pause_s` then has the time to wait for the next."""
        start_s = process_time()
        now_ns, ranks = self._world.snapshot()
        sample = figures(ranks, (now_ns - round(self._every_s * _NS), now_ns))
        spent_s = 0.0 if self._is_first else process_time() - start_s  # the first snapshot loads modules
        self.pause_s, self._is_first = max(self._every_s, spent_s / MOST_SHARE), False
        return sample


@dataclass(frozen=True, slots=True)
class RunningWorld:
    """A world, as far as its processes run on this host."""

    processes: Sequence[OpenRecord]  # Their records, by their number in the world

    @property
    def job(self) -> str:
        """Name of the job."""
        return self.processes[0].about.job

    @property
    def script(self) -> str:
        """Path of the program."""
        return self.processes[0].about.script

    def runs_program(self, program: str) -> bool:
        """Whether a path, or the end of one, names the program of this world."""
        about, named = self.processes[0].about, PurePath(program).parts
        path = PurePath(os.path.normpath(PurePath(about.folder, about.script))).parts
        return bool(named) and path[-len(named) :] == named

    @property
    def size(self) -> int:
        """Number of ranks of the world, on all hosts."""
        return self.processes[0].about.world_size

    @property
    def process_count(self) -> int:
        """Number of processes of the world, on all hosts."""
        return self.processes[0].about.processes

    @property
    def started_ns(self) -> int:
        """Start of the world, in nanoseconds since 1970."""
        return min(each.about.started_ns for each in self.processes)

    @property
    def where(self) -> str:
        """Number of processes, and of processes on this host, in words."""
        count, here = self.process_count, len(self.processes)
        return f"{count} process{'es' * (count != 1)}" + (f", {here} of them here" if here < count else "")

    @property
    def age_s(self) -> float:
        """Seconds since the start of the world."""
        return (time_ns() - self.started_ns) / 1e9

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes on this host."""
        return [each.about.pid for each in self.processes]

    @property
    def lives(self) -> bool:
        """Whether any of its processes on this host still runs; a process that ends well removes its record."""
        return any(os.path.exists(each.path) and not each.has_ended and _is_running(each) for each in self.processes)

    def snapshot(self) -> tuple[int, list[RankSnapshot]]:
        """Return the present time in nanoseconds since 1970, and the recorded operations of each rank."""
        now_ns = time_ns()
        processes = [((record.about.host, number), record) for number, record in enumerate(self.processes)]
        return now_ns, [(place, table, record.calls) for place, record in processes for table in record.ranks()]

    def close(self) -> None:
        """Close the records of its processes."""
        for each in self.processes:
            each.close()


def running(folder: str | os.PathLike[str] | None = None) -> list[RunningWorld]:
    """Return the worlds that run here, the newest first; the caller closes them.

    Args:
        folder: Where their records are; None: in the default folder, and in all folders of
            `--flight-dir` in which this user keeps some of them.
    """
    records: dict[tuple[object, ...], list[OpenRecord]] = {}
    for path in _find_records(folder):
        with suppress(UsageError):  # it is just being made or removed, or it is of another version
            record = OpenRecord(path)
            if record.has_ended or not _is_running(record):
                record.close()
                continue
            about = record.about
            world = about.job, about.attempt, about.world, about.processes, about.world_size
            records.setdefault(world, []).append(record)
    worlds = [RunningWorld(sorted(each, key=lambda one: one.about.process)) for each in records.values()]
    return sorted(worlds, key=lambda world: -world.started_ns)


def _find_records(folder: str | os.PathLike[str] | None) -> list[Path]:
    """Return the paths of flight records: in a folder, else in the default one and OVERLAP_FLIGHT_DIR."""
    if folder is not None:
        folders = [Path(folder)]
    else:
        folders = [default_folder(), *([Path(named)] if (named := os.environ.get("OVERLAP_FLIGHT_DIR")) else [])]
    return sorted({path.resolve() for each in folders for path in each.glob(f"*{ENDING}") if path.is_file()})


def find_world(name: str | None, folder: str | os.PathLike[str] | None = None) -> RunningWorld:
    """Return the running world whose job, process id or program is `name`, the newest without one; close all others.

    Raises:
        UsageError: There is none, or the program has several.
    """
    worlds = running(folder)
    fitting = [world for world in worlds if name is None or name == world.job or name in map(str, world.pids)]
    of_program = [] if fitting or name is None else [world for world in worlds if world.runs_program(name)]
    if len({world.job for world in of_program}) < 2:
        fitting += of_program
    for world in worlds:
        if world not in fitting[:1]:
            world.close()
    if fitting:
        return fitting[0]
    if of_program:
        jobs = ", ".join(f"{world.job} ({world.size} ranks, for {world.age_s:.0f} s)" for world in of_program)
        raise UsageError(f"{name!r} is the program of several running jobs, name one of them: {jobs}")
    if name is None:
        raise UsageError("no world of yours runs on this host; start one with `overlap run`")
    known = ", ".join(world.job for world in worlds) or "none"
    raise UsageError(f"{name!r} is no running job, nor the program or a process of one; running on this host: {known}")


def _is_running(record: OpenRecord) -> bool:
    return runs(record.about.host, record.about.pid, record.about.born)
