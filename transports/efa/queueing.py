"""How much of what leaves waits in the system: enough to keep a wire busy, and little for others to stand behind.

Between hosts the system queues megabytes on every connection, in the order in which they were written. Priorities hold
among what has not been written yet, so there less is.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from transports.frame import LOCAL_CHUNK_BYTES

# A chunk, which Linux doubles: enough that both processes keep busy (measured: 2.8 GB/s in both directions at 0.4 MB,
# 4.1 GB/s at 4 MB), and little for an urgent frame to stand behind. What the system keeps beside the bytes counts, too:
# with room for that, two chunks leave whole, and who sends need not wake up for the rest of the second (a broadcast of
# 4 MiB among 4 on two cores takes 3.2 ms, not 4.9; 10th percentiles). TCP sizes its buffers itself, but may be told how
# much to hold unsent: with the 16 KiB of Trio's streams a message of 256 KiB left in three parts.
_UNIX_BUFFER_BYTES = LOCAL_CHUNK_BYTES + (64 << 10)
_LOCAL_UNSENT_BYTES = 512 << 10
# 1 ms of a link of 1 Gbit/s: what is on the wire, and what waits for it in the network, is TCP's to say.
_FAR_UNSENT_BYTES = 128 << 10
# What was sent and not acknowledged counts, too. Linux doubles it, for what it keeps beside the bytes. Over 1 Gbit/s a
# training step takes 302 to 314 ms with that, 320 to 324 with the system's buffers and BBR; half of it is as good.
_FAR_BUFFER_BYTES = 512 << 10
# For longer ways that would be less than is under way: these keep the buffers that the system sizes.
_NEAR_S = 0.001
# Inside one host nothing is lost and nothing needs pacing: BBR, which paces segments by a timer, takes 1.5 times as
# long there (64 MiB both ways: 37 ms, not 25). Between near hosts the same timers leave gaps (eight all-reduces of
# 4 MiB at once: 290 ms, not 282). Everything else is the administrator's choice.
_LOCAL_CONGESTION, _NEAR_CONGESTION, _PACING = b"reno", b"cubic", b"bbr"
_WMEM_MAX = Path("/proc/sys/net/core/wmem_max")
# In Linux's `struct tcp_info` (linux/tcp.h): the smoothed round trip, microseconds.
_RTT_US, _LENGTH = 68, 104
_SIOCOUTQ = 0x5411  # linux/sockios.h


def spare(connection: socket.socket) -> None:
    """Bound what waits in a socket that is not connected yet, where only that can be."""
    if connection.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _UNIX_BUFFER_BYTES)


def shorten(connection: socket.socket, report: Callable[[str], None]) -> None:
    """Bound it, most where hosts are near, and choose how congestion is treated; `report` takes what cannot be."""
    if connection.family == socket.AF_UNIX:
        return
    if connection.getsockname()[0] == connection.getpeername()[0]:  # both ends are on this host
        with suppress(OSError, AttributeError):  # not every system has them, and not every user may choose
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _LOCAL_UNSENT_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOCAL_CONGESTION)
    elif _round_trip_s(connection) <= _NEAR_S:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _FAR_UNSENT_BYTES)
        _bound(connection, report)
        _pace_no_more(connection, report)


def unsent_bytes(connection: socket.socket) -> int:
    """Return how much the system has taken that the other end has not acknowledged; 0 where it does not tell."""
    try:
        return int(struct.unpack("=i", fcntl.ioctl(connection, _SIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):  # the latter if it is closed
        return 0


def _round_trip_s(connection: socket.socket) -> float:
    """Return what the system has measured; infinity where it does not tell."""
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        return float(struct.unpack_from("=I", told, _RTT_US)[0]) / 1e6
    except (OSError, AttributeError, struct.error):
        return float("inf")


def _bound(connection: socket.socket, report: Callable[[str], None]) -> None:
    """Fix the send buffer; one that is too short is worse than the one that the system sizes, and cannot be undone."""
    try:
        most = int(_WMEM_MAX.read_text(encoding="ascii"))
        if most >= _FAR_BUFFER_BYTES:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _FAR_BUFFER_BYTES)
            return
        reason = f"net.core.wmem_max is {most}"
    except (OSError, ValueError) as error:
        reason = str(error)
    report(
        f"send buffers stay as the system sizes them, for {_FAR_BUFFER_BYTES} bytes cannot be set ({reason}); "
        "urgent messages may wait longer behind others"
    )


def _pace_no_more(connection: socket.socket, report: Callable[[str], None]) -> None:
    """Leave pacing to the send buffer."""
    try:
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(_PACING):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NEAR_CONGESTION)
    except OSError as error:
        chosen, kept = _NEAR_CONGESTION.decode(), _PACING.decode()
        report(f"TCP keeps congestion control {kept!r}, for {chosen!r} cannot be set ({error.strerror}); it paces more")
