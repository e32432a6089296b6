"""Whether what a TCP connection has sent arrives: what the kernel at the other end says, whatever its process does."""

from __future__ import annotations

import socket
import struct

__all__ = ["LOST_S", "unacknowledged_s"]

#: A kernel answers within a round trip, also for a process that is busy; a link that was down for so long is lost. What
#: was under way is sent again after 3 s for the last time before that, and next after 6 s (RFC 6298, from 0.2 s).
LOST_S = 4.0

# In Linux's `struct tcp_info` (linux/tcp.h, appended to and never changed): segments under way, and milliseconds since
# anything was acknowledged.
_UNACKNOWLEDGED, _SINCE_MS, _LENGTH = 24, 56, 104


def unacknowledged_s(connection: socket.socket) -> float:
    """Return for how many seconds nothing was acknowledged of what is under way; 0 where the system does not tell.

    A receiver that reads nothing closes its window, so that nothing is under way, and acknowledges probes of it. That
    is why TCP_USER_TIMEOUT will not do: it counts a closed window like a broken link (measured on Linux 6: a receiver
    that was busy for longer lost its connection).
    """
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        under_way, since_ms = (struct.unpack_from("=I", told, at)[0] for at in (_UNACKNOWLEDGED, _SINCE_MS))
    except (OSError, struct.error):
        return 0.0
    return since_ms / 1000 if under_way else 0.0
