"""Diagnosis of errors: from the error that surfaced to the rank and the line that caused it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from operator import is_, itemgetter
from sys import _getframe
from traceback import FrameSummary, extract_tb
from types import CodeType, FrameType
from typing import TypeVar

import outcome
import trio

from .errors import (
    CollectiveMismatchError,
    DeadlineError,
    NonFiniteError,
    PeerError,
    PeerFailedError,
    RemoteError,
    error_text,
)
from .threads import read_frames, without_garbage_collector

T = TypeVar("T")

_CALL_SITE = "_overlap_call_site"  # attribute of errors, see `set_place_of_call`

_TYPED_PROGRAMS = ("<stdin>", "<ipython-input")  # file names of lines that are typed in a console

_HERE = os.path.dirname(__file__)
_OURS = tuple(
    os.path.join(os.path.dirname(_HERE), each, "") for each in (os.path.basename(_HERE), "topology", "transports")
)

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_TASKS = tuple(os.path.join(os.path.dirname(str(each.__file__)), "") for each in (trio, outcome))


def unwrap_single_error(group: BaseException) -> BaseException:
    """Return the only error in nested exception groups; of several errors, the innermost group that holds them all.

    Errors that other ranks caused (`PeerError`) do not count, unless there are no others: then it is the first.
    """
    error = group
    while isinstance(error, BaseExceptionGroup):
        own = [e for e in error.exceptions if not isinstance(e, PeerError)] or list(error.exceptions)[:1]
        if len(own) > 1:
            return error
        error = own[0]
    return error


def split_stops(
    error: BaseException, *, stops: tuple[type[BaseException], ...]
) -> tuple[BaseException | None, BaseException | None]:
    """Separate a program's own errors from those that only stop it, such as cancellations.

    Args:
        error: An error, or an exception group of both.
        stops: Types of the errors that only stop a program.

    Returns:
        The program's own part and the stopping part; None for a part without errors.
    """
    if isinstance(error, BaseExceptionGroup):
        stopped, failed = error.split(stops)
        return failed, stopped
    return (None, error) if isinstance(error, stops) else (error, None)


def make_presentable(error: BaseException) -> BaseException:
    """Return an error of a program, or a RuntimeError in its place if nurseries and reports cannot handle it.

    There are two kinds: a GeneratorExit of the program would look like the end of its task; an error whose `str` or
    `repr` raises would be lost when it is reported. Groups are searched.
    """
    if isinstance(error, BaseExceptionGroup):
        inner = [make_presentable(member) for member in error.exceptions]
        same = all(map(is_, inner, error.exceptions))
        return error if same else BaseExceptionGroup(error.message, inner).with_traceback(error.__traceback__)
    if isinstance(error, GeneratorExit):
        frames = extract_tb(error.__traceback__)
        if frames and frames[-1].filename.startswith(_TASKS):  # thrown in by a loop that closes the task
            return error
        return RuntimeError("the program raised GeneratorExit").with_traceback(error.__traceback__)
    try:
        str(error), repr(error)
    except Exception:
        substitute = RuntimeError(f"{type(error).__name__}: {error_text(error)}").with_traceback(error.__traceback__)
        for note in getattr(error, "__notes__", ()):
            substitute.add_note(note)
        return substitute
    return error


def definition_place(function: object) -> str:
    """Return the place of a function's definition, such as " (train.py:12)"; "" for a function without Python code."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def find_origin(rank: int, error: BaseException) -> tuple[int, BaseException]:
    """Return the rank that caused an error, and the error of that rank; if it is unknown, an error that names the rank.

    Args:
        rank: World rank that raised the error.
        error: The error; a `PeerError` names its culprit, whose error may name another one, and so on.
    """
    if isinstance(error, PeerError) and error.culprit >= 0:
        cause = error.__cause__ if isinstance(error, PeerFailedError) else None
        return find_origin(error.culprit, cause) if cause is not None else (error.culprit, error)
    if isinstance(error, CollectiveMismatchError):
        return error.ranks[0], error  # the rank that differs from the others, not the rank that has noticed
    return rank, error


def error_place(error: BaseException) -> str:
    """Return " at file:line", the place of an error in the program; "" if it has none.

    This is the innermost frame of the program in the traceback, or of another library if the program has no frame. An
    error of an operation that nothing has raised yet has the line of the operation's call; one of a compute without a
    frame of the program has it even after an await has raised it. Python replaces a StopIteration by another error:
    then the traceback is that of the cause.
    """
    if isinstance(error, BaseExceptionGroup):
        return error_place(error.exceptions[0]) or _innermost_line(error)
    if isinstance(error, RemoteError):
        return error.place
    if site := getattr(error, _CALL_SITE, ""):
        return f" at {os.path.basename(site)}"
    if line := _innermost_line(error):
        return line
    if isinstance(error, (NonFiniteError, DeadlineError)):
        return f" at {os.path.basename(error.call_site)}"
    return _innermost_line(error.__cause__) if isinstance(error.__cause__, StopIteration) else ""


def set_place_of_call(error: BaseException, call_site: str) -> None:
    """Let an error that has no frame of the program have the place of the call of its function ("file:line").

    So it is if the arguments of the call are wrong, or the function is one of a library. An await adds a frame later.
    """
    if not _points_of_program(_foreign_frames(error), lambda frame: frame.filename):
        vars(error)[_CALL_SITE] = call_site  # `setattr` would fail for a frozen dataclass


def _foreign_frames(error: BaseException) -> list[FrameSummary]:
    """Return the frames of the traceback that are not of this package."""
    return [frame for frame in extract_tb(error.__traceback__) if not _is_package_frame(frame)]


def _innermost_line(error: BaseException) -> str:
    """Return " at file:line" of the innermost frame of the program, else of another library; "" if there is neither."""
    frames = _foreign_frames(error)
    own = _points_of_program(frames, lambda frame: frame.filename)
    own = own or [frame for frame in frames if not _is_library_of_tasks(frame.filename)]
    return f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""


def _is_package_frame(frame: FrameSummary) -> bool:
    return frame.filename.startswith(_OURS) or (frame.filename == "<string>" and frame.name == "__init__")


def is_ours(code: CodeType) -> bool:
    """Whether code is part of overlap, topology or transports."""
    return code.co_filename.startswith(_OURS)


def is_of_tasks(code: CodeType) -> bool:
    """Whether code is part of trio or outcome, which run tasks."""
    return code.co_filename.startswith(_TASKS)


def is_installed(code: CodeType) -> bool:
    """Whether code is in a folder of installed packages; overlap itself may be there."""
    return any(folder in code.co_filename for folder in _INSTALLED)


def is_of_program(frame: FrameType) -> bool:
    """Whether a frame is of a file of the program, of lines typed in a console, or of text evaluated in `__main__`."""
    path = frame.f_code.co_filename
    if path.startswith("<"):
        return path.startswith(_TYPED_PROGRAMS) or frame.f_globals.get("__name__") == "__main__"
    return not path.startswith((*_OURS, *_library_folders())) and not is_installed(frame.f_code)


def innermost_program_point(points: Sequence[tuple[CodeType, int]]) -> tuple[CodeType, int] | None:
    """Return the innermost point in a file of the program, else the innermost one outside overlap, else None.

    Args:
        points: (code, instruction) of each frame, outermost first.
    """
    foreign = [point for point in points if not is_ours(point[0])]
    own = _points_of_program(foreign, lambda point: point[0].co_filename) or foreign
    return own[-1] if own else None


def _points_of_program(points: Sequence[T], path: Callable[[T], str]) -> list[T]:
    """Return the points, of any type, in files of the program or in lines typed in a console, in the given order.

    Code made from text, such as by `eval` or for a dataclass, has no file that people can open. It is returned only if
    there are no other points of the program, as in `python -c`.
    """
    # "<frozen ": modules that Python loads at its start; "<attrs ": methods that attrs has made.
    foreign = (*_library_folders(), "<frozen ", "<attrs ")
    of_program = [point for point in points if not path(point).startswith(foreign)]

    def can_be_opened(point: T) -> bool:
        return not path(point).startswith("<") or path(point).startswith(_TYPED_PROGRAMS)

    return list(filter(can_be_opened, of_program)) or of_program


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is a KeyboardInterrupt, or an exception group that contains one."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    return isinstance(error, KeyboardInterrupt)


def all_notes(error: BaseException) -> list[str]:
    """Return the notes on an error, and on the errors in its groups."""
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*getattr(error, "__notes__", ()), *(note for each in inside for note in all_notes(each))]


def line_in_thread(thread: int) -> str:
    """Return "file:line" at which a thread is: of its innermost frame of the program, or of any frame if it has none.

    Args:
        thread: `Thread.ident` of the thread.
    """
    return _line_in_frames((frame, frame.f_lineno) for frame in reversed(read_frames(thread)))


def task_tree_lines(task: trio.lowlevel.Task, thread: int, *, name: str = "", indent: str = "") -> Iterator[str]:
    """Yield a line for a task, with its file and line in the program, then lines for its child tasks, indented.

    Args:
        task: The task.
        thread: `Thread.ident` of the event loop's thread. If it runs the task now, the task keeps the loop from others.
        name: Name of the task in its line; "": the name of its function.
        indent: Beginning of each line.
    """
    parts = [part for part in task.name.split(".") if part not in ("__main__", "<locals>")]
    running = getattr(task.coro, "cr_running", False)
    with without_garbage_collector():
        place = line_in_thread(thread) if running else _line_in_frames(task.iter_await_frames())
    yield f"{indent}{name or '.'.join(parts[-2:])} at {place}{', which keeps the event loop' if running else ''}"
    for nursery in task.child_nurseries:
        for child in sorted(nursery.child_tasks, key=lambda child: child.name):
            yield from task_tree_lines(child, thread, indent=f"{indent}  ")


def _line_in_frames(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return "file:line" of the innermost frame of the program, else of overlap, else of any library; "?:0" if none."""
    points = [(frame.f_code.co_filename, line) for frame, line in frames]
    of_program = _points_of_program([point for point in points if not point[0].startswith(_OURS)], itemgetter(0))
    of_package = [point for point in points if point[0].startswith(_OURS)]
    file, line = (of_program or of_package or points or [("?", 0)])[-1]
    return f"{os.path.basename(file)}:{line}"


@cache
def _library_folders() -> tuple[str, ...]:
    """Return the folders of Python's own library and of installed packages."""
    return tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _is_library_of_tasks(path: str) -> bool:
    """Whether a file belongs to Python's own library or to a library that runs tasks, not to an installed package."""
    # Folders of installed packages may be inside the folder of Python's own library.
    installed = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return path.startswith(_TASKS) or (path.startswith(_library_folders()) and not path.startswith(installed))


def find_caller() -> tuple[FrameType, int]:
    """Return the innermost frame outside overlap, and its level: 1 for the caller of this function, 2 above it, ..."""
    frame, level = _getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return frame, level
