"""Output of the processes: read from their pipes, and written as whole lines. A slow reader slows them down."""

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
# By POSIX, a pipe that is ready takes this many bytes at once, so that writing them does not block the event loop.
WRITE_BYTES = 4096
# Longest wait for further output after the end of a process, whose child processes may hold the pipe open for ever.
DRAIN_S = 1.0
DRAIN_BYTES = 1 << 20  # most bytes read after the end: more than a pipe holds by default
TAIL_LINES = 12  # number of last lines that a relay keeps for reports

_COLOURS = (36, 33, 35, 32, 34, 31)  # of terminals: cyan, yellow, magenta, green, blue, red


def line_prefix(process: int, *, colour: bool) -> bytes:
    """Return the prefix of each line of a process, such as "[process 1] "; with `colour`, the text is coloured."""
    text = f"[process {process}]"
    return (f"\x1b[{_COLOURS[process % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()


class OutputError(OverlapError):
    """Output cannot be written, for another reason than a pipe that its reader has closed.

    Args:
        where: Destination of the output, such as the path of a log.
        error: The error of the system.

    Attributes:
        where: Destination of the output.
        reason: The error of the system, as text.
    """

    def __init__(self, where: str, error: OSError) -> None:
        self.where = where
        self.reason: str = error.strerror or str(error)
        super().__init__(f"cannot write {where}: {self.reason}")


def discard_stream(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that the interpreter can flush it at exit without an error."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class Screen:
    """Writes whole lines of many tasks to stdout and stderr of this process, one batch after the other.

    The two streams take turns, too, because they often end in one terminal.
    """

    def __init__(self) -> None:
        self._turn = trio.Lock()

    async def write(self, descriptor: int, lines: Sequence[bytes]) -> None:
        """Write whole lines to `STDOUT` or `STDERR`; wait for a slow reader.

        Raises:
            BrokenPipeError: The reader has closed the pipe.
            OutputError: The lines cannot be written for another reason.
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
    """Wait until bytes can be written to a descriptor; for a regular file, return at once."""
    try:
        await trio.lowlevel.wait_writable(descriptor)
    except PermissionError:  # epoll refuses regular files, which are always writable
        await trio.lowlevel.checkpoint()


def open_log(path: str) -> BinaryIO:
    """Open the log of a node, which gets all its output in the order of arrival."""
    return open(path, "wb", buffering=0)


def write_log(log: BinaryIO, lines: Sequence[bytes]) -> None:
    """Append whole lines to the log of a node.

    Raises:
        OutputError: The lines cannot be written.
    """
    try:
        log.write(b"".join(lines))
    except OSError as error:
        raise OutputError(log.name, error) from error


class Relay:
    """Copies one output stream of one process to the screen, or to a log if there is one.

    Args:
        source: Descriptor at which the output of the process is read; it becomes non-blocking.
        target: Stream of the screen, `STDOUT` or `STDERR`.
        screen: Writer that all processes share.
        prefix: Text before each line on the screen.
        log: File that gets all lines, without the prefix; None: the screen gets them.

    Attributes:
        tail: The last `TAIL_LINES` lines.
    """

    def __init__(
        self, source: int, target: int, *, screen: Screen, prefix: bytes = b"", log: BinaryIO | None = None
    ) -> None:
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._source, self._target, self._screen, self._prefix, self._log = source, target, screen, prefix, log
        self._lines = LineBuffer()
        self._waiting = trio.CancelScope()  # around the present wait for output
        self._deadline_s = self._left_bytes = math.inf  # limits of further output, see `limit_remaining_output`
        os.set_blocking(source, False)

    async def run(self) -> None:
        """Copy the output until the stream ends. The owner of the stream closes it."""
        while data := await self._read_output():
            await self._write_lines(self._lines.feed(data, now_s=trio.current_time()))
        # a line without its end
        await self._write_lines(self._lines.end())

    def limit_remaining_output(self) -> None:
        """Let `run` end after `DRAIN_S` or `DRAIN_BYTES` more at the latest, because the process has ended."""
        self._deadline_s, self._left_bytes = trio.current_time() + DRAIN_S, DRAIN_BYTES
        self._waiting.deadline = self._deadline_s

    def log_pending_output(self) -> None:
        """Write the output that waits in the pipe to the log, so that it comes before a report of the process."""
        assert self._log is not None
        left_bytes = DRAIN_BYTES
        with suppress(BlockingIOError):
            while left_bytes > 0 and (data := os.read(self._source, READ_BYTES)):
                left_bytes -= len(data)
                lines = self._lines.feed(data, now_s=trio.current_time())
                self.tail.extend(lines)
                write_log(self._log, lines)

    async def _read_output(self) -> bytes:
        """Return the next bytes of the stream; b"" at its end, or after the limits of `limit_remaining_output`."""
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
        """Write lines to the log if there is one, otherwise to the screen with the prefix of the process."""
        self.tail.extend(lines)
        if self._log is not None:
            write_log(self._log, lines)
        elif lines:
            # Lines on stderr inform the user; a failed write must not end the job.
            with suppress(OutputError) if self._target == STDERR else nullcontext():
                await self._screen.write(self._target, [self._prefix + line for line in lines])
        await trio.lowlevel.checkpoint()


# Longest unfinished line in memory. A longer line is written in pieces, so that a program cannot fill the memory.
LONGEST_BYTES = 64 * 1024
# Least time between two shown states of a line that a program overwrites by carriage returns, as progress bars do.
PROGRESS_PAUSE_S = 1.0

_ENDS = re.compile(rb"\r*\n|\r")


class LineBuffer:
    r"""Cuts a stream of bytes into whole lines, each ending with one newline.

    A line ends with "\n" or "\r\n". By "\r" alone a program overwrites the line, as progress bars do: such a state
    becomes a line only if the last one that did is at least a second old. The last state always becomes one.

    >>> lines = LineBuffer()
    >>> lines.feed(b"a\nb", now_s=0.0), lines.feed(b"c\n", now_s=0.0), lines.end()
    ([b'a\n'], [b'bc\n'], [])
    >>> lines.feed(b"1 %\r2 %\r3 %\r", now_s=1.0), lines.feed(b"done", now_s=1.1), lines.end()
    ([b'1 %\n'], [], [b'done\n'])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._overwritten = b""  # the newest state that has not become a line
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
                break  # a newline may follow in the next bytes
            line = self._rest[begin : found.start()]
            if found[0] != b"\r" or self._is_state_shown(line, now_s):
                lines.append(line + b"\n")
                self._overwritten = b""
            begin = found.end()
        self._rest = self._rest[begin:]
        while len(self._rest) > LONGEST_BYTES:
            lines.append(self._rest[:LONGEST_BYTES] + b"\n")
            self._rest = self._rest[LONGEST_BYTES:]
        return lines

    def end(self) -> list[bytes]:
        """Return the unfinished line at the end of the stream, in a list; an empty list without one."""
        left = self._rest.rstrip(b"\r") or self._overwritten
        self._rest = self._overwritten = b""
        return [left + b"\n"] if left else []

    def _is_state_shown(self, line: bytes, now_s: float) -> bool:
        """Whether a state becomes a line, as one in `PROGRESS_PAUSE_S` does; others go to `_overwritten`."""
        if not line:
            return False
        if now_s - self._shown_s < PROGRESS_PAUSE_S:
            self._overwritten = line
            return False
        self._shown_s = now_s
        return True
