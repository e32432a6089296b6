"""The last signs of life of a process that can no longer be asked, from its flight record and those of its peers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import UsageError
from .autopsy import World, last_signs, together
from .folder import ENDING, default_folder
from .reading import Flight, read_flight


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
    name = Path(own.path).name.rpartition(f"-process{own.process}-")[0]  # the same of all processes of a world
    return last_signs(World(together(own, _readable(where, f"{name}-*{ENDING}")), lambda _: False), pid)


def _readable(folder: Path, pattern: str) -> Iterator[Flight]:
    for path in folder.glob(pattern):
        with suppress(UsageError):  # damaged, or gone meanwhile: its process has ended well
            yield read_flight(path)
