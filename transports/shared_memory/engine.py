"""The engine of a process: compiled code that moves messages and collectives between processes of one host.

It exists if `native/` was compiled at installation, which needs a compiler and the headers of Python. The program of a
collective is a `Table`, the rows in which ranks match it a `Board`, and one rank's end of it a `Run`.

A message is a number of bytes with a tag, a lane (the two ranks) and a signature (`transports.signature`). It matches
the oldest receive of its tag and lane, from its sender or from any source, and messages of one tag and lane from one
process stay in order. Two ends with different signatures or lengths fail. The owner of an `Op` or a `Run`, if there is
one, is notified of its end on the event loop.

A waiting thread moves the bytes of all messages under way in its process; while none waits, a thread of the engine or
the event loop does. A ring of memory leads from each process to each other; a long message goes through it in pieces.

A receiver keeps messages that arrive before their receives in bounded memory, so that they delay no others: messages
longer than a ring, and more than four rings of shorter ones, are offered, and their bytes are sent when a receive asks.
A peer that writes invalid data into the shared memory ends all messages with it: their state is `CORRUPT`, and the peer
is the `source` of the receives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, cast

import trio

try:
    from transports.shared_memory._native import Board as Board
    from transports.shared_memory._native import Engine as Engine
    from transports.shared_memory._native import Op as Op
    from transports.shared_memory._native import Run as Run
    from transports.shared_memory._native import Table as Table
except ImportError:  # not compiled
    BUILT = False
else:
    BUILT = True

#: Memory of the messages from one process to another.
RING_BYTES = 1 << 20

# States of one end of a message or a collective, as native/engine.h numbers them.
PENDING, DONE, MISMATCH, LOST, WITHDRAWN, NO_MEMORY, CORRUPT, HOMELESS, CANCELLED, SIZED = range(10)

# Number of polls of the engine before other tasks may run.
_TURNS = 16

# Offsets from the end of a segment, each in a cache line of its own.
_BELLS_AT, _LINE_BYTES = -512, 64


def bells(segment: memoryview) -> memoryview:
    """Return the words of a segment that wake its process."""
    return segment[_BELLS_AT : _BELLS_AT + _LINE_BYTES]


class EngineOwner(Protocol):
    """Owner of a collective or of a message of a rank, notified of its end."""

    def on_end(self) -> None:
        """Handle the end; the event loop's thread only."""


class EngineEvents(trio.abc.Instrument):
    """Deliverer of ends and notes of the engine that no thread waits for, on the event loop.

    The engine must wake the loop only while it sleeps.

    Args:
        engine: Engine of this process.
        bell: Descriptor that becomes readable when there is an end or a note.
        on_note: Handles a note: the number of a process and three integers.
    """

    def __init__(self, engine: Engine, bell: int, on_note: Callable[[int, int, int, int], None]) -> None:
        self._engine, self._bell, self._on_note = engine, bell, on_note
        self._sleeps = False
        self._probes: dict[Callable[[], None], None] = {}

    def deliver_events(self) -> bool:
        """Deliver ends and notes to their owners; return whether there were any. The event loop's thread only."""
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
            os.eventfd_write(self._bell, 1)
        return delivered

    @contextmanager
    def probing(self, look: Callable[[], None]) -> Iterator[None]:
        """Call `look` whenever messages without a receive may have arrived, for the length of a block."""
        self._engine.probe(True)
        self._probes[look] = None
        try:
            yield
        finally:
            self._probes.pop(look, None)
            self._engine.probe(False)

    def call_probes(self) -> None:
        """Call the functions of all `probing` blocks."""
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
                    self.call_probes()
        finally:
            trio.lowlevel.remove_instrument(self)

    def before_io_wait(self, timeout: float) -> None:
        """Let the engine wake the loop, which is about to sleep."""
        if timeout > 0:
            self._sleeps = True
            self._engine.loop(False)

    def after_io_wait(self, timeout: float) -> None:
        """Let the engine leave deliveries to the loop, which is awake."""
        if self._sleeps:
            self._sleeps = False
            self._engine.loop(True)
