"""Signs of ended processes, ranked by their evidence, not by time: they show which process ended a job. Pure.

A process whose peer has failed ends with an error too, often earlier than the one at fault. So the launcher, the
control plane and the readers of flight records rank what they know of each process, and the strongest evidence counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Evidence(IntEnum):
    """Evidence that a process is at fault, the strongest first."""

    OWN_ERROR = 0  #: An error that began in this process
    EXIT = 1  #: It has ended without a report: killed, or by `os._exit`
    LINK_ENDED = 2  #: Its connection to the control plane has ended
    SILENT = 3  #: It has sent no sign of life for too long
    WIRE_BROKEN = 4  #: A wire to it broke; its other end may have ended first
    REPORTED = 5  #: It has ended because of another process, which it may name
    STOPPED_BY_LAUNCHER = 6  #: Its launcher had to stop it

    @property
    def patience_s(self) -> float:
        """Seconds to wait for stronger evidence before this evidence counts.

        If a process ends, its report or the stronger `LINK_ENDED` follows in milliseconds, on a machine with ten busy
        threads a core in up to a second.
        """
        return {Evidence.WIRE_BROKEN: 2.0, Evidence.REPORTED: 0.5}.get(self, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Evidence on one process at the end of a job."""

    process: int  # Index of the process
    evidence: Evidence
    rank: int | None = None  # World rank at fault, if it is known
    text: str = ""  # The error in one line
    at_ns: int = 0  # Instant of the sign, on any clock that all compared signs share


def culprit(signs: Iterable[Sign]) -> Sign | None:
    """Return the strongest sign, of equally strong ones the earliest: its process ended the job. None without signs."""
    return min(signs, key=lambda sign: (sign.evidence, sign.at_ns), default=None)
