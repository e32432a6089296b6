"""Interrupts: Ctrl-C ends the code of the program, and never this package between two of its instructions.

Python runs signal handlers between any two instructions of the main thread. An error that is raised at once can leave
a lock acquired, or an operation half issued. The handler here looks at the interrupted frame. In code of the program it
raises at once. In code of this package, or of a library that this package has called, it raises when control returns
to the program: it puts a trace function on the frame that the program has called, so that no call of this package
checks anything. Waits of this package are marked `interruptible`, and end at once.

A coroutine of the program may await something of this package. Then control returns to the event loop first, whose
frame gets the trace function. Trio delivers the interrupt to its main task, as it does while all tasks wait.

An interrupt that comes more than a second after another one is raised at once. Handlers of the program, and of other
event loops, are left alone. A debugger's trace function ends with the interrupt. A second one ends the process where a
rank waits for a daemon that ignores its cancellation: Trio waits for such tasks in spite of interrupts.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from opcode import opmap
from time import monotonic
from types import CodeType, FrameType
from typing import Any, Protocol, TypeAlias, TypeVar

import trio

from ..diagnostics import is_installed, is_of_program, is_of_tasks, is_ours
from .trio_private import deliver_interrupt, is_loop

Raise: TypeAlias = Callable[[FrameType | None], object]
"""Raises the error of a signal in a frame, unless the event loop of that frame delivers it later."""


class _Function(Protocol):
    __code__: CodeType


F = TypeVar("F", bound=_Function)

_waits: set[CodeType] = set()
_callers: set[CodeType] = set()
_finalizers: set[CodeType] = set()


def interruptible(function: F) -> F:
    """Mark a function that waits, and that an error may leave at each of its instructions."""
    _waits.add(function.__code__)
    return function


def calls_program(function: F) -> F:
    """Mark a function that calls the program, which may be an installed package: it is no library of ours."""
    _callers.add(function.__code__)
    return function


@interruptible
def interruption_point() -> None:
    """Raise an interrupt that is deferred in this thread."""


def finalizer(function: F) -> F:
    """Mark a callback of a weak reference: the interpreter ignores errors that it raises, as in `__del__`."""
    _finalizers.add(function.__code__)
    return function


# -- the handler of Ctrl-C -------------------------------------------------------------------------------------------


@contextmanager
def deferring_interrupts() -> Iterator[None]:
    """Handle Ctrl-C as above during the block, in the main thread, if the handler is that of Python or of Trio."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        _begin()
    try:
        yield
    finally:
        if in_main_thread:
            _end()


_users = 0
_was_interrupted = False
_endless_waits = 0
_replaced: Any = signal.default_int_handler
_loop: object = None  # the loop of Trio that has installed the replaced handler


def _begin() -> None:
    """Install the handler for one more user."""
    global _users, _replaced, _loop, _was_interrupted
    if not _users:
        _was_interrupted = False
    handler: Any = signal.getsignal(signal.SIGINT)
    of_trio = hasattr(handler, "__code__") and is_of_tasks(handler.__code__)
    if of_trio or handler is signal.default_int_handler:
        _replaced, _loop = handler, trio.lowlevel.current_trio_token() if of_trio else None
        signal.signal(signal.SIGINT, _on_interrupt)
    _users += 1  # last: until the handler is installed, an interrupt may end this function


def _end() -> None:
    """Restore the replaced handler after the last user, except in another thread."""
    global _users
    _users -= 1
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not _users and in_main_thread and signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, _replaced if _is_loop_of_handler() else signal.default_int_handler)


def _is_loop_of_handler() -> bool:
    """Whether the loop of Trio that runs here has installed the replaced handler."""
    return trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is _loop


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C."""
    global _was_interrupted
    if _was_interrupted and _endless_waits:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    _was_interrupted = True
    raise_in_program(frame, interrupt)


@contextmanager
def ending_at_second_interrupt() -> Iterator[None]:
    """Let the second Ctrl-C end the process, if it comes during the block: no error could end what the block awaits."""
    global _endless_waits
    _endless_waits += 1
    try:
        yield
    finally:
        _endless_waits -= 1


def interrupt(frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt` in a frame; if Trio protects the frame, let Trio deliver it to its main task."""
    if _is_loop_of_handler():
        _replaced(signal.SIGINT, frame)
    elif not (trio.lowlevel.in_trio_run() and trio.lowlevel.currently_ki_protected() and deliver_interrupt()):
        raise KeyboardInterrupt


# -- errors of signals, for all handlers -----------------------------------------------------------------------------


def raise_in_program(frame: FrameType | None, error: Raise) -> None:
    """Raise the error of a signal in the program: now if it was interrupted, else when control returns to it.

    Args:
        frame: The interrupted frame of the main thread.
        error: Raises the error.
    """
    if _is_busy(frame):  # an error is about to be raised, or to be deferred
        return
    called = _find_called(frame)
    if called is None or (_deferred and monotonic() - _deferred[0].since_s > _PATIENCE_S):
        for deferred in tuple(_deferred):
            deferred.forget()
        error(frame)
    elif not _deferred:
        _deferred.append(_Deferred(called, error))


# An error that has not been raised by then is perhaps stuck in a library that this package has called.
_PATIENCE_S = 1.0
_CACHE, _SEND, _YIELDS = opmap["CACHE"], opmap["SEND"], (opmap["YIELD_VALUE"], opmap["RESUME"])

_deferred: list[_Deferred] = []  # at most one


def _is_busy(frame: FrameType | None) -> bool:
    """Whether an earlier signal is being handled in a frame, or in one of its callers."""
    while frame is not None and frame.f_code not in _BUSY:
        frame = frame.f_back
    return frame is not None


def _find_called(frame: FrameType | None) -> FrameType | None:
    """Return the frame that the program, a library that calls this package, or an event loop has called.

    None if the program was interrupted itself, or in a wait of this package.
    """
    by_library: FrameType | None = None  # called by an installed package, and calls no frame of ours
    called, at, ours = frame, frame, False
    while at is not None:
        code = at.f_code
        if is_ours(code):
            if (code in _callers and by_library is not None) or (code in _waits and not ours):
                break
            ours, by_library = True, None
        elif is_of_program(at) or is_loop(code):
            by_library = by_library or called
            break
        elif is_installed(code) and not is_of_tasks(code):
            by_library = by_library or called
        called, at = at, at.f_back
    return by_library if ours else None


class _Deferred:
    """An error that is raised when a frame returns to the program, or when a wait of this package begins.

    Attributes:
        since_s: Time of its signal.
    """

    def __init__(self, called: FrameType, error: Raise) -> None:
        self.since_s: float = monotonic()
        self._error, self._before = error, sys.gettrace()
        ignored = called.f_code.co_name == "__del__" or called.f_code in _finalizers
        if ignored and called.f_back is not None:
            self._trace(called.f_back, each=True)
        else:
            self._trace(called, each=False)
        sys.settrace(self._on_call)

    def _trace(self, frame: FrameType, *, each: bool) -> None:
        """Trace each instruction of a frame, or its return."""
        self._traced, self._each = frame, each
        frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self._on_event, each, each

    def forget(self) -> None:
        """Trace nothing any more."""
        _deferred.clear()
        sys.settrace(self._before)
        self._traced.f_trace, self._traced.f_trace_lines, self._traced.f_trace_opcodes = None, True, False

    def _on_call(self, frame: FrameType, event: str, argument: object) -> None:
        """Raise the error in a wait that begins."""
        if frame.f_code in _waits:
            self.forget()
            self._error(frame)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        """Raise the error at the return; if a coroutine only waits, in the event loop that it returns to."""
        loop = frame.f_back
        if (self._each or event == "return") and loop is not None and _instruction(frame) in _YIELDS:
            while loop.f_back is not None and (is_ours(loop.f_code) or _instruction(loop) == _SEND):
                loop = loop.f_back
            frame.f_trace = None
            self._trace(loop, each=True)
        elif self._each or event == "return":
            self.forget()
            self._error(frame if self._each else loop)


_BUSY = {function.__code__ for function in (raise_in_program, _Deferred._on_call, _Deferred._on_event)}


def _instruction(frame: FrameType) -> int:
    """Return the code of the instruction that a frame executes."""
    code, at = frame.f_code.co_code, frame.f_lasti
    while code[at] == _CACHE and at > 0:
        at -= 2
    return code[at]
