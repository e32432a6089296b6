"""Progress of a job: the newest step saved in a folder, and the steps in flight records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import UsageError
from ..flight.reading import Flight, read_flight
from ..state.parts import Parts


def latest_step(folder: str | None) -> int | None:
    """Return the step of the newest complete state or checkpoint in a folder, as this machine sees it."""
    if folder is None:
        return None
    from ..parallel.checkpoints.files import complete_steps  # not at the top: loads all strategies and simulation

    states = [save.step for save, _ in Parts(folder).complete_saves()]
    return max([*states, *complete_steps(folder)], default=None)


def reached_step(records: Iterable[Path]) -> int | None:
    """Return the last step that any rank began, from flight records."""
    return max((step for file in records for step in _steps(file)), default=None)


def saved_step(records: Iterable[Path]) -> int | None:
    """Return the newest step with state or a checkpoint of all ranks on the disk, from flight records."""
    return max((step for file in records for step in _saved_steps(file)), default=None)


def _saved_steps(file: Path) -> Iterator[int]:
    """Yield the newest saved step of each rank in a flight record; nothing if it cannot be read."""
    try:
        flight: Flight = read_flight(file)
    except UsageError:
        return
    yield from (record.kept for record in flight.ranks if record.kept is not None)


def _steps(file: Path) -> Iterator[int]:
    """Yield the steps that the ranks of a flight record began; nothing if it cannot be read."""
    try:
        flight: Flight = read_flight(file)
    except UsageError:
        return
    for record in flight.ranks:
        yield from (op.step for op in record.operations if op.step is not None)
        if record.step is not None:
            yield record.step
