"""Hooks for errors that a program does not catch: plain `python` and notebooks show them as `overlap run` does."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stderr, suppress
from io import StringIO
from traceback import walk_tb
from types import TracebackType

from transports import TransportError

from .errors import OverlapError
from .notice import NO_MEMORY, notify


def install_error_hooks() -> None:
    """Install hooks that print uncaught errors of overlap without the frames of this package.

    A program that has set `sys.excepthook` keeps its own hook. `OVERLAP_TRACEBACK=full` leaves notebooks as they are.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_uncaught_error
    if "IPython" in sys.modules and os.environ.get("OVERLAP_TRACEBACK") != "full":
        for kind in _error_kinds():
            kind._render_traceback_ = _error_lines_for_ipython  # type: ignore[attr-defined]


def _error_kinds() -> tuple[type[Exception], ...]:
    from topology import TopologyError  # not at the top: a program without errors needs no machines

    return OverlapError, TopologyError, TransportError


def _error_lines_for_ipython(error: BaseException) -> list[str]:
    """Return the lines that IPython shows for an error; it calls this as the error's `_render_traceback_` method."""
    from .launch.report import report_error

    with redirect_stderr(StringIO()) as stderr:
        report_error(error, command=False)
    return stderr.getvalue().splitlines()


def _print_uncaught_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an uncaught error as `sys.excepthook`: errors of overlap in short form, others with a traceback."""
    try:
        _print_error_or_traceback(kind, error, traceback)
    except ModuleNotFoundError:  # a package that overlap needs is not installed
        sys.__excepthook__(kind, error, traceback)
    except (MemoryError, ImportError):  # `ulimit -v` leaves no memory for the report
        notify(f"{NO_MEMORY} ({kind.__name__}: {error})")


def _print_error_or_traceback(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an error; in short form one of overlap, and Ctrl-C or lack of memory inside overlap; else its traceback."""
    from .launch.report import report_error, unwrap_groups  # not at the top: a program without errors needs no reports

    shown = unwrap_groups(error)
    ours = isinstance(shown, _error_kinds())
    if ours or (isinstance(shown, (KeyboardInterrupt, MemoryError)) and _has_package_frame(traceback)):
        report_error(error, command=False)
        if isinstance(shown, KeyboardInterrupt):
            _end_by_interrupt()
    else:
        sys.__excepthook__(kind, error, traceback)


def _end_by_interrupt() -> None:
    """Let Python end by SIGINT, as after any interrupt.

    Python forgets the interrupt when a hook compiles something; another one, raised in compiled text, sets it again.
    """
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _has_package_frame(traceback: TracebackType | None) -> bool:
    package = f"{__package__}."
    return any(frame.f_globals.get("__name__", "").startswith(package) for frame, _ in walk_tb(traceback))
