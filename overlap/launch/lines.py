"""Whole lines out of pieces of output: pure, and the same for the terminal and for log files."""

from __future__ import annotations

import re

# Of a line that has not ended; what is longer is let go in pieces, so that a program cannot fill our memory.
LONGEST_BYTES = 64 * 1024
# Between two shown states of a line that a program writes over with carriage returns, as progress bars do.
PROGRESS_PAUSE_S = 1.0

_ENDS = re.compile(rb"\r*\n|\r")


class LineBuffer:
    r"""Cuts a stream of bytes into whole lines, each ending with one newline.

    A line ends with "\n" or "\r\n". With "\r" alone a program writes over what it has written, as progress bars do:
    such a state is a line too if the last one shown is at least a second old; the last state is always shown.

    >>> lines = LineBuffer()
    >>> lines.feed(b"a\nb", now_s=0.0), lines.feed(b"c\n", now_s=0.0), lines.end()
    ([b'a\n'], [b'bc\n'], [])
    >>> lines.feed(b"1 %\r2 %\r3 %\r", now_s=1.0), lines.feed(b"done", now_s=1.1), lines.end()
    ([b'1 %\n'], [], [b'done\n'])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._overwritten = b""  # a state that was not shown, and is the last if nothing follows
        self._shown_s = -PROGRESS_PAUSE_S

    def feed(self, data: bytes, *, now_s: float) -> list[bytes]:
        """Return the lines that `data` completes.

        Args:
            data: The next bytes, in pieces of any size.
            now_s: The time, on any clock that only goes forward.
        """
        self._rest += data
        lines: list[bytes] = []
        begin = 0
        for found in _ENDS.finditer(self._rest):
            if found[0] == b"\r" and found.end() == len(self._rest):
                break  # its newline may be on its way
            self._take(self._rest[begin : found.start()], found[0], now_s, lines)
            begin = found.end()
        self._rest = self._rest[begin:]
        while len(self._rest) > LONGEST_BYTES:
            lines.append(self._rest[:LONGEST_BYTES] + b"\n")
            self._rest = self._rest[LONGEST_BYTES:]
        return lines

    def end(self) -> list[bytes]:
        """Return what is left when nothing more comes."""
        left = self._rest.rstrip(b"\r") or self._overwritten
        self._rest = self._overwritten = b""
        return [left + b"\n"] if left else []

    def _take(self, line: bytes, end: bytes, now_s: float, lines: list[bytes]) -> None:
        if end != b"\r":
            lines.append(line + b"\n")
            self._overwritten = b""
        elif line and now_s - self._shown_s >= PROGRESS_PAUSE_S:
            self._shown_s = now_s
            self._overwritten = b""
            lines.append(line + b"\n")
        elif line:
            self._overwritten = line
