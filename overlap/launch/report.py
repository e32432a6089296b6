"""Reports of failed commands and programs: the culprit, the frames of the program, and the exit code.

`overlap run` and plain `python` print the same report. OVERLAP_TRACEBACK=full adds the frames of this package and of
the libraries below it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import runpy
import select
import sys
from collections.abc import Iterator
from itertools import dropwhile
from traceback import FrameSummary, StackSummary, TracebackException, extract_tb, format_exception

import outcome
import trio

import transports
from transports import TransportError

from ..errors import OverlapError, RankFailedError, RemoteError, UsageError, first_of_group, shorten_line
from ..notice import NO_MEMORY, notify, write_stderr
from .output import OutputError, discard
from .verdict import CARD_COLUMNS

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_PIPE = 141  # 128 + SIGPIPE

_FOR_OTHERS = (
    "torch's store finds its port in use, because `overlap run` listens there; start this program with torchrun: "
    "`overlap run` is for programs that call overlap.run"
)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # errors of a full file, perhaps the one behind stdout

_PACKAGES = (sys.modules[__package__.partition(".")[0]], transports, trio, outcome)
_MACHINERY = (
    *(os.path.dirname(str(package.__file__)) + os.sep for package in _PACKAGES),
    os.path.join(os.path.dirname(os.path.dirname(str(transports.__file__))), "topology", ""),
    os.path.join(os.path.dirname(os.__file__), "asyncio", ""),
    runpy.__file__,
    contextlib.__file__,
    "<frozen ",
)
"""Prefixes of files whose frames say nothing about the user's program."""


FULL = "full"
"""Value of OVERLAP_TRACEBACK that keeps all frames."""


def report_error(error: BaseException, *, command: bool = True) -> int:
    """Print on stderr why a command or a program failed; return the exit code.

    Args:
        error: The error that nothing has caught. Frames that the reader cannot change are left out.
        command: Whether the `overlap` command runs the program; its frames come before those of the program.
    """
    if os.environ.get("OVERLAP_TRACEBACK") == FULL and isinstance(error, (RankFailedError, BaseExceptionGroup)):
        write_stderr("".join(format_exception(error)))
    error = unwrap_groups(error)
    cause = error.cause if isinstance(error, RankFailedError) else error
    if isinstance(cause, BrokenPipeError) and _nobody_reads_stdout():
        discard(sys.stdout)
        return EXIT_PIPE
    if isinstance(cause, OSError) and cause.errno in _FULL and (refusal := _refusal_of_stdout()) is not None:
        discard(sys.stdout)
        return _print_report(str(OutputError("the output", refusal)), EXIT_FAILED)
    if isinstance(error, KeyboardInterrupt):
        return _print_report("\n".join(["interrupted", *getattr(error, "__notes__", ())]), EXIT_INTERRUPTED)
    from topology import TopologyError  # not at the top: what does not fail needs no machines

    if isinstance(error, (UsageError, TopologyError)):
        return _print_report(
            _locate(error, command) + "; ".join(line.strip() for line in str(error).splitlines()), EXIT_USAGE
        )
    if isinstance(error, (OverlapError, TransportError)) and not isinstance(error, RankFailedError):
        return _print_report(str(error), EXIT_FAILED)  # its message is complete
    if _wants_our_port(error):
        return _print_report(_locate(error, command, above=f"{os.sep}torch{os.sep}") + _FOR_OTHERS, EXIT_FAILED)
    if isinstance(error, SystemExit):
        return _exit_code(error)
    if isinstance(error, MemoryError) and _needs_no_traceback(error):
        return _print_report(NO_MEMORY, EXIT_FAILED)
    if not _needs_no_traceback(cause):
        write_stderr(
            "\n".join(shorten_line(line, CARD_COLUMNS) for line in "".join(_format_user_frames(cause)).split("\n"))
        )
        if not isinstance(error, RankFailedError):
            return EXIT_FAILED
    elif not isinstance(error, RankFailedError):  # the system has refused something to this package
        return _print_report(f"{type(error).__name__}: {error}", EXIT_FAILED)
    # A rank that exits with 0 has failed too: it has left the others.
    text = "\n  ".join([str(error), *getattr(error, "__notes__", ())])
    return _print_report(text, _exit_code(cause) if isinstance(cause, SystemExit) and cause.code else EXIT_FAILED)


def _wants_our_port(error: BaseException) -> bool:
    """Whether torch's store cannot listen, because the launcher listens there; `torch` need not be installed."""
    taken = type(error).__name__ == "DistNetworkError" and "EADDRINUSE" in str(error)
    return taken and "OVERLAP_NODE_RANK" in os.environ and f"port: {os.environ.get('MASTER_PORT')}," in str(error)


def _needs_no_traceback(cause: BaseException) -> bool:
    """Whether a traceback would add nothing: no frame of the program, or an exit."""
    if isinstance(cause, RemoteError) or not isinstance(cause, (OverlapError, OSError, MemoryError)):
        return isinstance(cause, SystemExit)
    return not any(map(_is_user_frame, extract_tb(cause.__traceback__)))


def _print_report(text: str, code: int) -> int:
    notify(text)
    return code


def unwrap_groups(error: BaseException) -> BaseException:
    """Unwrap the groups of nurseries: return an interrupt or an exit, or a single error, or the first lost output."""
    if isinstance(error, BaseExceptionGroup):
        for wanted in (KeyboardInterrupt, SystemExit):
            if (found := error.subgroup(wanted)) is not None:
                return first_of_group(found)
        first = first_of_group(error)
        alone = error.split(lambda each: each is first)[1] is None
        unwritten = error.split((BrokenPipeError, OutputError))[1] is None  # several nodes write
        return first if alone or unwritten else error
    return error


def _exit_code(end: SystemExit) -> int:
    """Return the code as the interpreter does: print a text, take None as 0, and the last 8 bits of a number."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    write_stderr(f"{end.code}\n")
    return EXIT_FAILED


def _locate(error: BaseException, command: bool, *, above: str = "") -> str:
    """Return "file:line: " of the program's innermost frame, or nothing if no program runs.

    Args:
        error: The error.
        command: See `report_error`.
        above: Part of the paths of files that the program has called, whose frames do not count either.
    """
    frames: list[FrameSummary] = list(extract_tb(error.__traceback__))
    if command:
        frames = list(dropwhile(lambda frame: "runpy" not in frame.filename, frames))
    frames = [frame for frame in frames if _is_user_frame(frame) and not (above and above in frame.filename)]
    if not frames:
        return ""
    path = frames[-1].filename
    with contextlib.suppress(FileNotFoundError):  # somebody has removed the current folder
        path = os.path.relpath(path)
    return f"{path}:{frames[-1].lineno}: "


def _format_user_frames(error: BaseException) -> Iterator[str]:
    """Yield the lines of a traceback with the frames of the user's program only; if it has none, with all."""
    traceback = TracebackException.from_exception(error)
    for part in _linked_tracebacks(traceback):
        users = [frame for frame in part.stack if _is_user_frame(frame)]
        if users:
            part.stack = StackSummary.from_list(users)
    return traceback.format()


def _linked_tracebacks(traceback: TracebackException) -> Iterator[TracebackException]:
    """Yield a traceback, and those of its causes, contexts and groups."""
    yield traceback
    for part in (traceback.__cause__, traceback.__context__, *(getattr(traceback, "exceptions", None) or ())):
        if part is not None:
            yield from _linked_tracebacks(part)


def _is_user_frame(frame: FrameSummary) -> bool:
    return not frame.filename.startswith(_MACHINERY)


def _nobody_reads_stdout() -> bool:
    """Whether the reader of the pipe behind stdout is gone; broken pipes of the program's own are errors."""
    try:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no poll on this system, no descriptor, or closed
        return True
    return any(event & select.POLLERR for _, event in watched.poll(0))


def _refusal_of_stdout() -> OSError | None:
    """Return the error of writing to stdout, or None: then a file of the program's own is full."""
    try:
        print(flush=True)  # a newline, because a longer text would not have stayed in the buffer
    except OSError as error:
        return error
    return None
