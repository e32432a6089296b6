"""Silence of processes: how long one may last, and the state that the kernel of its host reports.

A call of C code that keeps the GIL silences every thread of a process, and yet it is healthy; a stopped process is
silent in the same way and is lost. The kernel of the host on which both live can tell them apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache

import trio

from ..kernel_facts import PROC, stat_of
from .link import ControlLink
from .sockets import OUTAGE_S

#: A process that is silent for so long counts as lost, unless a run says otherwise.
LOST_AFTER_S = 15.0
#: A silence that is reported.
SUSPECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """Limits of silence: for how long a member may give no sign of life."""

    beat_s: float = 0.5  # Every member gives a sign of life this often
    suspect_s: float = SUSPECT_S  # A silence this long is reported, once
    silence_s: float = LOST_AFTER_S  # A silence this long is a loss
    answering_s: float = 300.0  # As `silence_s`, on another host that answers; as long as a deadlock may last
    outage_s: float = OUTAGE_S  # A host from which not even its kernel's acknowledgements arrive for so long is lost

    @classmethod
    def given(cls, *, lost_after_s: float | None, outage_s: float | None) -> SilenceLimits:
        """Return the limits with those that a run gives; a process on another host gets no longer then."""
        if lost_after_s is None:
            return cls(outage_s=outage_s or OUTAGE_S)
        return cls(
            suspect_s=min(SUSPECT_S, lost_after_s / 2),
            silence_s=lost_after_s,
            answering_s=lost_after_s,
            outage_s=outage_s or min(OUTAGE_S, lost_after_s),
        )


class ProcessState(Enum):
    """State of a process, as its kernel reports it."""

    RUNS = "runs"
    STOPPED = "stopped"
    GONE = "gone"
    ELSEWHERE = "elsewhere"  # an id of another kernel's process
    UNKNOWN = "unknown"


def identity(pid: int | None = None) -> str:
    """Name a process, by default this one, so that any other on its host can find it; empty if the system cannot."""
    try:
        number = os.getpid() if pid is None else pid
        return f"{_host()} {number} {stat_of(number)[1]}"
    except (OSError, ValueError, IndexError):
        return ""


def state_of(name: str) -> ProcessState:
    """Return the state of a process that was named by `identity`; `ELSEWHERE` for one of another host."""
    host, pid, began = name.split(" ") if name.count(" ") == 2 else ("", "", "")
    if not pid.isdecimal():
        return ProcessState.UNKNOWN
    if host != _host():
        return ProcessState.ELSEWHERE
    try:
        letter, started = stat_of(int(pid))
    except FileNotFoundError:
        return ProcessState.GONE
    except (OSError, ValueError, IndexError):
        return ProcessState.UNKNOWN
    if started != began or letter in "ZX":
        return ProcessState.GONE
    return ProcessState.STOPPED if letter == "T" else ProcessState.RUNS


@cache
def _host() -> str:
    """Name the kernel and the namespace in which process ids count."""
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(PROC / 'self/ns/pid')}"
    return "?"


async def watch(
    links: Mapping[int, ControlLink],
    patience: SilenceLimits,
    *,
    report: Callable[[str], None],
    lose: Callable[[int, str], None],
    name: Callable[[int], str] = "process {}".format,
) -> None:
    """Report members that are silent, and lose those that stay so, unless their kernel says that they run.

    The kernel of another host cannot be asked. A silent process there is given longer while its host answers.

    Time in which this process itself did not run (stopped, swapped out, its loop blocked) is not counted as a silence
    of others: what they said then waits in the sockets.

    Args:
        links: By member; read anew on every beat.
        patience: How long is too long.
        report: Gets one line for each silence that is suspect.
        lose: Gets the member, and what to call the reason.
        name: Names a member to the user.
    """
    while True:
        due_s = trio.current_time() + patience.beat_s
        await trio.sleep_until(due_s)
        now_s = trio.current_time()
        for member, link in list(links.items()):
            link.last_received_s += now_s - due_s
            silent_s = now_s - link.last_received_s
            if link.over or silent_s < patience.suspect_s:
                continue
            state = state_of(link.process)
            host = link.answering() if state is ProcessState.ELSEWHERE else ""
            if not link.suspected:
                link.suspected = True
                suspicion = _suspicion(state, host, patience)
                report(f"{name(member)} has been silent for {patience.suspect_s:g} s: {suspicion}")
            limit_s = patience.answering_s if host else patience.silence_s
            if silent_s >= limit_s and state is not ProcessState.RUNS:
                known = f"; its host {host} answers" if host else _KNOWN.get(state, "")
                lose(member, f"no sign of life for {limit_s:g} s{known}")


_KNOWN = {ProcessState.STOPPED: "; it is stopped", ProcessState.GONE: "; it has ended"}


def _suspicion(state: ProcessState, host: str, patience: SilenceLimits) -> str:
    if state is ProcessState.RUNS:
        return "it runs, but a call in it keeps the GIL; it is waited for"
    if host:
        why = f"its host {host} answers: it is stopped, or a call in it keeps the GIL"
        return f"{why}; it is waited for, and counts as lost after {patience.answering_s:g} s"
    lost = f"it counts as lost after {patience.silence_s:g} s"
    return f"{_SUSPECTED[state]}; {lost}"


_SUSPECTED = {
    ProcessState.STOPPED: "it is stopped",
    ProcessState.GONE: "it has ended, and something else keeps its connection",
    ProcessState.ELSEWHERE: "it may be stopped, or in a call that keeps the GIL, or its host is gone",
    ProcessState.UNKNOWN: "it may be stopped, or in a call that keeps the GIL",
}
