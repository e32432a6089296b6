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

from ..errors import OverlapError, RankFailedError, RemoteError, UsageError, first_error_of_group, shorten_line
from ..notice import NO_MEMORY, notify, write_stderr
from .output import OutputError, discard_stream
from .verdict import REPORT_COLUMNS

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_PIPE = 141  # 128 + SIGPIPE

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # errors of a full disk, which may be that of stdout

_PACKAGES = (sys.modules[__package__.partition(".")[0]], transports, trio, outcome)
_MACHINERY = (
    *(os.path.dirname(str(package.__file__)) + os.sep for package in _PACKAGES),
    os.path.join(os.path.dirname(os.path.dirname(str(transports.__file__))), "topology", ""),
    os.path.join(os.path.dirname(os.__file__), "asyncio", ""),
    runpy.__file__,
    contextlib.__file__,
    "<frozen ",
)
"""Prefixes of files that are no part of the user's program, so that their frames are left out of tracebacks."""


FULL = "full"
"""Value of OVERLAP_TRACEBACK that keeps all frames."""


def report_error(error: BaseException, *, command: bool = True) -> int:
    """Print on stderr why a command or a program failed; return the exit code.

    Args:
        error: The uncaught error. Frames outside of the user's program are left out.
        command: Whether the `overlap` command runs the program: then the traceback begins with frames of the command.
    """
    if os.environ.get("OVERLAP_TRACEBACK") == FULL and isinstance(error, (RankFailedError, BaseExceptionGroup)):
        write_stderr("".join(format_exception(error)))
    error = unwrap_groups(error)
    cause = error.cause if isinstance(error, RankFailedError) else error
    if isinstance(cause, BrokenPipeError) and _nobody_reads_stdout():
        discard_stream(sys.stdout)
        return EXIT_PIPE
    if isinstance(cause, OSError) and cause.errno in _FULL and (refusal := _find_stdout_error()) is not None:
        discard_stream(sys.stdout)
        return _print_report(str(OutputError("the output", refusal)), EXIT_FAILED)
    if isinstance(error, KeyboardInterrupt):
        return _print_report("\n".join(["interrupted", *getattr(error, "__notes__", ())]), EXIT_INTERRUPTED)
    from topology import TopologyError  # not at the top: what does not fail needs no machines

    if isinstance(error, (UsageError, TopologyError)):
        text = "; ".join(line.strip() for line in str(error).splitlines())
        return _print_report(_location_prefix(error, command) + text, EXIT_USAGE)
    if isinstance(error, (OverlapError, TransportError)) and not isinstance(error, RankFailedError):
        return _print_report(str(error), EXIT_FAILED)  # its message is complete
    if isinstance(error, SystemExit):
        return _code_of_exit(error)
    if isinstance(error, MemoryError) and _needs_no_traceback(error):
        return _print_report(NO_MEMORY, EXIT_FAILED)
    if not _needs_no_traceback(cause):
        lines = "".join(_format_user_frames(cause)).split("\n")
        write_stderr("\n".join(shorten_line(line, REPORT_COLUMNS) for line in lines))
        if not isinstance(error, RankFailedError):
            return EXIT_FAILED
    elif not isinstance(error, RankFailedError):  # the system has refused something to this package
        return _print_report(f"{type(error).__name__}: {error}", EXIT_FAILED)
    # A rank that exits with 0 has failed too: it has left the others.
    code = _code_of_exit(cause) if isinstance(cause, SystemExit) and cause.code else EXIT_FAILED
    return _print_report("\n  ".join([str(error), *getattr(error, "__notes__", ())]), code)


def _needs_no_traceback(cause: BaseException) -> bool:
    """Whether a traceback would add nothing: the error is an exit, or one without frames of the program.

    Only errors of this package and of the system are judged by their frames; others always get a traceback.
    """
    if isinstance(cause, RemoteError) or not isinstance(cause, (OverlapError, OSError, MemoryError)):
        return isinstance(cause, SystemExit)
    return not any(map(_is_user_frame, extract_tb(cause.__traceback__)))


def _print_report(text: str, code: int) -> int:
    """Print a report, and return the exit code."""
    notify(text)
    return code


def unwrap_groups(error: BaseException) -> BaseException:
    """Return the error to report for an `ExceptionGroup` of nurseries; any other error is returned unchanged.

    An interrupt or an exit takes precedence; then a single error, or the first of several lost outputs. A group of
    other errors is returned as it is.
    """
    if isinstance(error, BaseExceptionGroup):
        for wanted in (KeyboardInterrupt, SystemExit):
            if (found := error.subgroup(wanted)) is not None:
                return first_error_of_group(found)
        first = first_error_of_group(error)
        # `split` returns what the condition holds for, and the rest, which is None if that is all
        alone = error.split(lambda each: each is first)[1] is None
        unwritten = error.split((BrokenPipeError, OutputError))[1] is None  # several nodes write
        return first if alone or unwritten else error
    return error


def _code_of_exit(end: SystemExit) -> int:
    """Return the exit code as the interpreter does: a value that is no number is printed, and the code is 1."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    write_stderr(f"{end.code}\n")
    return EXIT_FAILED


def _location_prefix(error: BaseException, command: bool) -> str:
    """Return "file:line: " of the program's innermost frame, or "" without one; for `command` see `report_error`."""
    frames: list[FrameSummary] = list(extract_tb(error.__traceback__))
    if command:  # frames before the first one of runpy belong to the `overlap` command itself
        frames = list(dropwhile(lambda frame: "runpy" not in frame.filename, frames))
    frames = [frame for frame in frames if _is_user_frame(frame)]
    if not frames:
        return ""
    path = frames[-1].filename
    with contextlib.suppress(FileNotFoundError):  # somebody has removed the current folder
        path = os.path.relpath(path)
    return f"{path}:{frames[-1].lineno}: "


def _format_user_frames(error: BaseException) -> Iterator[str]:
    """Yield a traceback, and its causes and contexts, each reduced to frames of the user's program if it has any."""
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
    """Whether a frame is of the user's program or its libraries: not of this package, Trio, asyncio or runpy."""
    return not frame.filename.startswith(_MACHINERY)


def _nobody_reads_stdout() -> bool:
    """Whether stdout is a pipe whose reader has closed it, so that a broken pipe is no error of the program."""
    try:
        watched = select.poll()
        # no events are asked for: errors are reported always
        watched.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no poll on this system, no descriptor, or closed
        return True
    return any(event & select.POLLERR for _, event in watched.poll(0))


def _find_stdout_error() -> OSError | None:
    """Try to write to stdout, and return the error; None if it works, so that another file of the program is full."""
    try:
        print(flush=True)  # a newline, because a longer text would not have stayed in the buffer
    except OSError as error:
        return error
    return None
