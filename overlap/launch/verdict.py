"""Verdict on a launch: the process that ended the job, the exit code, and the report for the user. Pure.

Causes decide, and not times (`waits.signs`). In this order: an error of the process itself, an end without a status, an
end because of another process, an end by the launcher. Among equal causes, the process that ended first counts. One
exception: if a process ended because of another one, and that one sent no status until the launcher stopped it, then
the other one hung, and is the cause.
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

REPORT_LINES = 25  # longest report of a failure on the terminal
REPORT_COLUMNS = 2000  # characters of each line, at most: some errors have whole arrays in one line

INTERRUPTED = "overlap: interrupted"  # the line of a process that SIGINT has ended
_INTERRUPTED_END = "was interrupted by a SIGINT that its launcher had not sent"
_OURS = "overlap: "  # prefix of lines that this package prints, such as the one that names the failed rank


def find_culprit(endings: Sequence[Job]) -> Job | None:
    """Return the process that ended the job, with its `accuser` set if it hung; None if no process has failed.

    Args:
        endings: All processes that have ended, in the order of their ends.
    """
    failed = [ending for ending in endings if ending.returncode != 0 or ending.missed or ending.vanished]
    first = signs.culprit(
        Sign(process=at, evidence=Evidence.REPORTED if follows_kill(ending, failed) else _evidence_on(ending), at_ns=at)
        for at, ending in enumerate(failed)
    )
    if first is None or first.evidence is not Evidence.REPORTED:
        return None if first is None else failed[first.process]
    # All have reported the fault of another rank, or were stopped by the launcher. The first status blames a rank: if
    # the process of that rank has sent no status, it hung.
    accuser = failed[first.process]
    silent = [other for other in failed if other.status is None]
    hung = [other for other in silent if accuser.status is not None and accuser.status.rank in other.ranks]
    return replace(hung[0], accuser=accuser) if hung else accuser


def follows_kill(ending: Job, endings: Sequence[Job]) -> bool:
    """Whether a process has failed with an error of its own after the loss of a process that was killed."""
    status = ending.status
    has_own_error = status is not None and status.cause and status.text != ""
    return has_own_error and any(other.was_killed and other.node in ending.losses for other in endings)


def _evidence_on(ending: Job) -> Evidence:
    """Return the evidence that a failed process is the culprit, by its status and the signals of the launcher."""
    if ending.stopped:
        return Evidence.STOPPED_BY_LAUNCHER
    status = ending.status
    # An end without a status, or by `sys.exit` with a number, is weaker than an error: the program may have caught the
    # loss of another process before.
    return Evidence.EXIT if status is None or (status.cause and not status.text) else status.evidence


def launch_exit_code(ending: Job) -> int:
    """Return the exit code of the launch for its culprit.

    That is the code of the culprit, or 128 plus the number of the signal that ended it, as in a shell. If a signal came
    after the status, it is the code in the status. For a process that hung, it is the code of its accuser. A process
    that was missed or has vanished gives 1.
    """
    if ending.missed or ending.vanished:
        return 1
    end = ending.accuser or ending
    returncode = end.returncode or 0
    # a signal came after the status
    if end.status is not None and returncode < 0:
        return end.status.code
    return returncode if returncode >= 0 else 128 - returncode


def culprit_report(ending: Job, *, oom_kills: int = 0, signs: Sequence[str] = (), host: str = "") -> list[str]:
    """Return the lines of the report on the culprit: its error, how it ended, and its last signs of life.

    They are `REPORT_LINES` at most, and one more. The line on the end is left out if the error names the culprit.

    Args:
        ending: The culprit.
        oom_kills: Number of processes that the kernel has killed for lack of memory while the job ran.
        signs: Lines with the last signs of life of a process that sent no status.
        host: Name of the machine, if the job has several; otherwise "".
    """
    status = (ending.accuser or ending).status
    lines = status.text.splitlines() if status else list(ending.tail)
    # whether the process has named its error, by a status or by lines before an exit
    spoke = status is not None or (ending.returncode or 0) > 0
    own_line = find_headline(lines) if spoke and ending.accuser is None else ""
    interrupted = own_line == INTERRUPTED
    if own_line.startswith(_OURS) and not ending.log and not interrupted:  # it names the culprit
        return _cut_middle(lines, REPORT_LINES)
    how = _INTERRUPTED_END if interrupted else _describe_end(ending, oom_kills)
    last = f"{_OURS}{ending.name}{f' on {host}' if host else ''} {how}"
    last += f"; all it printed is in {ending.log}" if ending.log else ""
    if interrupted:
        index = lines.index(INTERRUPTED)
        return _cut_middle([*lines[:index], last, *lines[index + 1 :]], REPORT_LINES)
    return [*_cut_middle(lines, REPORT_LINES - 1 - len(signs)), last, *(f"  {line}" for line in signs)]


def find_headline(lines: Sequence[str]) -> str:
    """Return the last line that is not indented, which names the error; "" if there is none."""
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
    reason = _describe_kill(oom_kills, ending.peak_bytes) if -returncode == signal.SIGKILL else ""
    return f"was killed by {name}{reason}"


def _describe_kill(oom_kills: int, peak_bytes: int) -> str:
    """Return the probable reason of a SIGKILL that the launcher had not sent, as the end of a sentence.

    `oom_kills` counts all kills for lack of memory while the job ran; `peak_bytes` is 0 if unknown.
    """
    used = f", it had {format_bytes(peak_bytes)} at most" if peak_bytes else ""
    if oom_kills:
        return f"; the kernel has killed {oom_kills} here for want of memory{used}: use fewer ranks, or smaller batches"
    return f"; this launcher did not send it: somebody did, or memory ran out{used} (`dmesg` of that machine says)"


def _cut_middle(lines: list[str], most_lines: int) -> list[str]:
    """Return at most `most_lines` lines, shortened: the first have the error, the last the culprit."""
    left_out = len(lines) - most_lines + 1
    if left_out > 1:
        head = most_lines // 2
        lines = [*lines[:head], f"  ... {left_out} lines left out ...", *lines[head + left_out :]]
    return [shorten_line(line, REPORT_COLUMNS) for line in lines]
