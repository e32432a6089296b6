"""Silence of processes: its limits, and the losses that it means.

A call of C code that keeps the GIL silences every thread of a healthy process; a stopped process is silent in the same
way, and is lost. The kernel of their host reports the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import trio

from ..kernel_facts import ProcessState, process_state
from .link import ControlLink
from .sockets import OUTAGE_S

#: A silence of a lost process, by default.
LOST_AFTER_S = 15.0
#: A silence that is reported.
SUSPECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """Limits of silence: for how long a member may send no sign of life."""

    beat_s: float = 0.5  # Period of the signs of life of each member
    suspect_s: float = SUSPECT_S  # A silence this long is reported, once
    silence_s: float = LOST_AFTER_S  # A silence this long is a loss
    answering_s: float = 300.0  # Its value for another host that answers: as long as a deadlock may last
    outage_s: float = OUTAGE_S  # A host is lost whose kernel acknowledges nothing for so long

    @classmethod
    def of_run(cls, *, lost_after_s: float | None, outage_s: float | None) -> SilenceLimits:
        """Return the limits with the settings of a run, which also limit the silence of a process on another host."""
        if lost_after_s is None:
            return cls(outage_s=outage_s or OUTAGE_S)
        return cls(
            suspect_s=min(SUSPECT_S, lost_after_s / 2),
            silence_s=lost_after_s,
            answering_s=lost_after_s,
            outage_s=outage_s or min(OUTAGE_S, lost_after_s),
        )


async def watch(
    links: Mapping[int, ControlLink],
    patience: SilenceLimits,
    *,
    report: Callable[[str], None],
    lose: Callable[[int, str], None],
    name: Callable[[int], str] = "process {}".format,
) -> None:
    """Report silent members, and lose members that stay silent, unless the kernel reports that they run.

    The kernel of another host cannot be asked. A silent process there has more time while its host answers.

    Time in which this process itself did not run (stopped, swapped out, its loop blocked) is no silence of others:
    their messages wait in the sockets.

    Args:
        links: Links by member, as they are at each beat.
        patience: Limits of a silence.
        report: Prints a line for each silence that is suspect.
        lose: Called with a lost member and the reason.
        name: Names a member for the user.
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
            state = process_state(link.process)
            host = link.answering() if state is ProcessState.ELSEWHERE else ""
            if not link.suspected:
                link.suspected = True
                suspicion = _explain_silence(state, host, patience)
                report(f"{name(member)} has been silent for {patience.suspect_s:g} s: {suspicion}")
            limit_s = patience.answering_s if host else patience.silence_s
            if silent_s >= limit_s and state is not ProcessState.RUNS:
                detail = f"; its host {host} answers" if host else _DETAILS.get(state, "")
                lose(member, f"no sign of life for {limit_s:g} s{detail}")


_DETAILS = {ProcessState.STOPPED: "; it is stopped", ProcessState.GONE: "; it has ended"}


def _explain_silence(state: ProcessState, host: str, patience: SilenceLimits) -> str:
    """Return why a member is probably silent, and how long it is waited for, for a message."""
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
