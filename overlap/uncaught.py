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


def report_uncaught() -> None:
    """Show uncaught errors of worlds without the frames of this package, unless the program has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_error
    if "IPython" in sys.modules and os.environ.get("OVERLAP_TRACEBACK") != "full":
        for kind in _error_kinds():
            kind._render_traceback_ = _error_lines  # type: ignore[attr-defined]


def _error_kinds() -> tuple[type[Exception], ...]:
    from topology import TopologyError  # not at the top: a program without errors needs no machines

    return OverlapError, TopologyError, TransportError


def _error_lines(error: BaseException) -> list[str]:
    """Return the lines that IPython shows for an error; it looks for a method of this kind."""
    from .launch.report import report_error

    with redirect_stderr(StringIO()) as stderr:
        report_error(error, command=False)
    return stderr.getvalue().splitlines()


def _show_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Show an uncaught error: ours, and interrupts of a world, as `overlap run` does."""
    try:
        _report_ours(kind, error, traceback)
    except (MemoryError, ImportError):  # `ulimit -v` leaves no memory for it
        notify(f"{NO_MEMORY} ({kind.__name__}: {error})")


def _report_ours(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Report an error of ours; others are Python's to show."""
    from .launch.report import report_error, unwrap_groups  # which a program without errors does not need

    shown = unwrap_groups(error)
    ours = isinstance(shown, _error_kinds())
    if ours or (isinstance(shown, (KeyboardInterrupt, MemoryError)) and _passed_through_us(traceback)):
        report_error(error, command=False)
        if isinstance(shown, KeyboardInterrupt):
            _end_by_interrupt()
    else:
        sys.__excepthook__(kind, error, traceback)


def _end_by_interrupt() -> None:
    """Let Python end by SIGINT, as after any interrupt: it forgets that when a hook compiles something."""
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _passed_through_us(traceback: TracebackType | None) -> bool:
    """Whether an error went through this package on its way to the program."""
    package = f"{__package__}."
    return any(frame.f_globals.get("__name__", "").startswith(package) for frame, _ in walk_tb(traceback))
