"""Whether what a TCP connection has sent arrives: what the kernel at the other end says, whatever its process does."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

#: A kernel answers within a round trip, also for a process that is busy; a link that was down for so long is lost. What
#: was under way is sent again after 3 s for the last time before that, and next after 6 s (RFC 6298, from 0.2 s).
LOST_S = 4.0

# In Linux's `struct tcp_info` (linux/tcp.h, appended to and never changed): probes that were not answered, segments
# under way, and milliseconds since anything was acknowledged.
_PROBES, _UNACKNOWLEDGED, _SINCE_MS, _LENGTH = 3, 24, 56, 104


class Look(NamedTuple):
    """What is seen of a connection at one moment."""

    under_way: bool  # Whether something was sent that has not been acknowledged, or could not be, as no device is up
    since_s: float  # How long ago anything was


_NOTHING = Look(under_way=False, since_s=0.0)


def look(connection: socket.socket) -> Look:
    """Ask the system; where it does not tell, nothing is under way.

    A receiver that reads nothing closes its window, so that nothing is under way, and acknowledges probes of it. That
    is why TCP_USER_TIMEOUT will not do: it counts a closed window like a broken link (measured on Linux 6: a receiver
    that was busy for longer lost its connection). Where this side's own device takes nothing, as it is down, nothing is
    under way either, but probes are not answered.
    """
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return _NOTHING
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        under_way, since_ms = (struct.unpack_from("=I", told, at)[0] for at in (_UNACKNOWLEDGED, _SINCE_MS))
    except (OSError, struct.error):
        return _NOTHING
    return Look(under_way > 0 or told[_PROBES] > 0, since_ms / 1000)


class Flight:
    """What a connection has under way, looked at from time to time.

    The system tells when it last heard an acknowledgement, not when it began to wait for the next: after a pause, what
    has just left would count as waiting since before the pause. So waiting begins when it is first seen.
    """

    def __init__(self) -> None:
        self._seen_s: float | None = None

    def unacknowledged_s(self, seen: Look, now_s: float) -> float:
        """Return for how many seconds nothing has been acknowledged of what is under way.

        Args:
            seen: What the connection is like now.
            now_s: Seconds on a clock that does not go back.
        """
        if not seen.under_way:
            self._seen_s = None
        elif self._seen_s is None or now_s - seen.since_s > self._seen_s:
            self._seen_s = now_s
        return 0.0 if self._seen_s is None else now_s - self._seen_s
