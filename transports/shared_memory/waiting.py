"""Waiting for ranks of other processes: looking for a moment, sleeping, and being rung awake.

Only a process that sleeps is rung. An event loop marks itself asleep right before it sleeps, and looks once more; a
process that sends something reads the mark of the other after it has written. Each side writes its own word before it
reads the other's, and a fence keeps the processor from exchanging the two: so either the sleeper sees the packet, or
the sender sees the sleeper.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from select import select
from time import perf_counter
from typing import Protocol

import trio

from transports.common import Waits, Watcher
from transports.patience import LONG_TURN_S, Patience
from transports.shared_memory.ordering import FENCED, fence
from transports.shared_memory.peer_memory import Word

# A look is longer than waking a process takes (0.1 to 0.3 ms on virtual cores): otherwise two processes, of which one
# sleeps whenever the other one looks, never find each other awake. Measured on 2 processes with a core each, 8 bytes
# from threads, in hours in which waking is slow: 0.3 to 0.6 ms with 50 us, 0.1 to 0.2 with 300.
_LOOK_S = 300e-6
# After this the event loop takes over from a thread that naps.
_NAP_S = 0.25

#: Marks of a process: its event loop sleeps, or a thread sleeps in its place.
SLEEPS, NAPS = 1, 2
#: Says whether the scheduler groups processes by session (sched(7)).
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


def sleepers(asleep: Mapping[int, memoryview], members: Sequence[int]) -> Sequence[int]:
    """Return the processes that are marked asleep; all of them where nothing orders reads after writes.

    Args:
        asleep: The marks, by index of the process.
        members: Which processes.
    """
    return [member for member in members if asleep[member][0]] if FENCED else members


class Inlet(Protocol):
    """A way by which packets come and go."""

    @property
    def waits(self) -> bool:
        """Whether packets have come, or there is room again for one that waits; any thread may ask."""

    def look(self) -> None:
        """Act on that."""


class Door(Protocol):
    """The part of the engine that the event loop attends to."""

    def loop(self, *, awake: bool) -> None:
        """Note that the loop has woken, or is about to sleep."""


def looking(others: Sequence[int], cores: int) -> tuple[float, Callable[[], object]]:
    """Return how many seconds to look before sleeping, and the call that yields the core meanwhile.

    Where every process has a core, the core is yielded to threads of this process, otherwise to other processes. Where
    Linux makes each session a scheduling group, a process can only yield to processes of its own session.

    Args:
        others: Ids of the processes that share memory with this one.
        cores: Number of cores that this process may use.
    """
    if len(others) < cores:
        return _LOOK_S, let_threads_run
    grouped = AUTOGROUP.exists() and AUTOGROUP.read_text(encoding="ascii").strip() == "1"
    reached = not grouped or all(_session(other) == os.getsid(0) for other in others)
    return (_LOOK_S if reached else 0.0), os.sched_yield


let_threads_run = partial(select, (), (), (), 0)  # `sleep(0)` sleeps for 50 us and more


def _session(pid: int) -> int | None:
    with suppress(OSError):  # the process is gone
        return os.getsid(pid)
    return None


class Waiting(Waits, trio.abc.Instrument):
    """The waiting of one process for others of its host; other processes ring its bell.

    A caller that is about to wait may look for a moment instead, and yields the core meanwhile.

    Args:
        bell: Descriptor that becomes readable when the process is rung.
        inlets: The ways by which packets come.
        asleep: The mark of the process; the event loop writes it, or a thread that has taken its place.
        word: The word on which such a thread sleeps; None: it does not sleep.
        look_s: Longest look.
        let_run: Yields the core between two looks.
        door: Hears when the event loop sleeps and wakes.
    """

    def __init__(
        self,
        bell: int,
        inlets: Sequence[Inlet],
        asleep: memoryview,
        word: Word | None,
        *,
        look_s: float,
        let_run: Callable[[], object],
        door: Door | None = None,
    ) -> None:
        self._door = door
        self._bell, self._inlets, self._asleep, self._word = bell, inlets, asleep, word
        self._watchers: dict[Watcher, None] = {}
        self._naps = False  # a thread naps, as long as its watcher is the only one
        self._let_run = let_run
        self._sleeps = False  # the event loop sleeps, or is about to
        self._patience = Patience(look_s)

    # -- watchers ------------------------------------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        """Add a watcher, which looks whenever the process is rung."""
        self._watchers[watcher] = None
        if len(self._watchers) > 1:
            self._end_nap()

    def unwatch(self, watcher: Watcher) -> None:
        """Remove a watcher that `watch` added."""
        self._watchers.pop(watcher, None)
        if not self._watchers:
            self._end_nap()

    def look(self) -> None:
        """Act on packets, and let every watcher look."""
        for inlet in self._inlets:
            inlet.look()
        for watcher in tuple(self._watchers):
            watcher.look()

    @property
    def _packets_wait(self) -> bool:
        for inlet in self._inlets:  # noqa: SIM110 - in every look of a thread, and twice as fast
            if inlet.waits:
                return True
        return False

    # -- looking instead of sleeping -----------------------------------------------------------------------------------

    def wait(self, watcher: Watcher) -> bool:
        """Return whether a watcher can go on, after a look if looks have helped lately; the loop's thread only."""
        if watcher.others_came:
            return True
        patience_s = self._patience.take()
        return patience_s > 0 and self._linger(watcher, patience_s)

    def _linger(self, watcher: Watcher, patience_s: float) -> bool:
        """Return whether a watcher can go on within so many seconds."""
        now = perf_counter()
        until = now + patience_s
        while not (watcher.others_came or self._packets_wait):
            if now > until:
                self._patience.learn(came=False)
                return False
            before = now
            self._let_run()
            now = perf_counter()
            if now - before > LONG_TURN_S:
                self._patience.give_up()
                return watcher.others_came or self._packets_wait
        self._patience.learn(came=True)
        return True

    # -- a thread in place of the event loop ---------------------------------------------------------------------------

    def rouse(self, watcher: Watcher) -> bool:
        """Clear the marks, because a thread looks in place of the sleeping loop; False if more wait, or one naps."""
        alone = self._watchers.keys() <= {watcher} and not self._naps
        if alone:
            self._asleep[0] = 0
        return alone

    def doze(self) -> None:
        """Let this process be rung again; its watcher must look now."""
        self._mark_asleep()

    def alone(self, watcher: Watcher) -> bool:
        """Whether no other watcher is here, and no packet waits."""
        return self._watchers.keys() <= {watcher} and not self._packets_wait

    def _mark_asleep(self) -> None:
        self._asleep[0] = SLEEPS
        fence()

    def linger(self, watcher: Watcher, longest_s: float | None) -> bool:
        """Return whether a watcher can go on after a look and then a nap; in a thread, after `rouse`."""
        patience_s = self._patience.take()
        return (patience_s > 0 and self._linger(watcher, patience_s)) or self._nap(watcher, longest_s)

    def _nap(self, watcher: Watcher, longest_s: float | None) -> bool:
        """Sleep on the word while the watcher is the only one; return whether it can go on."""
        word = self._word
        until = perf_counter() + (_NAP_S if longest_s is None else min(_NAP_S, longest_s))
        if word is None or self._naps:  # a second thread that waits for the same operation
            return False
        self._naps = True
        try:
            while True:
                seen = word.value
                self._asleep[0] = NAPS
                fence()
                if watcher.others_came or self._packets_wait:
                    return True
                left_s = until - perf_counter()
                if not (self._naps and watcher in self._watchers and len(self._watchers) == 1) or left_s <= 0:
                    return False
                word.wait(seen, left_s)
        finally:
            self._naps = False
            self._asleep[0] = 0

    def _end_nap(self) -> None:
        if self._naps and self._word is not None:
            self._naps = False
            self._word.wake()

    # -- the event loop ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Let every watcher look whenever the process is rung."""
        trio.lowlevel.add_instrument(self)
        try:
            while True:
                await trio.lowlevel.wait_readable(self._bell)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                self.look()
        finally:
            trio.lowlevel.remove_instrument(self)

    def before_io_wait(self, timeout: float) -> None:
        """Mark the loop asleep before it sleeps, unless there is something to do."""
        if timeout > 0:
            self._sleeps = True  # first: a thread that waits from here on sees it
            if self._door is not None:
                self._door.loop(awake=False)
        if self._naps:
            return
        if timeout > 0:
            self._mark_asleep()
        if self._packets_wait or any(watcher.others_came for watcher in tuple(self._watchers)):
            self._ring_here()

    def after_io_wait(self, timeout: float) -> None:
        """Clear the marks: the loop runs."""
        if self._sleeps:
            self._sleeps = False
            if self._door is not None:
                self._door.loop(awake=True)
            if not self._naps:
                self._asleep[0] = 0

    def _ring_here(self) -> None:
        with suppress(BlockingIOError):  # the bell has been rung more often than it can count
            os.eventfd_write(self._bell, 1)
