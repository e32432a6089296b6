"""`overlap run --max-restarts N`: starts a failed world again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from ..config import RunConfig
from ..flight.ends import last_signs_of_process
from ..flight.folder import ENDING, default_folder
from ..launch.jobs import LaunchSpec
from ..launch.launcher import LaunchOutcome, launch
from ..launch.progress import latest_step, reached_step, saved_step
from ..launch.restarts import Restarts, launch_again


def run_again(spec: LaunchSpec, config: RunConfig) -> LaunchOutcome:
    """Launch a world, and again after failures; the flight records of failed attempts stay."""
    assert config.max_restarts
    records = Path(config.flight_dir or default_folder())
    restarts = Restarts(
        most=config.max_restarts,
        latest=partial(latest_step, config.state_dir),
        reached=partial(_last_step, records),
        kept=lambda pids: saved_step(_record_files(records, pids)),
        place=_relative_path(config.state_dir),
        sleep=time.sleep,
        signs=lambda pid: last_signs_of_process(pid, config.flight_dir),
    )
    return launch_again(spec, restarts, lambda attempt: trio.run(launch, attempt))


def _last_step(records: Path, pids: Sequence[int]) -> int | None:
    """Return the last step that any rank of an attempt began, from the flight records."""
    return reached_step(_record_files(records, pids))


def _record_files(records: Path, pids: Sequence[int]) -> list[Path]:
    return [file for pid in pids for file in records.glob(f"*-{pid}{ENDING}")]


def _relative_path(folder: str | None) -> str | None:
    """Return a folder relative to the current one, as users write it."""
    if folder is None:
        return None
    with suppress(ValueError, FileNotFoundError):  # it lies elsewhere, or the current folder is gone
        return str(Path(folder).relative_to(Path.cwd()))
    return folder
