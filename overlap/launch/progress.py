"""Progress of a job: the newest step saved in a folder, and the steps in flight records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import UsageError
from ..flight.reading import RankRecord, read_flight
from ..state.saves import newest_step


def latest_step(folder: str | None) -> int | None:
    """Return the step of the newest complete state or checkpoint in a folder, as this machine sees it."""
    return None if folder is None else newest_step(folder)


def reached_step(records: Iterable[Path]) -> int | None:
    """Return the last step that any rank began, from flight records."""
    return max((step for rank in _ranks(records) for step in _steps(rank)), default=None)


def saved_step(records: Iterable[Path]) -> int | None:
    """Return the newest step with state or a checkpoint of all ranks on the disk, from flight records."""
    return max((rank.kept for rank in _ranks(records) if rank.kept is not None), default=None)


def _ranks(records: Iterable[Path]) -> Iterator[RankRecord]:
    """Yield the ranks of flight records; those of files that cannot be read are left out."""
    for file in records:
        with suppress(UsageError):
            yield from read_flight(file).ranks


def _steps(rank: RankRecord) -> Iterator[int]:
    """Yield the steps that a rank began."""
    yield from (op.step for op in rank.operations if op.step is not None)
    if rank.step is not None:
        yield rank.step
