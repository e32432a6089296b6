"""Reasons that end an epoch or a run that survives, and the line for the user on the next epoch."""

from __future__ import annotations

from transports import TransportError

from ..errors import OverlapError, PeerLostError, RankFailedError, RemoteError
from ..processes.identity import name_processes
from ..processes.members import MemberLostError
from .agreement import EpochWorld


class EpochClosedError(OverlapError):
    """The others went on without this process, which was stopped or cut off for too long."""


class NotMetError(OverlapError):
    """A process was lost before all processes of a world had met.

    Attributes:
        late: Whether a live process did not join; it is not known which.
    """

    def __init__(self, *, late: bool) -> None:
        super().__init__("a process has not come in time" if late else "a process was lost before all had met")
        self.late = late


_ENDS = (PeerLostError, MemberLostError, TransportError)
_NAMES = {kind.__name__ for kind in (*_ENDS, *TransportError.__subclasses__())}


def is_end(error: Exception) -> bool:
    """Whether an error ends an epoch only: a process or a wire was lost, and no rank has failed."""
    cause = error.cause if isinstance(error, RankFailedError) else error
    return cause.type_name in _NAMES if isinstance(cause, RemoteError) else isinstance(cause, _ENDS)


def describe_new_epoch(before: EpochWorld, after: EpochWorld, reason: str = "") -> str:
    """Return the line for the user on a new epoch.

    Args:
        before: The world that has ended.
        after: The next one.
        reason: Reason of the end; empty where a line must be short.
    """
    lost = [member for member in before.members if member not in after.members]
    ended = f"lost {name_processes(lost) if lost else 'no process'}" + (f": {reason}" if reason else "")
    going = f"going on with {len(after.members)} of {len(before.members)} processes"
    return f"{ended}; {going}" + (f" after step {after.step}" if after.step else "")
