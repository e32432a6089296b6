"""Interrupts: Ctrl-C raises an error in the code of the program, and never between two instructions of this package.

Python runs signal handlers between any two instructions of the main thread. An error that is raised there can leave a
lock acquired, or an operation half issued. So the handler here looks at the interrupted frame:

* In code of the program, it raises the error at once.
* In code of this package, or of a library that this package has called, it defers the error until control returns to
  the program. It puts a trace function on the frame that the program has called; so no function of this package has to
  check for interrupts.
* Functions of this package that wait are marked `interruptible`: in these it raises the error at once.

If a coroutine of the program awaits something of this package, control returns to the event loop first. Then the frame
of the loop gets the trace function, and Trio delivers the interrupt to its main task, as it does while all tasks wait.

If an error is still deferred after a second, the next interrupt is raised at once. Handlers that the program or another
event loop has installed are left alone. A debugger's trace function ends with the interrupt. While a rank waits for a
daemon that ignores its cancellation, a second Ctrl-C ends the process: Trio waits for such tasks in any case.
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
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import trio

from ..diagnostics import is_installed, is_of_program, is_of_tasks, is_ours
from .trio_private import deliver_interrupt, is_loop

Raise: TypeAlias = Callable[[FrameType | None], object]
"""Raises the error of a signal in a frame, unless the event loop of that frame delivers it later."""


class _Function(Protocol):
    __code__: CodeType


F = TypeVar("F", bound=_Function)

_interruptible_codes: set[CodeType] = set()  # code of functions that are marked `interruptible`
_calling_codes: set[CodeType] = set()  # code of functions that are marked `calls_program`
_WEAK: tuple[Callable[[], Any], ...] = (WeakSet, WeakKeyDictionary, WeakValueDictionary)
# code of functions that are marked `finalizer`, and of the callbacks of Python's weak collections
_finalizer_codes: set[CodeType] = {make()._remove.__code__ for make in _WEAK}


def interruptible(function: F) -> F:
    """Mark a function that waits, and in which the error of a signal may be raised at any instruction."""
    _interruptible_codes.add(function.__code__)
    return function


def calls_program(function: F) -> F:
    """Mark a function of this package that calls the program. The program counts as such even if it is installed."""
    _calling_codes.add(function.__code__)
    return function


@interruptible
def interruption_point() -> None:
    """Do nothing, but let a deferred interrupt be raised here, because this function is `interruptible`."""


def finalizer(function: F) -> F:
    """Mark a callback of a weak reference. The interpreter ignores errors in it, as in `__del__`.

    So the error of a signal that comes during the callback is raised in the frame that the callback has interrupted.
    """
    _finalizer_codes.add(function.__code__)
    return function


# -- the handler of Ctrl-C -------------------------------------------------------------------------------------------


@contextmanager
def deferring_interrupts() -> Iterator[None]:
    """While the block runs in the main thread, handle Ctrl-C as the module describes, in place of Python's or Trio's
    handler. Another handler stays.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        _install_handler()
    try:
        yield
    finally:
        if in_main_thread:
            _restore_handler()


_users = 0  # blocks of `deferring_interrupts` that run
_was_interrupted = False  # whether Ctrl-C has come since the first of them
_endless_waits = 0  # blocks of `ending_at_second_interrupt` that run
_replaced: Any = signal.default_int_handler  # the handler before ours
_loop: object = None  # the loop of Trio that has installed the replaced handler


def _install_handler() -> None:
    """Install the handler for one more block of `deferring_interrupts`."""
    global _users, _replaced, _loop, _was_interrupted
    if not _users:
        _was_interrupted = False
    handler: Any = signal.getsignal(signal.SIGINT)
    of_trio = hasattr(handler, "__code__") and is_of_tasks(handler.__code__)
    if of_trio or handler is signal.default_int_handler:
        _replaced, _loop = handler, trio.lowlevel.current_trio_token() if of_trio else None
        signal.signal(signal.SIGINT, _on_interrupt)
    _users += 1  # last: until the handler is installed, an interrupt may end this function


def _restore_handler() -> None:
    """Restore the replaced handler after the last block of `deferring_interrupts`, if this is the main thread."""
    global _users, _replaced, _loop
    _users -= 1
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not _users and in_main_thread and signal.getsignal(signal.SIGINT) is _on_interrupt:
        signal.signal(signal.SIGINT, _replaced if _is_loop_of_handler() else signal.default_int_handler)
        _replaced, _loop = signal.default_int_handler, None  # the old values would keep the loop and results alive


def _is_loop_of_handler() -> bool:
    """Whether the loop of Trio that runs here has installed the replaced handler."""
    return trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is _loop


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C: raise `KeyboardInterrupt` now or later; see the module."""
    global _was_interrupted
    if _was_interrupted and _endless_waits:  # the second one, in a wait that no error ends: the process ends here
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    _was_interrupted = True
    raise_in_program(frame, raise_keyboard_interrupt)


@contextmanager
def ending_at_second_interrupt() -> Iterator[None]:
    """Let the second Ctrl-C end the process if it comes during the block, whose wait no error could end."""
    global _endless_waits
    _endless_waits += 1
    try:
        yield
    finally:
        _endless_waits -= 1


def raise_keyboard_interrupt(frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt` in a frame; if Trio protects the frame, let Trio deliver it to its main task."""
    if _is_loop_of_handler():  # the replaced handler is this loop's own: it decides where to raise
        _replaced(signal.SIGINT, frame)
        return
    is_protected = trio.lowlevel.in_trio_run() and trio.lowlevel.currently_ki_protected()
    if is_protected and deliver_interrupt():
        return
    raise KeyboardInterrupt


# -- errors of signals, for all handlers -----------------------------------------------------------------------------


def raise_in_program(frame: FrameType | None, raise_error: Raise) -> None:
    """Raise the error of a signal in the program: now if code of it was interrupted, else when control returns to it.

    Args:
        frame: The interrupted frame of the main thread.
        raise_error: Function that raises the error in a frame.
    """
    if _is_handling_signal(frame):  # an earlier signal is being handled: its error will be raised
        return
    # `called`: the frame at whose return control goes back to the program; None if the error can be raised now
    finalizer_frame = _find_finalizer_frame(frame)
    called = _find_called_frame(frame if finalizer_frame is None else finalizer_frame.f_back) or finalizer_frame
    if called is None or (_deferred and monotonic() - _deferred[0].since_s > _PATIENCE_S):
        for deferred in tuple(_deferred):
            deferred.stop_tracing()
        raise_error(frame)
    elif not _deferred:
        _deferred.append(_DeferredError(called, raise_error))


# An error that has not been raised by then is perhaps stuck in a library that this package has called.
_PATIENCE_S = 1.0
_CACHE, _SEND, _YIELDS = opmap["CACHE"], opmap["SEND"], (opmap["YIELD_VALUE"], opmap["RESUME"])

_deferred: list[_DeferredError] = []  # at most one


def _is_handling_signal(frame: FrameType | None) -> bool:
    """Whether an earlier signal is being handled in a frame, or in one of its callers."""
    while frame is not None and frame.f_code not in _BUSY:
        frame = frame.f_back
    return frame is not None


def _find_called_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame at whose return control goes from this package back to outside code.

    Outside code is the program, a library that has called this package, or an event loop. None: the error can be raised
    at once, because no frame of this package is between the interrupted frame and that code, or because a frame that
    waits (`interruptible`) is.
    """
    # Walk from the interrupted frame outwards. `by_library`: the frame that outside code has called, once that code is
    # found. `ours`: whether a frame of this package was found.
    by_library: FrameType | None = None
    called, at, ours = frame, frame, False
    while at is not None:
        code = at.f_code
        if is_ours(code):
            if (code in _calling_codes and by_library is not None) or (code in _interruptible_codes and not ours):
                break
            ours, by_library = True, None
        elif is_of_program(at) or is_loop(code):
            by_library = by_library or called
            break
        elif is_installed(code) and not is_of_tasks(code):
            by_library = by_library or called
        called, at = at, at.f_back
    return by_library if ours else None


def _find_finalizer_frame(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame of a finalizer among a frame and its callers; None: there is none."""
    found = None
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code in _finalizer_codes:
            found = frame
        frame = frame.f_back
    return found


class _DeferredError:
    """An error of a signal that is raised later: when a frame returns to the program, or a wait of this package begins.

    In a finalizer an error would be lost. So it is raised at the next instruction of the frame that the finalizer has
    interrupted.

    Args:
        called: The frame that the program has called, or the frame of a finalizer.
        error: Function that raises the error in a frame.

    Attributes:
        since_s: Time of the signal.
    """

    def __init__(self, called: FrameType, error: Raise) -> None:
        self.since_s: float = monotonic()
        self._error, self._before = error, sys.gettrace()
        if called is _find_finalizer_frame(called) and called.f_back is not None:
            self._trace_frame(called.f_back, at_each_instruction=True)
        else:
            self._trace_frame(called, at_each_instruction=False)
        sys.settrace(self._on_call)

    def _trace_frame(self, frame: FrameType, *, at_each_instruction: bool) -> None:
        """Let Python call `_on_frame_event` at each instruction of a frame, or only at its return."""
        self._traced, self._at_each_instruction = frame, at_each_instruction
        frame.f_trace = self._on_frame_event
        frame.f_trace_lines = frame.f_trace_opcodes = at_each_instruction

    def stop_tracing(self) -> None:
        """Stop tracing, restore the trace function that was there before, and forget this error."""
        _deferred.clear()
        sys.settrace(self._before)
        self._traced.f_trace, self._traced.f_trace_lines, self._traced.f_trace_opcodes = None, True, False

    def _on_call(self, frame: FrameType, event: str, argument: object) -> None:
        """Raise the error if a wait of this package begins. Python calls this at every call of a function.

        It returns None, so that Python does not trace the called function.
        """
        if frame.f_code in _interruptible_codes:
            self.stop_tracing()
            self._error(frame)

    def _on_frame_event(self, frame: FrameType, event: str, argument: object) -> None:
        """Raise the error in the caller of the traced frame as it returns, or at the frame's next instruction.

        If the frame is a coroutine that does not return, but waits, control goes to the event loop, not to the program.
        Then the frame of the loop is traced instead, and the error is raised there.
        """
        if not (self._at_each_instruction or event == "return"):
            return
        caller = frame.f_back
        if caller is not None and _current_opcode(frame) in _YIELDS:  # a coroutine that only waits
            while caller.f_back is not None and (is_ours(caller.f_code) or _current_opcode(caller) == _SEND):
                caller = caller.f_back
            frame.f_trace = None
            self._trace_frame(caller, at_each_instruction=True)
        else:
            self.stop_tracing()
            self._error(frame if self._at_each_instruction else caller)


_BUSY = {function.__code__ for function in (raise_in_program, _DeferredError._on_call, _DeferredError._on_frame_event)}


def _current_opcode(frame: FrameType) -> int:
    code, at = frame.f_code.co_code, frame.f_lasti
    # an instruction takes two bytes; the interpreter's CACHE entries after it belong to it
    while code[at] == _CACHE and at > 0:
        at -= 2
    return code[at]
