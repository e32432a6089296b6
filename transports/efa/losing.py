"""Whether a TCP connection loses much of what it sends, and what is done about that."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import NamedTuple

# In Linux's `struct tcp_info` (linux/tcp.h): segments sent again, and segments with data sent in all.
_AGAIN, _SENT, _LENGTH = 100, 156, 160
# Queues that overflow lose a thousandth, or much of one burst. Whoever looks every second sees more than that three
# times in a row only where the way itself loses.
_MUCH, _LOOKS, _LEAST_SEGMENTS = 0.03, 3, 100
# TCP waits 200 ms before it sends the last segments of a message again, and twice as long each time that these are
# lost, too; and cubic takes every loss for a queue that is full. That is where the time goes: with a tenth lost on
# 1 Gbit/s, two bare sockets that exchange 1 MiB both ways take 5 to 7 s so, 1 to 6 s with BBR, 0.1 to 0.4 s with both.
_LOSSY_CONGESTION = b"bbr"
# linux/tcp.h, since Linux 6.15; Python has no names for them.
_RTO_MAX_MS, _RTO_MIN_US = 44, 45
_LONGEST_MS, _SHORTEST_US = 1000, 10_000


class Segments(NamedTuple):
    """What a connection has sent since it began, and how much of that for another time."""

    sent: int
    again: int


def segments(connection: socket.socket) -> Segments | None:
    """Ask the system; None where it does not tell."""
    if connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
        return None
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        return Segments(*(int(struct.unpack_from("=I", told, at)[0]) for at in (_SENT, _AGAIN)))
    except (OSError, struct.error):
        return None


class Losses:
    """What a connection loses, looked at from time to time."""

    __slots__ = ("_before", "_in_a_row", "_known")

    def __init__(self) -> None:
        self._before, self._in_a_row, self._known = Segments(0, 0), 0, False

    def look(self, connection: socket.socket, seen: Segments | None) -> str:
        """Let TCP take losses for what they are once there are many; return what to say of it then, else nothing.

        Args:
            connection: Which.
            seen: What it has sent by now.
        """
        if self._known or seen is None or seen.sent - self._before.sent < _LEAST_SEGMENTS:
            return ""
        share = (seen.again - self._before.again) / (seen.sent - self._before.sent)
        self._before, self._in_a_row = seen, self._in_a_row + 1 if share >= _MUCH else 0
        if self._in_a_row < _LOOKS:
            return ""
        self._known = True
        return f"loses packets: {share:.0%} of them are sent again{_adapted(connection)}"


def _adapted(connection: socket.socket) -> str:
    """Set what the system knows, and this user may; return how to say that."""
    done = []
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOSSY_CONGESTION)
        done.append(f"by {_LOSSY_CONGESTION.decode()}")
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MIN_US, _SHORTEST_US)
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _LONGEST_MS)
        done.append(f"after {_SHORTEST_US / 1000:g} ms")
    return f", from now on {' and '.join(done)}" if done else ""
