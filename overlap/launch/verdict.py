"""Verdict on a launch: the process that ended the job, the exit code, and the last words to the user. Pure.

By cause, not by clock (`waits.signs`): an error of its own, an end without a report, an end because of another process,
an end by the launcher. Among equals the first to end counts. One exception: if a process ended because of another one,
which sent no report until it was stopped, then the other one hung, and is the cause.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from ..errors import shorten_line
from ..units import format_bytes
from ..waits import signs
from ..waits.signs import Evidence, Sign
from .jobs import Job

CARD_LINES = 25  # longest report of a failure on the terminal
CARD_COLUMNS = 2000  # characters of each line, at most: some errors have whole arrays in one line

INTERRUPTED = "overlap: interrupted"  # the line of a process that SIGINT has ended
_INTERRUPTED_END = "was interrupted by a SIGINT that its launcher had not sent"
_OURS = "overlap: "  # prefix of the line in which `overlap` itself names the failed rank


def find_culprit(endings: Sequence[Job]) -> Job | None:
    """Return the ending that ended the job, or None if all went well.

    Args:
        endings: All processes that have ended, in that order.
    """
    failed = [ending for ending in endings if ending.returncode != 0 or ending.missed or ending.vanished]
    first = signs.culprit(Sign(process=at, evidence=_evidence_on(ending), at_ns=at) for at, ending in enumerate(failed))
    if first is None or first.evidence is not Evidence.REPORTED:
        return None if first is None else failed[first.process]
    ending = failed[first.process]
    silent = [other for other in failed if other.status is None]  # and stopped, or it would be the first
    hung = [other for other in silent if ending.status is not None and ending.status.rank in other.ranks]
    return replace(hung[0], accuser=ending) if hung else ending


def _evidence_on(ending: Job) -> Evidence:
    """Return the evidence on a process: without a report it has ended by itself."""
    if ending.stopped:
        return Evidence.STOPPED_BY_LAUNCHER
    return ending.status.evidence if ending.status is not None else Evidence.EXIT


def exit_code(ending: Job) -> int:
    """Return the exit code that a shell gives: 128 plus the number of the signal.

    A process that hung has the code of its accuser, because the signal was the launcher's. A process that was missed or
    has vanished has code 1. The code of a report counts, also if a signal ended the process after it.
    """
    if ending.missed or ending.vanished:
        return 1
    status, returncode = (ending.accuser or ending).status, (ending.accuser or ending).returncode or 0
    if status is not None and returncode < 0:
        return status.code
    return returncode if returncode >= 0 else 128 - returncode


def card(ending: Job, *, oom_kills: int = 0, signs: Sequence[str] = (), host: str = "") -> list[str]:
    """Return the report on the culprit, at most 25 lines and one more: its error, and its last signs of life.

    The additional line names the culprit, if its error does not.

    Args:
        ending: End of the culprit.
        oom_kills: Number of processes that the kernel has killed for want of memory while the job ran.
        signs: The last signs of life of a process that sent no report.
        host: The machine, if the job has several.
    """
    status = (ending.accuser or ending).status
    lines = status.text.splitlines() if status else list(ending.tail)
    spoke = status is not None or (ending.returncode or 0) > 0  # a signal after its report is no news
    interrupted = ending.accuser is None and spoke and headline(lines) == INTERRUPTED
    complete = ending.accuser is None and spoke and headline(lines).startswith(_OURS)
    if complete and not ending.log and not interrupted:
        return _cut_middle(lines, CARD_LINES)
    how = _INTERRUPTED_END if interrupted else _describe_end(ending, oom_kills)
    last = f"{_OURS}{ending.name}{f' on {host}' if host else ''} {how}"
    last += f"; all it printed is in {ending.log}" if ending.log else ""
    if interrupted:
        index = lines.index(INTERRUPTED)
        return _cut_middle([*lines[:index], last, *lines[index + 1 :]], CARD_LINES)
    return [*_cut_middle(lines, CARD_LINES - 1 - len(signs)), last, *(f"  {line}" for line in signs)]


def headline(lines: Sequence[str]) -> str:
    """Return the last line that is not an indented detail."""
    return next((line for line in reversed(lines) if not line.startswith("  ")), "")


def _describe_end(ending: Job, oom_kills: int) -> str:
    """Return how a process ended, as the verb of a sentence about it."""
    returncode = ending.returncode or 0
    if ending.accuser is not None:
        return "hung, and had to be stopped"
    if ending.stopped and returncode == -signal.SIGKILL:
        return "was stopped, as SIGSTOP does, and had to be killed"
    if ending.missed:
        return "exited with code 0 without joining"
    if ending.vanished:
        return "exited with code 0 before its world had ended, as os._exit does"
    if returncode == 128 + signal.SIGTERM and ending.status is None:
        return "was ended by SIGTERM, which its launcher had not sent"
    if returncode >= 0:
        silent = "" if ending.status else ", without saying why"
        return f"exited with code {returncode}{silent}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was killed by {name}" + (
        _describe_kill(oom_kills, ending.peak_bytes) if -returncode == signal.SIGKILL else ""
    )


def _describe_kill(oom_kills: int, peak_bytes: int) -> str:
    """Return the probable reason of a SIGKILL by another process: the kernel's want of memory, if counted."""
    used = f", it had {format_bytes(peak_bytes)} at most" if peak_bytes else ""
    if oom_kills:
        return f"; the kernel has killed {oom_kills} here for want of memory{used}: use fewer ranks, or smaller batches"
    return f"; this launcher did not send it: somebody did, or memory ran out{used} (`dmesg` of that machine says)"


def _cut_middle(lines: list[str], most_lines: int) -> list[str]:
    """Shorten lines in the middle: the beginning names the error and its place, the end the culprit."""
    left_out = len(lines) - most_lines + 1
    if left_out > 1:
        head = most_lines // 2
        lines = [*lines[:head], f"  ... {left_out} lines left out ...", *lines[head + left_out :]]
    return [shorten_line(line, CARD_COLUMNS) for line in lines]
