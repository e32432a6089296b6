"""Restarts of a world that has failed, as often as allowed, and as long as there is progress.

For each attempt, a line has the culprit, the cause, and the step from which the next attempt continues. After progress
the next attempt starts at once. Otherwise it waits, longer each time, and the third attempt in a row without progress
is the last: a program that fails three times at one place probably fails again. An error of usage ends the attempts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import trio

from ..config import RunConfig
from ..errors import UsageError
from ..flight.ends import last_signs_of_process
from ..flight.folder import ENDING, default_folder
from ..flight.reading import read_flight
from ..kernel_facts import count_oom_kills
from ..state.saves import newest_step
from .jobs import LaunchSpec
from .launcher import LaunchOutcome, launch
from .verdict import culprit_report, find_culprit, find_headline

FUTILE = 3  # number of attempts in a row without progress after which there is no other
BAD_USAGE = 2  # exit code of an error of usage, which would come again
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

_OURS = "overlap: "
_USAGE = f": {UsageError.__name__}: "
"""Part of the line about an error of usage that a rank has raised."""


class AttemptProgress:
    """Progress of a job from attempt to attempt, and its consequences for the next one.

    Attributes:
        futile_attempts: Number of attempts in a row without progress.

    Args:
        folder: Folder of states and checkpoints; None: the settings name none, and flight records show the progress.
    """

    def __init__(self, folder: str | None) -> None:
        self.futile_attempts: int = 0
        self._folder = folder
        self._best = newest_step(folder)
        # newest saved step by flight records: the program may save in a folder that the settings do not name
        self._kept: int | None = None

    def record_progress(self, records: Iterable[Path]) -> int | None:
        """Record the progress of an attempt: it is progress if a later step was reached than ever before.

        Args:
            records: Flight records of the attempt.

        Returns:
            The saved step from which the next attempt continues; None: it starts from the beginning.
        """
        latest, (reached, kept) = newest_step(self._folder), recorded_steps(records)
        # without a folder, the steps that ranks have begun show the progress
        step = reached if self._folder is None else latest
        better = step is not None and (self._best is None or step > self._best)
        self._best, self.futile_attempts = (step, 0) if better else (self._best, self.futile_attempts + 1)
        self._kept = max((each for each in (self._kept, kept) if each is not None), default=None)
        return self._kept if latest is None else latest

    @property
    def hopeless(self) -> bool:
        """Whether too many attempts in a row have ended without progress."""
        return self.futile_attempts >= FUTILE

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt."""
        return min(FIRST_PAUSE_S * 2 ** (self.futile_attempts - 1), LONGEST_PAUSE_S) if self.futile_attempts else 0.0

    def describe_giving_up(self, attempt: int) -> str:
        """Return the line for the user on why no attempt follows.

        Args:
            attempt: Number of restarts so far.
        """
        if self.hopeless:
            return f"gives up: {self.futile_attempts} attempts in a row ended without progress"
        times = "once" if attempt == 1 else f"{attempt} times"
        return f"gives up: it has been started again {times}, and --max-restarts allows no more"

    def describe_restart(self, restart: int, limit: int, step: int | None, path: str | None, why: str) -> str:
        """Return the line for the user on the next attempt: its start, its first step, and why the last one ended.

        Args:
            restart: Number of the restart, from 1.
            limit: Largest number of restarts.
            step: Step from which the attempt continues; None: from the beginning.
            path: Folder of the state; None: none is set.
            why: Why the last attempt has ended.
        """
        begin = f"restart {restart} of {limit}" + (f" in {self.pause_s:g} s" if self.pause_s else "")
        if step is not None:
            return f"{begin}, from step {step}: {why}"
        lacking = f"no complete state in {path}" if path else "no complete state; --state-dir or Checkpoints keep one"
        return f"{begin}, from the beginning ({lacking}): {why}"


def recorded_steps(records: Iterable[Path]) -> tuple[int | None, int | None]:
    """Return (last step that any rank has begun, newest saved step) from flight records; None: there is none."""
    # -1 as for a rank that has begun no step
    reached = kept = -1
    for file in records:
        with suppress(UsageError):  # it cannot be read
            for rank in read_flight(file).ranks:
                reached, kept = max(reached, rank.last_step), max(kept, rank.saved_step)
    return None if reached < 0 else reached, None if kept < 0 else kept


def launch_with_restarts(spec: LaunchSpec, config: RunConfig, shown_folder: str | None) -> LaunchOutcome:
    """Launch a world again until an attempt succeeds, or another one is useless; return the last attempt's outcome.

    Args:
        spec: Description of the launch.
        config: Settings, with the number of restarts, and the folders of states and flight records.
        shown_folder: Folder of states as the user wrote it, for messages.
    """
    advance, records = AttemptProgress(config.state_dir), Path(config.flight_dir or default_folder())
    most_restarts = config.max_restarts or 0
    for attempt in range(most_restarts + 1):
        killed = count_oom_kills()
        environ = {**spec.environ, "OVERLAP_RESTART": str(attempt)}
        outcome = trio.run(launch, replace(spec, environ=environ, attempt=attempt))
        guilty = find_culprit(outcome.endings)
        # No restart after a good end, an interrupt, or a mistake in the command.
        if guilty is None or outcome.first_signal is not None or guilty.returncode == BAD_USAGE:
            break
        why = find_headline(culprit_report(guilty, oom_kills=count_oom_kills() - killed)).removeprefix(_OURS)
        if _USAGE in why:
            spec.report("gives up: an error of usage would come again")
            break
        if guilty.status is None:
            why = "; ".join([why, *last_signs_of_process(guilty.pid, config.flight_dir)[:1]])
        files = [file for ending in outcome.endings for file in records.glob(f"*-{ending.pid}{ENDING}")]
        step = advance.record_progress(files)
        if attempt == most_restarts or advance.hopeless:
            spec.report(advance.describe_giving_up(attempt))
            break
        spec.report(advance.describe_restart(attempt + 1, most_restarts, step, shown_folder, why))
        time.sleep(advance.pause_s)
    return outcome
