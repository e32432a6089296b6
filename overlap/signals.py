"""Signals of this process: SIGTERM and SIGHUP end it in order, SIGUSR1 prints the state of its worlds.

Schedulers end jobs with SIGTERM and a grace period. By default a process ends at once: no `finally` runs, and no trace
is written. Here the worlds of this process are cancelled, other processes are notified, and the process exits with 128
plus the number of the signal. A program that blocks the event loop for longer than a second gets a `KeyboardInterrupt`
at its present line, as from Ctrl-C. A second signal changes nothing: schedulers send signals to launchers and processes
alike, so that a process receives two.

SIGUSR1 ends nothing: it prints to stderr which rank waits for which, and the tasks of each rank with file and line.

A signal for which the program has a handler stays with the program. The handlers here are installed as long as a world
lives or the launcher's program runs.
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
from .runtime.interrupts import deferring_interrupts, raise_in_program, raise_keyboard_interrupt

if TYPE_CHECKING:
    from .runtime.world import World

STATE_SIGNAL = signal.SIGUSR1  # prints the state of the worlds
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # end the process
# Seconds until an event loop that has not acted counts as blocked; a free one acts within milliseconds.
_BLOCKED_AFTER_S = 1.0


class Terminated(SystemExit):
    """A signal has ended the process in order; the exit code is 128 plus the number of the signal, as in shells.

    Attributes:
        number: The signal.
        saved_state_text: Text on the saved state of the world, as the end of a sentence; "" if none is saved.
    """

    def __init__(self, number: signal.Signals, saved_state_text: str = "") -> None:
        super().__init__(128 + number)
        self.number = number
        self.saved_state_text = saved_state_text


class LiveWorld:
    """A world on this event loop that signals can reach, from before its processes meet until its end.

    Attributes:
        world: The world; None until its processes have met.
        token: The event loop, for calls from signal handlers.
        scope: Cancels the whole run.
    """

    def __init__(self) -> None:
        self.world: World | None = None
        self.token: trio.lowlevel.TrioToken = trio.lowlevel.current_trio_token()
        self.scope: trio.CancelScope = trio.CancelScope()

    def end_by_signal(self, number: signal.Signals) -> None:
        """End the world because of a signal: other processes are notified, and the run here is cancelled."""
        if self.world is not None:
            self.world.report_signal(number.name)
        self.scope.cancel(reason=f"told to end by {number.name}")

    def print_state(self) -> None:
        """Print the state of the world to stderr."""
        lines = ["the processes have not met"]
        if self.world is not None:
            reports = self.world.reports
            lines = [*reports.view_lines(reports.present_views()), "tasks:", *reports.task_tree_lines()]
            lines += [f"flight record: {path} (`overlap why` reads it)" for path in open_records()]
        _print_lines([f"asked by {STATE_SIGNAL.name}, process {os.getpid()}:", *lines])


_live_worlds: list[LiveWorld] = []
_installed_handlers: list[_SignalHandlers] = []  # at most one


def _before_fork() -> None:
    """Block our signals during a fork."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_END_SIGNALS, STATE_SIGNAL})


def _after_fork() -> None:
    """Unblock our signals after a fork."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_END_SIGNALS, STATE_SIGNAL})


def _restore_in_fork() -> None:
    """Restore the default handlers in a forked child, which runs no ranks, and unblock our signals."""
    for handlers in _installed_handlers:
        handlers.release()
    _installed_handlers.clear()
    _after_fork()


# Signals are blocked during a fork: Python discards signals that the child receives before it runs.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_restore_in_fork)


@contextmanager
def registered_world() -> Iterator[LiveWorld]:
    """Let signals reach the world that the block runs on this event loop; the block sets `LiveWorld.world`.

    Raises:
        Terminated: A signal has ended the world.
    """
    with deferring_interrupts():
        live_world = LiveWorld()
        _live_worlds.append(live_world)
        try:
            with live_world.scope:
                yield live_world
        finally:
            _live_worlds.remove(live_world)
    _raise_if_ending()


@contextmanager
def handling_signals(*, quiet: bool = False) -> Iterator[None]:
    """Install the signal handlers during the block. In a nested block, and in other threads, nothing is installed.

    Args:
        quiet: Whether to leave the report of the signal to the caller; otherwise it is printed here.

    Raises:
        Terminated: A signal has ended the block.
    """
    if _installed_handlers or threading.current_thread() is not threading.main_thread():
        yield
        _raise_if_ending()
        return
    handlers = _SignalHandlers()
    try:
        _installed_handlers.append(handlers)
        handlers.install()
        yield
        _raise_if_ending()
    except BaseException as error:
        if handlers.first_signal is None or not _follows_from_signal(error, handlers.first_signal):
            raise
        if not quiet:
            notify(f"ended by {handlers.first_signal.name}{handlers.steps_text}{handlers.saved_step_text()}")
        raise Terminated(handlers.first_signal, handlers.saved_step_text()) from None
    finally:
        try:
            handlers.close()
        finally:
            handlers.close()  # again, as Ctrl-C may have interrupted the first call


def _raise_if_ending() -> None:
    """Raise `Terminated` if a signal has requested the end of this process, so that the program does not continue."""
    if _installed_handlers and _installed_handlers[0].first_signal is not None:
        raise Terminated(_installed_handlers[0].first_signal)


def _follows_from_signal(error: BaseException, number: signal.Signals) -> bool:
    """Whether an error is a consequence of the signal, which another process may have received before this one."""
    if isinstance(error, RankFailedError):
        return isinstance(error.cause, RemoteError) and error.cause.type_name == number.name
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup((Terminated, KeyboardInterrupt)) is not None
    return isinstance(error, Terminated) or is_interrupt(error)


class _SignalHandlers:
    """Handlers of the signals of this process.

    Attributes:
        first_signal: First signal that requested the end of the process; None: no signal has.
        steps_text: Steps of the ranks when this signal arrived, as text for the report.
        saved_step_text: Returns text on the saved state of the world, for the report.
    """

    def __init__(self) -> None:
        self.first_signal: signal.Signals | None = None
        self.steps_text = ""
        self.saved_step_text: Callable[[], str] = str
        self._handlers = {**dict.fromkeys(_END_SIGNALS, self._on_end_signal), STATE_SIGNAL: self._on_state_signal}
        self._handled: list[signal.Signals] = []
        self._has_sent_again = False
        self._timers: list[threading.Timer] = []

    def install(self) -> None:
        """Install our handlers for those of our signals that have the default handler, and unblock `STATE_SIGNAL`."""
        self._handled = [number for number in self._handlers if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._handled:
            signal.signal(number, self._handlers[number])
        # The launcher has started this process with `STATE_SIGNAL` blocked, as its default handler ends a process.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {STATE_SIGNAL})

    def release(self) -> None:
        """Restore the default handlers of the signals."""
        for number in self._handled:
            if signal.getsignal(number) == self._handlers[number]:
                signal.signal(number, signal.SIG_DFL)

    def close(self) -> None:
        """Restore the handlers, and stop the timers; a second call is harmless."""
        self.release()
        _installed_handlers.clear()
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _on_end_signal(self, number: int, frame: FrameType | None) -> None:
        """End all worlds at the first signal; interrupt the program at a repeated one."""
        if self.first_signal is not None:
            # `_send_signal_again` has sent it: the loop is blocked. Interrupt the program, but not code of Trio.
            if self._has_sent_again and not trio.lowlevel.currently_ki_protected():
                self._has_sent_again = False
                raise_in_program(frame, raise_keyboard_interrupt)
            return
        self.first_signal = signal.Signals(number)
        for live_world in _live_worlds:
            if live_world.world is not None:
                self.steps_text = live_world.world.reports.steps_text()
                self.saved_step_text = live_world.world.reports.saved_step_text
            self._run_in_loop_or_thread(
                live_world,
                partial(live_world.end_by_signal, self.first_signal),
                partial(self._send_signal_again, self.first_signal),
            )
        if not _live_worlds:
            self._end_without_world(self.first_signal, frame)

    def _send_signal_again(self, number: signal.Signals) -> None:
        """Send the signal to the main thread again: its handler then interrupts the program, which blocks the loop."""
        self._has_sent_again = True
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _end_without_world(self, signal_number: signal.Signals, frame: FrameType | None) -> None:
        """End a process in which no world runs in real time."""
        if not trio.lowlevel.in_trio_run():
            raise_in_program(frame, partial(_raise_terminated, signal_number))
            return
        if callable(signal.getsignal(signal.SIGINT)):  # Trio's own handler cancels the program
            signal.raise_signal(signal.SIGINT)
        else:
            signal.signal(signal_number, signal.SIG_DFL)  # which ends the process
            signal.raise_signal(signal_number)

    def _on_state_signal(self, number: int, frame: FrameType | None) -> None:
        """Print the state of each world, by its event loop or, if that is blocked, by a thread."""
        for live_world in _live_worlds:
            print_state = _make_once_only(live_world.print_state)
            self._run_in_loop_or_thread(live_world, print_state, print_state)
        if not _live_worlds:
            where = f"its program is at {line_in_thread(threading.get_ident())}" if frame else "its program runs"
            lines = [
                f"asked by {STATE_SIGNAL.name}, process {os.getpid()}:",
                f"no world lives here in real time; {where}",
            ]
            # In a thread: the signal may have interrupted a write to stderr, in which another write would fail.
            threading.Thread(target=_print_lines, args=(lines,), name="overlap answer").start()

    def _run_in_loop_or_thread(
        self, live_world: LiveWorld, do: Callable[[], None], otherwise: Callable[[], None]
    ) -> None:
        """Call `do` on the event loop of a world.

        If the loop is blocked for `_BLOCKED_AFTER_S`, call `otherwise` in a thread, and `do` late.
        """
        timer = threading.Timer(_BLOCKED_AFTER_S, otherwise)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

        def cancel_timer_and_run() -> None:
            timer.cancel()
            do()

        with suppress(trio.RunFinishedError):
            live_world.token.run_sync_soon(cancel_timer_and_run)


def _make_once_only(do: Callable[[], None]) -> Callable[[], None]:
    """Return a function whose first call, from any thread, calls `do`; further calls do nothing."""
    left = [do]  # `pop` is atomic
    return lambda: left.pop()() if left else None


def _raise_terminated(number: signal.Signals, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def _print_lines(lines: Sequence[str]) -> None:
    notify("\n  ".join(lines))
