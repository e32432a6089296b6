"""The watchman of a process: lets those look who wait for ranks elsewhere, and has this process rung while it sleeps.

Nobody is rung who does not sleep. A loop says so right before it sleeps, and looks once more; who posts something looks
whether the others sleep after it has written. Each writes its own word before it reads the other's, and a fence keeps
the processor from turning that round: so the one sees what was posted, or the other that somebody sleeps.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from select import select
from time import perf_counter

import trio

from transports.common import Watcher
from transports.patience import LONG_TURN_S, Patience
from transports.shared_memory.board import Boards, fence
from transports.shared_memory.word import Word

# A moment is longer than waking a process takes (0.1 to 0.3 ms on virtual cores): else two that sleep whenever the
# other one looks never find each other awake. Measured on 2 processes with a core each, 8 bytes from threads, in hours
# in which waking is slow: 0.3 to 0.6 ms with 50 us, 0.1 to 0.2 with 300.
_LOOK_S = 300e-6
# A thread that naps for longer leaves it to the loop to wake it.
_NAP_S = 0.25

#: What a process says of itself that sleeps: its loop does, or a thread instead.
SLEEPS, NAPS = 1, 2
#: Says whether the scheduler groups processes by session (sched(7)).
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")

#: Whether taking and releasing a lock orders what processors see.
FENCED = platform.machine() in ("x86_64", "AMD64")


def sleepers(asleep: Mapping[int, memoryview], members: Sequence[int]) -> Sequence[int]:
    """Return which of some processes sleep, each of which says so in a word; all, if nothing orders what is seen."""
    return [member for member in members if asleep[member][0]] if FENCED else members


def looking(others: Sequence[int], cores: int) -> tuple[float, Callable[[], object]]:
    """Return for how many seconds it may be worth to look before sleeping, and what lets others run meanwhile.

    Where every process has a core, those are threads of this one. Else they are processes, which takes nothing from
    whom it waits for; but where Linux makes each session a scheduling group, a process lets only those of its own
    session run.

    Args:
        others: Ids of the processes that share memory with this one.
        cores: That this process may use.
    """
    if len(others) < cores:
        return _LOOK_S, let_threads_run
    grouped = AUTOGROUP.exists() and AUTOGROUP.read_text(encoding="ascii").strip() == "1"
    reached = not grouped or all(_session(other) == os.getsid(0) for other in others)
    return (_LOOK_S if reached else 0.0), os.sched_yield


let_threads_run = partial(select, (), (), (), 0)  # `sleep(0)` sleeps for 50 us and more


def _session(pid: int) -> int | None:
    with suppress(OSError):  # it is gone
        return os.getsid(pid)
    return None


class Watchman(trio.abc.Instrument):
    """One for each process. Whoever rings writes to its bell.

    Who is about to wait may look for a moment instead, and lets others run meanwhile.

    Args:
        boards: Of this process.
        bell: Descriptor that becomes readable when somebody rings.
        asleep: Says whether somebody needs to. The loop writes it, or a thread that has taken its place.
        word: On which a thread sleeps that has taken its place; None: it does not.
        look_s: How long to look at most.
        let_run: Lets others run, between two looks.
    """

    def __init__(
        self,
        boards: Boards,
        bell: int,
        asleep: memoryview,
        word: Word | None,
        *,
        look_s: float,
        let_run: Callable[[], object],
    ) -> None:
        self._boards, self._bell, self._asleep, self._word = boards, bell, asleep, word
        self._naps = False  # a thread, as long as the only one who waits is whom it looks for
        self._let_run = let_run
        self._sleeps = False  # the loop, or it is about to
        self._patience = Patience(look_s)
        boards.watchman = self

    # -- what boards ask for -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take note that somebody waits, and nobody did: if the loop sleeps, that is a thread."""
        if self._sleeps:
            self.doze()
            self._boards.look()  # who came before could not know that this process wants to be rung

    def rest(self) -> None:
        """Take note that nobody waits any more."""
        if self._sleeps:
            self._asleep[0] = 0
        self.disturb()

    def disturb(self) -> None:
        """Let a thread nap no longer: what it looks for is over, or somebody else waits, too."""
        if self._naps and self._word is not None:
            self._naps = False
            self._word.wake()

    def patience(self) -> float:
        """Return for how many seconds it is worth to look before sleeping, 0 if it is not; `linger` follows then."""
        return self._patience.take()

    def linger(self, watcher: Watcher, patience_s: float) -> bool:
        """Return whether somebody can go on within so many seconds."""
        now = perf_counter()
        until = now + patience_s
        while not watcher.others_came:
            if now > until:
                self._patience.learn(came=False)
                return False
            before = now
            self._let_run()
            now = perf_counter()
            if now - before > LONG_TURN_S:
                self._patience.give_up()
                return watcher.others_came
        self._patience.learn(came=True)
        return True

    def nap(self, watcher: Watcher, longest_s: float | None) -> bool:
        """Return whether somebody can go on, who waits alone, when rung or after a while; in a thread after `rouse`."""
        word, watching = self._word, self._boards.watching
        until = perf_counter() + (_NAP_S if longest_s is None else min(_NAP_S, longest_s))
        if word is None:
            return False
        self._naps = True
        try:
            while True:
                seen = word.value
                self._asleep[0] = NAPS
                fence()
                if watcher.others_came:
                    return True
                left_s = until - perf_counter()
                if not (self._naps and watcher in watching and len(watching) == 1) or left_s <= 0:
                    return False
                word.wait(seen, left_s)
        finally:
            self._naps = False
            self._asleep[0] = 0

    def rouse(self) -> None:
        """Be rung no more, for a thread looks instead of the loop, which sleeps."""
        self._asleep[0] = 0

    def doze(self) -> None:
        """Be rung again."""
        self._asleep[0] = SLEEPS
        fence()

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Let those look who wait, whenever somebody has rung."""
        trio.lowlevel.add_instrument(self)
        try:
            while True:
                await trio.lowlevel.wait_readable(self._bell)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                self._boards.look()
        finally:
            trio.lowlevel.remove_instrument(self)

    def before_io_wait(self, timeout: float) -> None:
        """Have this process rung while its loop sleeps, unless somebody can go on."""
        if timeout > 0:
            self._sleeps = True  # first: a thread that waits from here on sees it
        watching = self._boards.watching
        if watching and not self._naps:
            if timeout > 0:
                self.doze()
            for watcher in tuple(watching):
                if watcher.others_came:
                    self._ring_here()
                    return

    def after_io_wait(self, timeout: float) -> None:
        """Be rung no more: the loop runs."""
        if self._sleeps:
            self._sleeps = False
            if not self._naps:
                self._asleep[0] = 0

    def _ring_here(self) -> None:
        with suppress(BlockingIOError):  # it has been rung more often than anybody can count
            os.eventfd_write(self._bell, 1)
