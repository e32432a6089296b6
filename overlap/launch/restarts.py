"""Restarts of a world that has failed, as often as allowed, and as long as there is progress.

A line for each attempt has the culprit, the cause, and the step from which the next one goes on. The next attempt
starts at once while there is progress; without, it waits, longer each time, and the third attempt in a row without
progress is the last: a program that fails three times at one place fails the fourth time too. After an error
of usage there is no other attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..kernel_facts import oom_kills
from .jobs import LaunchSpec
from .launcher import LaunchOutcome
from .verdict import Ending, card, culprit, headline

FUTILE = 3  # attempts without progress
BAD_USAGE = 2  # exit code of a failure that would come again
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

_OURS = "overlap: "
_USAGE = f": {UsageError.__name__}: "
"""Part of the line of an error that a rank raised."""


class Advance:
    """Progress of a job from attempt to attempt, and its consequences for the next one.

    Attributes:
        futile: Number of attempts in a row without progress.

    Args:
        best: The step from which the first attempt goes on; None: from the beginning.
    """

    futile: int

    def __init__(self, best: int | None = None) -> None:
        self.futile = 0
        self._best = best

    def note(self, reached: int | None) -> None:
        """Note the step that an attempt has reached; None, or no later step than before, is no progress."""
        better = reached is not None and (self._best is None or reached > self._best)
        self._best, self.futile = (reached, 0) if better else (self._best, self.futile + 1)

    @property
    def hopeless(self) -> bool:
        """Whether too many attempts in a row have ended without progress."""
        return self.futile >= FUTILE

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt."""
        return min(FIRST_PAUSE_S * 2 ** (self.futile - 1), LONGEST_PAUSE_S) if self.futile else 0.0

    def describe_giving_up(self, attempt: int) -> str:
        """Return the line for the user that says why no attempt follows this one."""
        if self.hopeless:
            return f"gives up: {self.futile} attempts in a row ended without progress"
        times = "once" if attempt == 1 else f"{attempt} times"
        return f"gives up: it has been started again {times}, and --max-restarts allows no more"

    def describe_restart(self, restart: int, limit: int, step: int | None, path: str | None, why: str) -> str:
        """Return the line for the user on the next attempt: its start, its first step, and why the last one ended.

        Args:
            restart: Its number.
            limit: Largest number of restarts.
            step: Step from which it goes on; None: from the beginning.
            path: Folder of the state; None: none is set.
            why: Why the last one has ended.
        """
        begin = f"restart {restart} of {limit}" + (f" in {self.pause_s:g} s" if self.pause_s else "")
        if step is not None:
            return f"{begin}, from step {step}: {why}"
        lacking = f"no complete state in {path}" if path else "no complete state; --state-dir or Checkpoints keep one"
        return f"{begin}, from the beginning ({lacking}): {why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """When to start a world again."""

    most: int  # How often, at least once
    latest: Callable[[], int | None]  # Returns the step from which the next attempt goes on; None if there is no state
    # Returns how far an attempt came, given the pids of its processes; None if that is not known.
    reached: Callable[[Sequence[int]], int | None]
    place: str | None  # Where the state is; None: none is named
    sleep: Callable[[float], None]  # Waits a number of seconds
    # Returns the newest step that an attempt had on the disk, in a folder that may be known to the program only, given
    # the pids of its processes.
    kept: Callable[[Sequence[int]], int | None] = lambda pids: None
    # Returns what a process was doing that has ended without a word, given its pid.
    signs: Callable[[int], Sequence[str]] = lambda pid: ()


def launch_again(spec: LaunchSpec, restarts: Restarts, once: Callable[[LaunchSpec], LaunchOutcome]) -> LaunchOutcome:
    """Launch a world until an attempt ends well, or another one is useless; return the outcome of the last attempt.

    Args:
        spec: What to start.
        restarts: How often.
        once: Launches it once.
    """
    advance = Advance(restarts.latest() if restarts.place else None)
    saved_step: int | None = None
    for attempt in range(restarts.most + 1):
        killed = oom_kills()
        environ = {**spec.environ, "OVERLAP_RESTART": str(attempt)}
        outcome = once(replace(spec, environ=environ, attempt=attempt))
        guilty = culprit(outcome.endings)
        if guilty is None or outcome.asked is not None or guilty.returncode == BAD_USAGE:
            break
        why = _reason_of_end(guilty, oom_kills() - killed, restarts.signs)
        if _USAGE in why:
            spec.report("gives up: an error of usage would come again")
            break
        pids = [ending.pid for ending in outcome.endings]
        step = restarts.latest()
        advance.note(step if restarts.place else restarts.reached(pids))
        saved_step = max((each for each in (saved_step, restarts.kept(pids)) if each is not None), default=None)
        step = saved_step if step is None else step
        if attempt == restarts.most or advance.hopeless:
            spec.report(advance.describe_giving_up(attempt))
            break
        spec.report(advance.describe_restart(attempt + 1, restarts.most, step, restarts.place, why))
        if advance.pause_s:
            restarts.sleep(advance.pause_s)
    return outcome


def _reason_of_end(guilty: Ending, killed: int, signs: Callable[[int], Sequence[str]]) -> str:
    """Return why an attempt ended, in one line: the error, and the last operation if there is no report."""
    line = headline(card(guilty, oom_kills=killed)).removeprefix(_OURS)
    doing = signs(guilty.pid)[:1] if guilty.status is None else ()
    return "; ".join([line, *doing])
