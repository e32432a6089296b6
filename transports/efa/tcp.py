"""TCP socket options, connection state as the kernel reports it, and adaptation to lossy networks.

Between hosts the system queues megabytes on every connection, in the order in which they were written. Priorities hold
among bytes that have not been written yet, so a connection between near hosts queues less.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from transports.frame import LOCAL_CHUNK_BYTES
from transports.meeting import keep_alive

#: A link is lost after this long without an answer of the kernel, which answers for busy processes, too. TCP
#: sends bytes under way again after 3 s for the last time before that, and next after 6 s (RFC 6298, from 0.2 s).
LOST_S = 4.0


# A chunk, which Linux doubles: enough that both processes keep busy (measured: 2.8 GB/s in both directions at 0.4 MB,
# 4.1 GB/s at 4 MB), and little for an urgent frame to stand behind. The system's own records of the bytes count, too:
# with room for them, two chunks leave whole, and the sender need not wake up for the rest of the second (a broadcast of
# 4 MiB among 4 on two cores takes 3.2 ms, not 4.9; 10th percentiles). TCP sizes its buffers itself, but may be told how
# much to hold unsent: with the 16 KiB of Trio's streams a message of 256 KiB left in three parts.
_UNIX_BUFFER_BYTES = LOCAL_CHUNK_BYTES + (64 << 10)
_LOCAL_UNSENT_BYTES = 512 << 10
# 1 ms of a link of 1 Gbit/s; TCP itself bounds the bytes on the wire and in the queues of the network.
_FAR_UNSENT_BYTES = 128 << 10
# Sent bytes that are not acknowledged count, too. Linux doubles it for its own records. Over 1 Gbit/s a training
# step takes 302 to 314 ms with that, 320 to 324 with the system's buffers and BBR; half of it is as good.
_FAR_BUFFER_BYTES = 512 << 10
# Longest round trip of a near host. Farther connections have more bytes under way, and keep the system's buffers.
_NEAR_S = 0.001
# Inside one host nothing is lost and nothing needs pacing: BBR, which paces segments by a timer, takes 1.5 times as
# long there (64 MiB both ways: 37 ms, not 25). Between near hosts the same timers leave gaps (eight all-reduces of
# 4 MiB at once: 290 ms, not 282). Everything else is the administrator's choice.
_LOCAL_CONGESTION, _NEAR_CONGESTION, _PACING = b"reno", b"cubic", b"bbr"
_WMEM_MAX = Path("/proc/sys/net/core/wmem_max")
_SIOCOUTQ = 0x5411  # linux/sockios.h

# A network counts as lossy after this share of repeated segments, in this many samples in a row (one a second) of at
# least so many segments. Queues that overflow lose a thousandth, or much of one burst, but not that often in a row.
_LOSSY_SHARE, _LOSSY_SAMPLES, _LEAST_SEGMENTS = 0.03, 3, 100
# TCP waits 200 ms before it sends the last segments of a message again, and twice as long each time that these are
# lost, too; and cubic takes every loss for a queue that is full. That is where the time goes: with a tenth lost on
# 1 Gbit/s, two bare sockets that exchange 1 MiB both ways take 5 to 7 s so, 1 to 6 s with BBR, 0.1 to 0.4 s with both.
_LOSSY_CONGESTION = b"bbr"
# linux/tcp.h, since Linux 6.15; Python has no names for them.
_RTO_MAX_MS, _RTO_MIN_US = 44, 45
_LONGEST_MS, _SHORTEST_US = 1000, 10_000


# -- the state of a connection ----------------------------------------------------------------------------------------

# In Linux's `struct tcp_info` (linux/tcp.h, appended to and never changed): keepalive probes that were not answered,
# segments under way, milliseconds since an acknowledgement, the smoothed round trip in microseconds, segments that were
# sent again, segments with data that were sent in all, and those of them of which the receiver said that it had them.
_INFO = struct.Struct("=3xB20xI28xI8xI28xI52xI56xI")


class TcpInfo(NamedTuple):
    """The state of a connection, as the kernel reports it."""

    under_way: bool  # something was sent that has not been acknowledged, or could not be, as no device is up
    since_ack_s: float  # time since the last acknowledgement
    round_trip_s: float
    sent_segments: int  # since the connection began
    repeated_segments: int  # without needless repetitions


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """Return the state of a connection from the kernel; None if unsupported, and for Unix sockets.

    A receiver that reads nothing closes its window, so that nothing is under way, and acknowledges probes of it. That
    is why TCP_USER_TIMEOUT will not do: it counts a closed window like a broken link (measured on Linux 6: a receiver
    that was busy for longer lost its connection). Where this side's own device takes nothing, as it is down, nothing is
    under way either, but probes are not answered.
    """
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return None
    unpacked = _INFO.unpack(info.ljust(_INFO.size, b"\0"))
    probes, under_way, since_ms, round_trip_us, again, sent, needless = unpacked
    repeated = max(0, again - needless)
    return TcpInfo(under_way > 0 or probes > 0, since_ms / 1000, round_trip_us / 1e6, sent, repeated)


def unsent_bytes(connection: socket.socket) -> int:
    """Return the bytes that the other end has not acknowledged; 0 if unsupported."""
    try:
        return int(struct.unpack("=i", fcntl.ioctl(connection, _SIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):  # the latter if it is closed
        return 0


class Health:
    """The health of one connection: whether its bytes are acknowledged, and how many are lost."""

    __slots__ = ("_lossy_samples", "_repeated_segments", "_reported", "_sent_segments", "_waiting_since_s")

    def __init__(self) -> None:
        self._waiting_since_s: float | None = None  # when bytes under way were first seen, or last acknowledged since
        self._sent_segments = self._repeated_segments = self._lossy_samples = 0
        self._reported = False

    def unacknowledged_s(self, seen: TcpInfo | None, now_s: float) -> float:
        """Return the seconds without an acknowledgement of bytes under way.

        The system reports the time of the last acknowledgement, not the start of the wait for the next one: after a
        pause, bytes that have just left would seem to wait since before it. So the wait begins when it is first seen.

        Args:
            seen: The state of the connection now.
            now_s: Seconds on a clock that does not go back.
        """
        if seen is None or not seen.under_way:
            self._waiting_since_s = None
        elif self._waiting_since_s is None or now_s - seen.since_ack_s > self._waiting_since_s:
            self._waiting_since_s = now_s
        return 0.0 if self._waiting_since_s is None else now_s - self._waiting_since_s

    def record_losses(self, connection: socket.socket, seen: TcpInfo | None) -> str:
        """Adapt TCP to a network that loses many segments; return a message for people once, and "" otherwise.

        Args:
            connection: The connection.
            seen: State of the connection now.
        """
        if self._reported or seen is None or seen.sent_segments - self._sent_segments < _LEAST_SEGMENTS:
            return ""
        share = (seen.repeated_segments - self._repeated_segments) / (
            seen.sent_segments - self._sent_segments
        )  # below 0 when assumed losses turn out to be false
        self._sent_segments, self._repeated_segments = seen.sent_segments, seen.repeated_segments
        self._lossy_samples = self._lossy_samples + 1 if share >= _LOSSY_SHARE else 0
        if self._lossy_samples < _LOSSY_SAMPLES:
            return ""
        self._reported = True
        return f"loses packets: {share:.0%} of them are sent again{_adapt_to_losses(connection)}"


def _adapt_to_losses(connection: socket.socket) -> str:
    """Set the available and permitted options for lossy networks; return a description of them."""
    descriptions = []
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOSSY_CONGESTION)
        descriptions.append(f"by {_LOSSY_CONGESTION.decode()}")
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MIN_US, _SHORTEST_US)
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _LONGEST_MS)
        descriptions.append(f"after {_SHORTEST_US / 1000:g} ms")
    return f", from now on {' and '.join(descriptions)}" if descriptions else ""


# -- options ----------------------------------------------------------------------------------------------------------


def set_options(connection: socket.socket, silence_s: float | None) -> None:
    """Set the options of a socket that is not connected yet, or just now: small buffers, keepalive, no delay.

    Args:
        connection: The socket.
        silence_s: How long TCP waits for an answer, or until a receiver reads; None: as long as the system does.
    """
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _UNIX_BUFFER_BYTES)
        return
    keep_alive(connection.setsockopt, LOST_S, silence_s)


def bound_queue(connection: socket.socket, report: Callable[[str], None]) -> None:
    """Bound the queue of a connected socket, most where hosts are near, and choose its congestion control.

    Args:
        connection: The socket.
        report: Prints a line about each option that cannot be set.
    """
    if connection.family == socket.AF_UNIX:
        return
    if connection.getsockname()[0] == connection.getpeername()[0]:  # both ends are on this host
        with suppress(OSError, AttributeError):  # some systems lack the options, or do not permit them
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _LOCAL_UNSENT_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOCAL_CONGESTION)
    elif (seen := tcp_info(connection)) is not None and seen.round_trip_s <= _NEAR_S:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _FAR_UNSENT_BYTES)
        _bound_send_buffer(connection, report)
        _stop_pacing(connection, report)


def _bound_send_buffer(connection: socket.socket, report: Callable[[str], None]) -> None:
    """Fix the size of the send buffer, unless the system would make it smaller than asked for."""
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


def _stop_pacing(connection: socket.socket, report: Callable[[str], None]) -> None:
    """Replace a congestion control that paces by timers; the short send buffer paces enough."""
    try:
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(_PACING):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NEAR_CONGESTION)
    except OSError as error:
        near, pacing = _NEAR_CONGESTION.decode(), _PACING.decode()
        report(f"TCP keeps congestion control {pacing!r}, for {near!r} cannot be set ({error.strerror}); it paces more")
