"""The last signs of life of a process that can no longer be asked, from its flight record and those of its peers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import UsageError
from .autopsy import World, last_signs
from .folder import ENDING, default_folder
from .reading import Flight, read_flight

__all__ = ["last_signs_of"]

# Processes begin their records when all have met, within milliseconds.
_TOGETHER_NS = 5 * 10**9


def last_signs_of(pid: int, folder: str | os.PathLike[str] | None) -> list[str]:
    """Return lines on what a process was doing when it ended; none if there is no record of it on this machine.

    Args:
        pid: The process, which has ended a moment ago.
        folder: Where flight records lie; None: in the default folder.
    """
    where = Path(folder) if folder is not None else default_folder()
    own = max(_readable(where, f"*-{pid}{ENDING}"), key=lambda flight: flight.started_ns, default=None)
    if own is None:
        return []
    return last_signs(World(_world_of(own, where), lambda _: False), pid)


def _world_of(own: Flight, folder: Path) -> list[Flight]:
    """Return the records of a world, of each process the nearest: those of another run of that name may lie there."""
    name = Path(own.path).name.rpartition(f"-process{own.process}-")[0]  # the same of all processes of a world
    nearest = {own.process: own}
    for flight in sorted(_readable(folder, f"{name}-*{ENDING}"), key=lambda flight: _apart_ns(flight, own)):
        if _apart_ns(flight, own) < _TOGETHER_NS and flight.world_size == own.world_size:
            nearest.setdefault(flight.process, flight)
    return [nearest[process] for process in sorted(nearest)]


def _apart_ns(flight: Flight, own: Flight) -> int:
    return abs(flight.started_ns - own.started_ns)


def _readable(folder: Path, pattern: str) -> Iterator[Flight]:
    for path in folder.glob(pattern):
        with suppress(UsageError):  # damaged, or gone meanwhile: its process has ended well
            yield read_flight(path)
