"""Output of the processes: read from pipes, and written as whole lines, no faster than it is read."""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import BinaryIO, TextIO

import trio

from ..errors import OverlapError

STDOUT, STDERR = 1, 2

READ_BYTES = 64 * 1024
# POSIX lets a pipe that is ready take this much at once, so that writing it does not stop the event loop.
WRITE_BYTES = 4096
# How long a relay waits for more when its process is gone: what left the process group may hold the pipe for ever.
DRAIN_S = 1.0
DRAIN_BYTES = 1 << 20  # more than a pipe can hold by default: what was written in time is read
TAIL_LINES = 12

_COLOURS = (36, 33, 35, 32, 34, 31)  # of terminals: cyan, yellow, magenta, green, blue, red


def line_prefix(process: int, *, colour: bool) -> bytes:
    """Return the prefix of each line of a process."""
    text = f"[process {process}]"
    return (f"\x1b[{_COLOURS[process % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()


class OutputError(OverlapError):
    """Output cannot be written, for another reason than that its reader has left.

    Attributes:
        where: Its destination.
        reason: The error of the system.
    """

    where: str
    reason: str

    def __init__(self, where: str, error: OSError) -> None:
        self.where, self.reason = where, error.strerror or str(error)
        super().__init__(f"cannot write {where}: {self.reason}")


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that the interpreter can flush it at exit without an error."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class Screen:
    """The stdout and stderr of this process, for many writers at once: one batch of lines after the other.

    Both streams take turns, for they often end in one terminal.
    """

    def __init__(self) -> None:
        self._turn = trio.Lock()

    async def write(self, descriptor: int, lines: Sequence[bytes]) -> None:
        """Write whole lines; waits for a slow reader.

        Raises:
            BrokenPipeError: If the reader has left.
            OutputError: If they cannot be written.
        """
        data = memoryview(b"".join(lines))
        async with self._turn:
            while data:
                await _wait_writable(descriptor)
                try:
                    data = data[os.write(descriptor, data[:WRITE_BYTES]) :]
                except BrokenPipeError:
                    raise
                except OSError as error:
                    raise OutputError("the output", error) from error


async def _wait_writable(descriptor: int) -> None:
    """Wait until a descriptor takes bytes; a file always does."""
    try:
        await trio.lowlevel.wait_writable(descriptor)
    except PermissionError:  # epoll knows no files, which never let one wait
        await trio.lowlevel.checkpoint()


def open_log(path: str) -> BinaryIO:
    """Open the file for all that one node prints, in the order of arrival."""
    return open(path, "wb", buffering=0)


def write_log(log: BinaryIO, lines: Sequence[bytes]) -> None:
    """Add whole lines to the file of a node.

    Raises:
        OutputError: If they cannot be written.
    """
    try:
        log.write(b"".join(lines))
    except OSError as error:
        raise OutputError(log.name, error) from error


class Relay:
    """Carries one stream of one process to the screen, or to a log if there is one.

    Args:
        source: File descriptor that the process writes to.
        target: File descriptor of the screen.
        prefix: What each line begins with.

    Attributes:
        tail: The last lines.
    """

    def __init__(
        self, source: int, target: int, *, screen: Screen, prefix: bytes = b"", log: BinaryIO | None = None
    ) -> None:
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._source, self._target, self._screen, self._prefix, self._log = source, target, screen, prefix, log
        self._lines = LineBuffer()
        self._waiting = trio.CancelScope()
        self._deadline_s = self._left_bytes = math.inf
        os.set_blocking(source, False)

    async def run(self) -> None:
        """Show the output until the stream ends; its owner closes the stream."""
        while data := await self._read():
            await self._write_lines(self._lines.feed(data, now_s=trio.current_time()))
        await self._write_lines(self._lines.end())

    def hurry(self) -> None:
        """Show what is left in the pipe, for `DRAIN_S` at most, because the process has ended."""
        self._deadline_s, self._left_bytes = trio.current_time() + DRAIN_S, DRAIN_BYTES
        self._waiting.deadline = self._deadline_s

    def catch_up(self) -> None:
        """Write the output so far to the log, because the process has printed it before its next report."""
        assert self._log is not None
        left_bytes = DRAIN_BYTES
        with suppress(BlockingIOError):
            while left_bytes > 0 and (data := os.read(self._source, READ_BYTES)):
                left_bytes -= len(data)
                lines = self._lines.feed(data, now_s=trio.current_time())
                self.tail.extend(lines)
                write_log(self._log, lines)

    async def _read(self) -> bytes:
        """Return the next bytes of the stream; b"" at its end, or after the limits that `hurry` has set."""
        while self._left_bytes > 0:
            try:
                data = os.read(self._source, READ_BYTES)
            except BlockingIOError:
                with trio.CancelScope(deadline=self._deadline_s) as self._waiting:
                    await trio.lowlevel.wait_readable(self._source)
                if self._waiting.cancelled_caught:
                    break
            else:
                self._left_bytes -= len(data)
                return data
        return b""

    async def _write_lines(self, lines: Sequence[bytes]) -> None:
        """Write lines to the log if there is one, else to the screen with the prefix of the process."""
        self.tail.extend(lines)
        if self._log is not None:
            write_log(self._log, lines)
        elif lines:
            # Lines on stderr inform the user; a failed write must not end the job.
            with suppress(OutputError) if self._target == STDERR else nullcontext():
                await self._screen.write(self._target, [self._prefix + line for line in lines])
        await trio.lowlevel.checkpoint()


# Longest unfinished line in memory; a longer one is written in pieces, so that a program cannot fill our memory.
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
            self._add_line(self._rest[begin : found.start()], found[0], now_s, lines)
            begin = found.end()
        self._rest = self._rest[begin:]
        while len(self._rest) > LONGEST_BYTES:
            lines.append(self._rest[:LONGEST_BYTES] + b"\n")
            self._rest = self._rest[LONGEST_BYTES:]
        return lines

    def end(self) -> list[bytes]:
        """Return the line without an end that is left at the end of the stream, in a list; [] if there is none."""
        left = self._rest.rstrip(b"\r") or self._overwritten
        self._rest = self._overwritten = b""
        return [left + b"\n"] if left else []

    def _add_line(self, line: bytes, end: bytes, now_s: float, lines: list[bytes]) -> None:
        """Add a complete line to `lines`; of states that carriage returns overwrite, one in `PROGRESS_PAUSE_S`."""
        if end != b"\r":
            lines.append(line + b"\n")
            self._overwritten = b""
        elif line and now_s - self._shown_s >= PROGRESS_PAUSE_S:
            self._shown_s = now_s
            self._overwritten = b""
            lines.append(line + b"\n")
        elif line:
            self._overwritten = line
