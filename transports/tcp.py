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

import trio

from transports.frame import LOCAL_CHUNK_BYTES
from transports.meeting import set_keep_alive_options

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
_NEAR_UNSENT_BYTES = 128 << 10
# Sent bytes that are not acknowledged count, too. Linux doubles it for its own records. Over 1 Gbit/s a training
# step takes 302 to 314 ms with that, 320 to 324 with the system's buffers and BBR; half of it is as good.
_NEAR_BUFFER_BYTES = 512 << 10
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

# Fields of Linux's `struct tcp_info` (linux/tcp.h, which only grows at its end): unanswered keepalive probes, segments
# under way, milliseconds since the last acknowledgement, the smoothed round trip in microseconds, segments sent again,
# all segments with data that were sent, and segments that were sent again although the receiver had them.
_INFO = struct.Struct("=3xB20xI28xI8xI28xI52xI56xI")


class TcpInfo(NamedTuple):
    """The state of a connection, as the kernel reports it."""

    under_way: bool  # Whether data or a keepalive probe was sent that has not been acknowledged
    since_ack_s: float  # Time since the last acknowledgement
    round_trip_s: float  # Smoothed round trip
    sent_segments: int  # Segments with data since the connection began, with those sent again
    repeated_segments: int  # Segments sent again, without those that the receiver already had


def tcp_info(connection: socket.socket | trio.socket.SocketType) -> TcpInfo | None:
    """Return the state of a TCP connection as the kernel reports it; None for Unix sockets, and if unsupported.

    Callers use this to tell a dead peer from a busy one. The option TCP_USER_TIMEOUT cannot: it also breaks the
    connection of a receiver that is only busy. Such a receiver has closed its window, so that nothing is under way, and
    its kernel answers probes. If the network device of this side is down, nothing is under way either, but probes are
    not answered.
    """
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return None
    unpacked = _INFO.unpack(info.ljust(_INFO.size, b"\0"))
    unanswered_probes, under_way, since_ack_ms, round_trip_us, repeated, sent, needless = unpacked
    return TcpInfo(
        under_way=under_way > 0 or unanswered_probes > 0,
        since_ack_s=since_ack_ms / 1000,
        round_trip_s=round_trip_us / 1e6,
        sent_segments=sent,
        repeated_segments=max(0, repeated - needless),
    )


def unsent_bytes(connection: socket.socket) -> int:
    """Return the number of written bytes that the other end has not acknowledged; 0 if unsupported."""
    try:
        return int(struct.unpack("=i", fcntl.ioctl(connection, _SIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):  # the latter if it is closed
        return 0


class Health:
    """The health of one connection: whether its bytes are acknowledged, and how many are lost."""

    def __init__(self) -> None:
        self._waiting_since_s: float | None = None  # when bytes under way were first seen, or last acknowledged since
        self._sent_segments = self._repeated_segments = self._lossy_samples = 0
        self._reported = False

    def unacknowledged_s(self, seen: TcpInfo | None, now_s: float) -> float:
        """Return for how many seconds bytes under way have waited for an acknowledgement; 0 if none are under way.

        The kernel reports the time since the last acknowledgement. After a pause that time is long, even for bytes that
        have just left. So the wait is counted from the call that sees it first.

        Args:
            seen: The state of the connection now; None: unknown.
            now_s: Seconds on a clock that does not go back.
        """
        if seen is None or not seen.under_way:
            self._waiting_since_s = None
        # a wait begins here: the first one, or another one, because bytes were acknowledged after `_waiting_since_s`
        elif self._waiting_since_s is None or now_s - seen.since_ack_s > self._waiting_since_s:
            self._waiting_since_s = now_s
        return 0.0 if self._waiting_since_s is None else now_s - self._waiting_since_s

    def record_losses(self, connection: socket.socket, seen: TcpInfo | None) -> str:
        """Count lost segments since the last call; after several lossy calls in a row, adapt TCP to losses, once.

        Args:
            connection: The connection.
            seen: State of the connection now; None: unknown.

        Returns:
            When TCP is adapted, a text for the user about the losses; otherwise "".
        """
        if self._reported or seen is None or (sent := seen.sent_segments - self._sent_segments) < _LEAST_SEGMENTS:
            return ""
        # below 0 when assumed losses turn out to be false
        share = (seen.repeated_segments - self._repeated_segments) / sent
        self._sent_segments, self._repeated_segments = seen.sent_segments, seen.repeated_segments
        self._lossy_samples = self._lossy_samples + 1 if share >= _LOSSY_SHARE else 0
        if self._lossy_samples < _LOSSY_SAMPLES:
            return ""
        self._reported = True
        return f"loses packets: {share:.0%} of them are sent again{_adapt_to_losses(connection)}"


def _adapt_to_losses(connection: socket.socket) -> str:
    """Set the options for lossy networks that the system permits; return the end of a sentence on them, or ""."""
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


def prepare_socket(connection: socket.socket, silence_s: float | None) -> None:
    """Make a socket non-blocking, and set its options, before it is connected or right after.

    A Unix socket gets small buffers. A TCP socket sends short messages at once, and probes idle connections.

    Args:
        connection: The socket.
        silence_s: How long TCP waits for an acknowledgement, or until the receiver reads; None: the system's default.
    """
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _UNIX_BUFFER_BYTES)
        return
    set_keep_alive_options(connection.setsockopt, LOST_S, silence_s)


def tune_connection(connection: socket.socket, report: Callable[[str], None]) -> None:
    """Tune a connected socket for the distance of its ends.

    Inside a host, the bytes that the system holds unsent are bounded, and the congestion control is chosen. Between
    near hosts, with a round trip of up to 1 ms, these bytes and the send buffer are bounded, and pacing is stopped.
    Connections to farther hosts, and Unix sockets, stay as they are.

    Args:
        connection: The socket.
        report: Prints a line about each option between near hosts that cannot be set; inside a host none is printed.
    """
    if connection.family == socket.AF_UNIX:
        return
    if connection.getsockname()[0] == connection.getpeername()[0]:  # both ends are on this host
        with suppress(OSError, AttributeError):  # some systems lack the options, or do not permit them
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _LOCAL_UNSENT_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOCAL_CONGESTION)
    elif (seen := tcp_info(connection)) is not None and seen.round_trip_s <= _NEAR_S:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NEAR_UNSENT_BYTES)
        _limit_send_buffer(connection, report)
        _stop_pacing(connection, report)


def _limit_send_buffer(connection: socket.socket, report: Callable[[str], None]) -> None:
    """Set the size of the send buffer; if the system's limit is lower, leave it unchanged, and report that."""
    try:
        most = int(_WMEM_MAX.read_text(encoding="ascii"))
        if most >= _NEAR_BUFFER_BYTES:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BUFFER_BYTES)
            return
        reason = f"net.core.wmem_max is {most}"
    except (OSError, ValueError) as error:
        reason = str(error)
    fact = f"send buffers stay as the system sizes them, for {_NEAR_BUFFER_BYTES} bytes cannot be set ({reason})"
    report(f"{fact}; urgent messages may wait longer behind others")


def _stop_pacing(connection: socket.socket, report: Callable[[str], None]) -> None:
    """Replace a congestion control that paces segments by timers; with a short send buffer no pacing is needed."""
    try:
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(_PACING):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NEAR_CONGESTION)
    except OSError as error:
        near, pacing = _NEAR_CONGESTION.decode(), _PACING.decode()
        report(f"TCP keeps congestion control {pacing!r}, for {near!r} cannot be set ({error.strerror}); it paces more")
