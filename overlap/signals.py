"""Signals of this process: SIGTERM and SIGHUP end it in order, SIGUSR1 prints the state of its worlds.

Schedulers end jobs with SIGTERM and a grace. By default a process ends at once: no `finally` runs, and no trace is
written. Here the worlds of this process are cancelled, other processes are notified, and the process
exits with 128 plus the number of the signal. A program that keeps the event loop for longer than a second gets a
`KeyboardInterrupt` there, as of Ctrl-C. Asked again, it goes on ending: schedulers ask launchers and processes alike,
so it comes twice.

SIGUSR1 ends nothing: it prints who waits for whom, and the tasks of each rank with file and line, on stderr.

Signals that the program handles are left to it. The others are taken for as long as a world lives or the launcher's
program runs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import trio

from .diagnostics import is_interrupt, line_in_thread
from .errors import RankFailedError, RemoteError
from .flight.folder import open_records
from .notice import notify
from .runtime.interrupts import deferring_interrupts, interrupt, raise_in_program

if TYPE_CHECKING:
    from .runtime.world import World

ASKING = signal.SIGUSR1
_ENDING = (signal.SIGTERM, signal.SIGHUP)
# An event loop that runs obeys within milliseconds.
_OBEY_S = 1.0


class Terminated(SystemExit):
    """A signal has ended the process in order; the exit code is 128 plus its number, as in shells.

    Attributes:
        kept: The saved state of the world, as the end of a sentence; empty if there is none.
    """

    number: signal.Signals
    kept: str

    def __init__(self, number: signal.Signals, kept: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.kept = number, kept


class Life:
    """A world on this event loop, from before its rendezvous to its end; `world` is None before it exists."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.token: trio.lowlevel.TrioToken = trio.lowlevel.current_trio_token()
        self.scope: trio.CancelScope = trio.CancelScope()

    def end(self, number: signal.Signals) -> None:
        """End the world because of a signal."""
        if self.world is not None:
            self.world.end_by_signal(number.name)
        self.scope.cancel(reason=f"told to end by {number.name}")

    def print_state(self) -> None:
        """Print the state of the world to stderr."""
        lines = ["the processes have not met"]
        if self.world is not None:
            lines = [*self.world.reports.lines_now(), "tasks:", *self.world.reports.tasks()]
            lines += [f"flight record: {path} (`overlap why` reads it)" for path in open_records()]
        _print_lines([f"asked by {ASKING.name}, process {os.getpid()}:", *lines])


_registered_lives: list[Life] = []
_active: list[_SignalHandlers] = []  # at most one


def _before_fork() -> None:
    """Block our signals during a fork."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDING, ASKING})


def _after_fork() -> None:
    """Unblock our signals after a fork."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_ENDING, ASKING})


def _restore_in_fork() -> None:
    """Restore the default handlers in a fork of this process, because the fork is no rank."""
    for handlers in _active:
        handlers.release()
    _active.clear()
    _after_fork()


# Signals are blocked during a fork: the interpreter forgets signals that a new process receives before it starts.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_restore_in_fork)


@contextmanager
def registered_life() -> Iterator[Life]:
    """Let signals reach a world that runs on this event loop within the block.

    Raises:
        Terminated: If a signal has ended the world.
    """
    with deferring_interrupts():
        life = Life()
        _registered_lives.append(life)
        try:
            with life.scope:
                yield life
        finally:
            _registered_lives.remove(life)
    _raise_if_ending()


@contextmanager
def handling_signals(*, quiet: bool = False) -> Iterator[None]:
    """Handle signals while the main thread runs the block; in a nested block, the outer one handles them.

    Args:
        quiet: The caller reports the signal to the user.

    Raises:
        Terminated: If a signal has ended the block.
    """
    if _active or threading.current_thread() is not threading.main_thread():
        yield
        _raise_if_ending()
        return
    handlers = _SignalHandlers()
    try:
        _active.append(handlers)
        handlers.install()
        yield
        _raise_if_ending()
    except BaseException as error:
        if handlers.first_signal is None or not _follows_from_signal(error, handlers.first_signal):
            raise
        if not quiet:
            notify(f"ended by {handlers.first_signal.name}{handlers.where}{handlers.kept()}")
        raise Terminated(handlers.first_signal, handlers.kept()) from None
    finally:
        try:
            handlers.close()
        finally:
            handlers.close()  # Ctrl-C may have ended the first call


def _raise_if_ending() -> None:
    """Raise if a signal has requested the end of this process, so that the program does not go on."""
    if _active and _active[0].first_signal is not None:
        raise Terminated(_active[0].first_signal)


def _follows_from_signal(error: BaseException, number: signal.Signals) -> bool:
    """Whether an error follows from the signal, here or in another process that got it sooner."""
    if isinstance(error, RankFailedError):
        return isinstance(error.cause, RemoteError) and error.cause.type_name == number.name
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup((Terminated, KeyboardInterrupt)) is not None
    return isinstance(error, Terminated) or is_interrupt(error)


class _SignalHandlers:
    """Handlers of the signals of this process.

    Attributes:
        first_signal: First signal that requested the end of the process.
        where: Step of that moment, as text.
        kept: Returns the saved states of this moment, as text.
    """

    def __init__(self) -> None:
        self.first_signal: signal.Signals | None = None
        self.where = ""
        self.kept: Callable[[], str] = str
        self._handlers = {**dict.fromkeys(_ENDING, self._on_end_signal), ASKING: self._on_state_signal}
        self._handled: list[signal.Signals] = []
        self._insisting = False
        self._timers: list[threading.Timer] = []

    def install(self) -> None:
        """Handle the signals that have no handler."""
        self._handled = [number for number in self._handlers if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._handled:
            signal.signal(number, self._handlers[number])
        # a launcher blocks it until here: it would end a process that is still starting
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASKING})

    def release(self) -> None:
        """Restore the default handlers of the signals."""
        for number in self._handled:
            if signal.getsignal(number) == self._handlers[number]:
                signal.signal(number, signal.SIG_DFL)

    def close(self) -> None:
        """Restore the handlers, and stop the timers; a second call is harmless."""
        self.release()
        _active.clear()
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _on_end_signal(self, number: int, frame: FrameType | None) -> None:
        """End all worlds at the first signal; interrupt the program at a repeated one."""
        if self.first_signal is not None:
            self._interrupt_program(frame)
            return
        self.first_signal = signal.Signals(number)
        for life in _registered_lives:
            if life.world is not None:
                self.where = life.world.reports.steps()
                self.kept = life.world.reports.kept
            self._run_in_loop(life, partial(life.end, self.first_signal), partial(self._raise_again, self.first_signal))
        if not _registered_lives:
            self._end_here(self.first_signal, frame)

    def _raise_again(self, number: signal.Signals) -> None:
        """Send the signal to the main thread again, because the event loop has not acted on it."""
        self._insisting = True
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _interrupt_program(self, frame: FrameType | None) -> None:
        """Interrupt a program that blocks the event loop, but not Trio itself."""
        if self._insisting and not trio.lowlevel.currently_ki_protected():
            self._insisting = False
            raise_in_program(frame, interrupt)

    def _end_here(self, signal_number: signal.Signals, frame: FrameType | None) -> None:
        """End a process in which no world runs in real time."""
        if not trio.lowlevel.in_trio_run():
            raise_in_program(frame, partial(_raise_terminated, signal_number))
            return
        if callable(signal.getsignal(signal.SIGINT)):  # its loop knows what to do with that
            signal.raise_signal(signal.SIGINT)
        else:
            _raise_default(signal_number)

    def _on_state_signal(self, number: int, frame: FrameType | None) -> None:
        """Print the state of each world, by its event loop or, if that is blocked, by a thread."""
        for life in _registered_lives:
            print_state = _call_once(life.print_state)
            self._run_in_loop(life, print_state, print_state)
        if not _registered_lives:
            where = f"its program is at {line_in_thread(threading.get_ident())}" if frame else "its program runs"
            lines = [f"asked by {ASKING.name}, process {os.getpid()}:", f"no world lives here in real time; {where}"]
            # not here: what was interrupted may be about to write, too
            threading.Thread(target=_print_lines, args=(lines,), name="overlap answer").start()

    def _run_in_loop(self, life: Life, do: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Call `do` on the event loop; if that is blocked, call `otherwise` in a thread."""
        timer = threading.Timer(_OBEY_S, otherwise)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

        def run_first() -> None:
            """Call `do` in place of the timer."""
            timer.cancel()
            do()

        with suppress(trio.RunFinishedError):
            life.token.run_sync_soon(run_first)


def _call_once(do: Callable[[], None]) -> Callable[[], None]:
    left = [do]
    return lambda: left.pop()() if left else None


def _raise_terminated(number: signal.Signals, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def _raise_default(number: int) -> None:
    """Raise a signal after a reset to the default handler, which ends the process."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _print_lines(lines: Sequence[str]) -> None:
    notify("\n  ".join(lines))
