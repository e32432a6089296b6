"""Identity of a process in its world, and its configuration to join the other processes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from transports.identity import Hello, Identity

from ..errors import OverlapError
from .sockets import OUTAGE_S, Endpoint

#: Detail in the hello of a process that has been in no world yet.
FRESH = "fresh"
#: From the first process to the last; the scheduler of a cluster may start them a while apart.
JOIN_TIMEOUT_S = 60.0
#: Epochs of one attempt of a job: more worlds than one program runs.
WORLDS = 1 << 20

_NAMED_LIMIT = 16

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


class JoinError(OverlapError):
    """The world did not start, or not with this process.

    Attributes:
        missing: Members that had not joined, as far as this process knows.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        self.missing: tuple[int, ...] = tuple(missing)
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig(Identity):
    """Configuration of a process that joins a world."""

    endpoint: Endpoint  # Where the host listens
    # Whether this process has been in no world yet, and so may join any attempt of the job; a process of an earlier
    # attempt that has been in a world is refused.
    fresh: bool = False
    detail: str = ""  # Must be the same on all members: cluster, ranks, and other settings that must agree
    # On the host, a socket that listens at the endpoint already. The caller owns it; it becomes non-blocking.
    listener: socket.socket | None = None
    timeout_s: float = JOIN_TIMEOUT_S  # How long to wait for all to join
    progress_s: float = 5.0  # Time between reports of missing members
    patience: SilenceLimits = field(default_factory=SilenceLimits)  # How long a member may be silent
    # Name of this process by `kernel_facts.process_identity`; empty: other processes of this host cannot ask the kernel
    # whether it runs while it is silent.
    process: str = ""
    ranks_each: int = 0  # Ranks of each process, for messages; 0: unknown

    @property
    def greeting(self) -> Hello:
        """The introduction of this process to the others."""
        return self.hello("member", FRESH if self.fresh else "")

    def name_absent(self, missing: Sequence[int], departed: Sequence[int]) -> str:
        """Name the members that did not join in time; one that had joined, and gave up waiting, is not to blame."""
        never = [member for member in missing if member not in departed]
        absent = f"{name_processes(never)} did not join within {self.timeout_s:g} s"
        left = f"{name_processes(departed)} had joined, and went away before all were there"
        return "; ".join([*([absent] if never else []), *([left] if departed else [])])

    def name(self, member: int) -> str:
        """Name a member, and its ranks if they are known."""
        first, last = member * self.ranks_each, (member + 1) * self.ranks_each - 1
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        return f"process {member} ({ranks})" if self.ranks_each else f"process {member}"


def name_epoch(epoch: int) -> str:
    """Return an epoch in words: the number of the world, and of the attempt unless it is the first.

    >>> name_epoch(3), name_epoch(2 * WORLDS)
    ('3', '0 of restart 2')
    """
    restart, world = divmod(epoch, WORLDS)
    return f"{world} of restart {restart}" if restart else str(world)


def name_processes(members: Sequence[int]) -> str:
    """Name processes in a few words.

    >>> name_processes([3]), name_processes([3, 7]), name_processes(range(1, 20))[-21:]
    ('process 3', 'processes 3, 7', '14, 15, 16 and 3 more')
    """
    named = ", ".join(map(str, members[:_NAMED_LIMIT]))
    more = f" and {len(members) - _NAMED_LIMIT} more" if len(members) > _NAMED_LIMIT else ""
    return f"process{'es' if len(members) > 1 else ''} {named}{more}"
