"""Signals of this process: SIGTERM and SIGHUP end it in order, SIGUSR1 prints the state of its worlds.

Schedulers end jobs with SIGTERM and a grace. By default a process dies of it on the spot: no `finally` runs, and no
trace is written. Here the worlds of this process are cancelled, those of other processes are told, and the process
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
from typing import TYPE_CHECKING

import trio

from .diagnostics import is_interrupt, place_of
from .errors import RankFailedError, RemoteError
from .flight.folder import open_records
from .notice import notify

if TYPE_CHECKING:
    from .runtime.world import World

ASKING = signal.SIGUSR1
_ENDING = (signal.SIGTERM, signal.SIGHUP)
# An event loop that runs obeys within milliseconds.
_INSIST_S = 1.0


class Terminated(SystemExit):
    """The process was told to end, and has; the exit code is 128 plus the number of the signal, as shells count.

    Attributes:
        number: The signal.
        kept: The saved state of the world, as the end of a sentence; empty if there is none.
    """

    number: signal.Signals
    kept: str

    def __init__(self, number: signal.Signals, kept: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.kept = number, kept


class Life:
    """A world on the event loop that runs here, from before it has met others to its end.

    Attributes:
        world: The world, once there is one.
    """

    def __init__(self) -> None:
        self.world: World | None = None
        self.token: trio.lowlevel.TrioToken = trio.lowlevel.current_trio_token()
        self.scope: trio.CancelScope = trio.CancelScope()

    def end(self, number: signal.Signals) -> None:
        """Cancel it."""
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


_lives: list[Life] = []
_obedient: list[_Obedience] = []  # at most one


def _before_fork() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDING, ASKING})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_ENDING, ASKING})


def _in_fork() -> None:
    """Let a fork of this process end of a signal at once, as it would without us: it is no rank."""
    for obedience in _obedient:
        obedience.release()
    _obedient.clear()
    _after_fork()


# Signals are blocked during a fork: the interpreter forgets signals that a new process receives before it starts.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_fork)


@contextmanager
def living() -> Iterator[Life]:
    """Let signals reach a world that lives on this event loop for the block.

    Raises:
        Terminated: If one has ended it.
    """
    life = Life()
    _lives.append(life)
    try:
        with life.scope:
            yield life
    finally:
        _lives.remove(life)
    _check()


@contextmanager
def obeying(*, quiet: bool = False) -> Iterator[None]:
    """Obey signals while the main thread runs the block; inside another such block, that one does.

    Args:
        quiet: The caller tells the user that the process was told to end.

    Raises:
        Terminated: If it was.
    """
    if _obedient or threading.current_thread() is not threading.main_thread():
        yield
        _check()
        return
    obedience = _Obedience()
    _obedient.append(obedience)
    try:
        with obedience.handling():
            yield
        _check()
    except BaseException as error:
        if obedience.asked is None or not _follows(error, obedience.asked):
            raise
        if not quiet:
            notify(f"ended by {obedience.asked.name}{obedience.where}{obedience.kept()}")
        raise Terminated(obedience.asked, obedience.kept()) from None
    finally:
        _obedient.clear()
        obedience.close()


def _check() -> None:
    """Raise if a signal asked this process to end, so that the program does not go on."""
    if _obedient and _obedient[0].asked is not None:
        raise Terminated(_obedient[0].asked)


def _follows(error: BaseException, number: signal.Signals) -> bool:
    """Whether an error follows from the signal, here or in another process that got it sooner."""
    if isinstance(error, RankFailedError):
        return isinstance(error.cause, RemoteError) and error.cause.type_name == number.name
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup((Terminated, KeyboardInterrupt)) is not None
    return isinstance(error, Terminated) or is_interrupt(error)


class _Obedience:
    """Signals that this process has got, and their effect.

    Attributes:
        asked: The signal that was the first to ask it to end.
        where: In which step that was.
        kept: Says what is saved by now.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.where = ""
        self.kept: Callable[[], str] = str
        self._handlers = {**dict.fromkeys(_ENDING, self._end), ASKING: self._print_states}
        self._taken: list[signal.Signals] = []
        self._insisting = False
        self._timers: list[threading.Timer] = []

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle for the block the signals that have no handler."""
        self._taken = [number for number in self._handlers if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._taken:
            signal.signal(number, self._handlers[number])
        # a launcher has it held back until here: to a process that is still starting it would be the end
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASKING})
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Give the signals back."""
        for number in self._taken:
            if signal.getsignal(number) == self._handlers[number]:
                signal.signal(number, signal.SIG_DFL)

    def close(self) -> None:
        """Stop the timers."""
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            self._insist()
            return
        self.asked = signal.Signals(number)
        for life in _lives:
            if life.world is not None:
                self.where = life.world.reports.steps()
                self.kept = life.world.reports.kept
            self._soon(life, partial(life.end, self.asked), partial(self._repeat, self.asked))
        if not _lives:
            self._end_here(self.asked)

    def _repeat(self, number: signal.Signals) -> None:
        """Let the main thread hear it again, now that it has not obeyed."""
        self._insisting = True
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _insist(self) -> None:
        """Interrupt a program that blocks the event loop, in the loop's thread; Trio itself must not be interrupted."""
        if self._insisting and not trio.lowlevel.currently_ki_protected():
            self._insisting = False
            raise KeyboardInterrupt

    def _end_here(self, signal_number: signal.Signals) -> None:
        """End a process in which no world lives in real time."""
        if not trio.lowlevel.in_trio_run():
            raise Terminated(signal_number)
        if callable(signal.getsignal(signal.SIGINT)):  # its loop knows what to do with that
            signal.raise_signal(signal.SIGINT)
        else:
            _as_if_unhandled(signal_number)

    def _print_states(self, number: int, frame: FrameType | None) -> None:
        for life in _lives:
            print_state = _once(life.print_state)
            self._soon(life, print_state, print_state)
        if not _lives:
            where = f"its program is at {place_of(threading.get_ident())}" if frame else "its program runs"
            lines = [f"asked by {ASKING.name}, process {os.getpid()}:", f"no world lives here in real time; {where}"]
            # not here: what was interrupted may be about to write, too
            threading.Thread(target=_print_lines, args=(lines,), name="overlap answer").start()

    def _soon(self, life: Life, do: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Let the event loop do something; if it does not come to it, do something else from a thread."""
        timer = threading.Timer(_INSIST_S, otherwise)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

        def first() -> None:
            timer.cancel()
            do()

        with suppress(trio.RunFinishedError):
            life.token.run_sync_soon(first)


def _once(do: Callable[[], None]) -> Callable[[], None]:
    left = [do]
    return lambda: left.pop()() if left else None


def _as_if_unhandled(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _print_lines(lines: Sequence[str]) -> None:
    notify("\n  ".join(lines))
