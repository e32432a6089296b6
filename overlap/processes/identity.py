"""Identity of a process in its world, and its configuration to join the other processes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from transports.identity import Hello, Identity

from ..errors import OverlapError
from ..ranklist import named_ranks
from .sockets import OUTAGE_S, Endpoint

#: Detail in the hello of a process that has been in no world yet.
FRESH = "fresh"
#: Longest time from the start of the first process to that of the last one, by default.
JOIN_TIMEOUT_S = 60.0
#: Number of epochs of one attempt of a job: epoch = attempt * WORLDS + number of the world in the attempt.
WORLDS = 1 << 20

_NAMED_LIMIT = 16

#: A process that is silent for this long counts as lost, by default.
LOST_AFTER_S = 15.0
#: A silence of this length is reported, by default.
SUSPECT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceLimits:
    """Limits of silence: for how long a member may send no sign of life."""

    beat_s: float = 0.5  # Period of the signs of life of each member
    suspect_s: float = SUSPECT_S  # A silence of this length is reported, once
    silence_s: float = LOST_AFTER_S  # After a silence of this length a member counts as lost
    answering_s: float = 300.0  # The same for a member on another host whose kernel answers
    outage_s: float = OUTAGE_S  # A connection breaks if the other host's kernel acknowledges nothing for this long

    @classmethod
    def of_run(cls, *, lost_after_s: float | None, outage_s: float | None) -> SilenceLimits:
        """Return the limits for a run.

        Args:
            lost_after_s: Seconds of silence after which a process counts as lost, also on another host that answers;
                None: the defaults.
            outage_s: Longest outage of the network; None: the default, or `lost_after_s` if that is shorter.
        """
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

    Args:
        message: The error message.
        missing: Members that had not joined, as far as this process knows.

    Attributes:
        missing: The members of the arguments.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        self.missing: tuple[int, ...] = tuple(missing)
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig(Identity):
    """Configuration of a process that joins a world."""

    endpoint: Endpoint  # Host and port where member 0 listens
    # Whether this process may join any attempt of the job, because it has been in no world yet. A process that has been
    # in a world of an earlier attempt is refused.
    fresh: bool = False
    detail: str = ""  # Must be the same on all members: cluster, ranks, and other settings that must agree
    # On member 0, a socket that listens at the endpoint already. The caller owns it; it becomes non-blocking.
    listener: socket.socket | None = None
    timeout_s: float = JOIN_TIMEOUT_S  # How long to wait for all to join
    progress_s: float = 5.0  # Time between reports of missing members
    patience: SilenceLimits = field(default_factory=SilenceLimits)  # How long a member may be silent
    # Identity of this process from `kernel_facts.process_identity`, by which other processes of this host ask the
    # kernel for its state while it is silent; "": they cannot.
    process: str = ""
    ranks_each: int = 0  # Ranks of each process, for messages; 0: unknown

    @property
    def greeting(self) -> Hello:
        """The hello with which this process introduces itself to the other processes."""
        return self.make_hello("member", FRESH if self.fresh else "")

    def format_absent_members(self, missing: Sequence[int], departed: Sequence[int]) -> str:
        """Return why not all members have joined, as text.

        Args:
            missing: Members that are not connected at the time limit.
            departed: Missing members that had joined, and gave up waiting. They are named apart, as not at fault.
        """
        never = [member for member in missing if member not in departed]
        sentences = [f"{format_processes(never)} did not join within {self.timeout_s:g} s"] if never else []
        if departed:
            sentences.append(f"{format_processes(departed)} had joined, and went away before all were there")
        return "; ".join(sentences)

    def format_member(self, member: int) -> str:
        """Return the name of a member for messages, such as "process 1 (ranks 2-3)"; without ranks if unknown."""
        # empty if the number of ranks is unknown
        ranks = range(member * self.ranks_each, (member + 1) * self.ranks_each)
        return f"process {member} ({named_ranks(ranks)})" if ranks else f"process {member}"


def format_epoch(epoch: int) -> str:
    """Return an epoch as text: the number of the world, and the number of the attempt unless it is the first.

    >>> format_epoch(3), format_epoch(2 * WORLDS)
    ('3', '0 of restart 2')
    """
    restart, world = divmod(epoch, WORLDS)
    return f"{world} of restart {restart}" if restart else str(world)


def format_processes(members: Sequence[int]) -> str:
    """Return a short text that names processes.

    >>> format_processes([3]), format_processes([3, 7]), format_processes(range(1, 20))[-21:]
    ('process 3', 'processes 3, 7', '14, 15, 16 and 3 more')
    """
    named = ", ".join(map(str, members[:_NAMED_LIMIT]))
    more = f" and {len(members) - _NAMED_LIMIT} more" if len(members) > _NAMED_LIMIT else ""
    return f"process{'es' if len(members) > 1 else ''} {named}{more}"
