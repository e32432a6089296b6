"""The engine of a process: compiled code that moves messages and collectives between processes of one host.

The engine exists if `native/` was compiled at installation, which needs a compiler and the headers of Python. Its
classes: `Op` is a send or receive under way. A `Table` is the program of a collective, a `Board` has the rows in which
ranks match collectives, and a `Run` is one rank's part of a collective under way.

A message has bytes, a tag, a lane (the two ranks) and a signature (`transports.signature`). It matches the oldest
receive of its tag and lane; messages of one tag and lane stay in order. If signatures or lengths differ, both ends
fail. At the end of an `Op` or a `Run`, the event loop calls `on_end` of its owner, if it has one.

A waiting thread moves the bytes of all messages under way in its process. While no thread waits, a thread of the engine
or the event loop moves them. From each process to each other one leads a ring buffer in shared memory; a long message
goes through it in pieces.

A receiver keeps messages that arrive before their receives in bounded memory, so that they delay no others. Messages
longer than a ring, and those beyond four rings of shorter ones, are offered instead: their bytes leave when a receive
asks for them. If a peer writes invalid data into the shared memory, all messages with it end in the state `CORRUPT`,
and the `source` of the receives is the peer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol, cast

import trio

#: Version of the interface between this package and the compiled code; `native/module.c` has the same number.
INTERFACE = 5

try:
    import transports.shared_memory._native as _native
    from transports.shared_memory._native import Board as Board
    from transports.shared_memory._native import Engine as Engine
    from transports.shared_memory._native import Op as Op
    from transports.shared_memory._native import Run as Run
    from transports.shared_memory._native import Table as Table
except ImportError:  # not compiled
    BUILT = STALE = False
else:
    STALE = getattr(_native, "INTERFACE", 1) != INTERFACE  # a checkout that is newer than its compiled code
    BUILT = not STALE
    if BUILT:
        from transports.shared_memory._native import address_of as address_of
        from transports.shared_memory._native import copy_uncached as copy_uncached

#: Length of the ring buffer for messages from one process to another: of 1 MiB, with a page for its counts and a head.
RING_BYTES = (1 << 20) + 4096

# States of one end of a message or a collective, as native/engine.h numbers them.
PENDING, DONE, MISMATCH, LOST, WITHDRAWN, NO_MEMORY, CORRUPT, HOMELESS, CANCELLED, SIZED = range(10)

# Longest run of deliveries before other tasks may run.
_TURNS = 16

# The words that wake a process: their offset from the end of its segment, and their length, a cache line.
_BELLS_AT, _LINE_BYTES = -512, 64


def bells(segment: memoryview) -> memoryview:
    """Return the words of a segment that other processes write to wake its owner."""
    return segment[_BELLS_AT : _BELLS_AT + _LINE_BYTES]


class Way(NamedTuple):
    """The memory through which an engine exchanges messages with another process, and the way to wake it."""

    ring_out: memoryview  # Ring of the messages to the other process
    ring_in: memoryview  # Ring of the messages from the other process
    bells: memoryview  # Words of the other process's segment that wake it
    bell: int  # Descriptor that wakes the other process's event loop


class EngineOwner(Protocol):
    """Owner of a collective or of a message of a rank, notified of its end."""

    def on_end(self) -> None:
        """Handle the end; the event loop's thread only."""


class EngineEvents(trio.abc.Instrument):
    """Delivers ends of operations, and notes of other processes, from the engine to their owners on the event loop.

    As an instrument of Trio, it reports to the engine whether the loop sleeps: the engine wakes the loop only then.

    Args:
        engine: Engine of this process.
        bell: Descriptor that becomes readable when there is an end or a note.
        on_note: Called with the index of the process that has sent a note, and the three integers of the note.
    """

    def __init__(self, engine: Engine, bell: int, on_note: Callable[[int, int, int, int], None]) -> None:
        self._engine, self._bell, self._on_note = engine, bell, on_note
        self._sleeps = False
        self._probes: dict[Callable[[], None], None] = {}

    def deliver_events(self) -> bool:
        """Deliver all ends and notes that have arrived; return whether there were any. The event loop's thread only."""
        delivered = False
        for _ in range(_TURNS):  # an end that a callback causes is delivered in the next turn
            owners, notes = self._engine.take_ended()
            if not owners and not notes:
                return delivered
            delivered = True
            for owner in owners:
                cast("EngineOwner", owner).on_end()
            for note in notes:
                self._on_note(*note)
        with suppress(BlockingIOError):
            # After `_TURNS` turns there may be more: the bell wakes `run` again, after other tasks have run.
            os.eventfd_write(self._bell, 1)
        return delivered

    @contextmanager
    def watch_arrivals(self, look: Callable[[], None]) -> Iterator[None]:
        """Call `look` whenever messages without a receive may have arrived, for the length of a block."""
        self._engine.probe(True)
        self._probes[look] = None
        try:
            yield
        finally:
            self._probes.pop(look, None)
            self._engine.probe(False)

    def notify_arrival_watchers(self) -> None:
        """Call the functions of all `watch_arrivals` blocks."""
        for look in tuple(self._probes):
            look()

    async def run(self) -> None:
        """Deliver ends and notes whenever the bell is readable, until cancelled."""
        trio.lowlevel.add_instrument(self)
        try:
            while True:
                await trio.lowlevel.wait_readable(self._bell)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                self.deliver_events()
                if self._probes:
                    self.notify_arrival_watchers()
        finally:
            trio.lowlevel.remove_instrument(self)

    def before_io_wait(self, timeout: float) -> None:
        """Report to the engine that the loop goes to sleep, unless `timeout` is 0. Trio calls it."""
        if timeout > 0:
            self._sleeps = True
            # the argument is whether the loop is awake
            self._engine.loop(False)

    def after_io_wait(self, timeout: float) -> None:
        """Report to the engine that the loop is awake, if it slept. Trio calls it."""
        if self._sleeps:
            self._sleeps = False
            self._engine.loop(True)
