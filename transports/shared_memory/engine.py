"""The engine of a process: what its threads move between processes of one host, in compiled code.

It is there if `native/` was compiled at installation, which needs a compiler and the headers of Python. It carries
messages, and collectives: what each rank takes from whom is a `Table`, the rows in which ranks meet a `Board`, and one
rank's end of a collective a `Run`.

A message is a number of bytes with a tag, a lane (the two ranks; 0 for messages of PyTorch's threads, whose processes
have one rank each) and a call. It comes to the oldest receive of its tag and lane, from its sender or from anybody, and
messages of one tag and lane from one process stay in order. The call says what the bytes are: a receive that says
another one fails. The end of an `Op` or a `Run` is given to its owner, if it has one, on the event loop.

A thread that waits moves the bytes of all that is under way in its process; while none waits, a thread of the engine or
the event loop does. A ring of memory leads from each process to each other; a long message goes through it in pieces.

A receiver keeps messages that arrive before their receives in bounded memory, so that they hold up no others: messages
longer than a ring, and more than four rings of shorter ones, are offered, and their bytes are sent when a receive asks.
A peer that writes nonsense into the shared memory ends all messages with it: their state is `CORRUPT`, of a receive the
peer is its `source`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
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
PENDING, DONE, MISMATCH, LOST, WITHDRAWN, NO_MEMORY, CORRUPT, HOMELESS, CANCELLED = range(9)

# How often the loop asks for more before other tasks may run.
_TURNS = 16

# Before the end of a segment, each in a cache line of its own.
_BELLS_AT, _ALLOWED_AT, _LINE_BYTES = -512, -448, 64


def allow_mail(segment: memoryview) -> None:
    """Say in a process's segment that it has a mailbox; before others map it."""
    segment[_ALLOWED_AT] = 1


def allows_mail(segment: memoryview) -> bool:
    """Whether the process of a segment has a mailbox."""
    return bool(segment[_ALLOWED_AT])


def bells(segment: memoryview) -> memoryview:
    """Return the words of a segment through which its process is woken."""
    return segment[_BELLS_AT : _BELLS_AT + _LINE_BYTES]


class Post:
    """The mailbox of this process, and the ranks that it reaches.

    Attributes:
        mailbox: Of this process; its peers have the numbers of their processes.
        peers: The number of each rank that lives alone in a process with a mailbox.
        ranks: The rank of each number.
        limit: Of all sends the last limit: its end on the monotonic clock, its length, both in seconds; and the line.
    """

    def __init__(self, mailbox: Engine, peers: Mapping[int, int]) -> None:
        self.mailbox: Engine = mailbox
        self.peers: dict[int, int] = dict(peers)
        self.ranks: dict[int, int] = {peer: rank for rank, peer in peers.items()}
        self.limit: tuple[float, float, bytes] = (0.0, 0.0, b"")


class Owner(Protocol):
    """Beginner of a collective or of a message of a rank."""

    def on_end(self) -> None:
        """Note that its end has come; the event loop's thread only."""


class EngineDoor(trio.abc.Instrument):
    """The way by which the event loop hears of what has ended in the engine and what no thread waits for.

    The engine must wake the loop for that only while it sleeps.

    Args:
        engine: Of this process.
        bell: Descriptor that becomes readable when there is something to take in.
        on_note: Takes the number of a process and three integers that it has written.
    """

    def __init__(self, engine: Engine, bell: int, on_note: Callable[[int, int, int, int], None]) -> None:
        self._engine, self._bell, self._on_note = engine, bell, on_note
        self._sleeps = False
        self._probes: dict[Callable[[], None], None] = {}

    def take_in(self) -> bool:
        """Take in what has ended and what has come; return whether there was anything. The loop's thread only."""
        came = False
        for _ in range(_TURNS):  # what ends while others are told comes after them
            owners, notes = self._engine.take_ended()
            if not owners and not notes:
                return came
            came = True
            for owner in owners:
                cast("Owner", owner).on_end()
            for note in notes:
                self._on_note(*note)
        with suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)
        return came

    @contextmanager
    def probing(self, look: Callable[[], None]) -> Iterator[None]:
        """Let `look` be called whenever messages may have come that no receive waits for."""
        self._engine.probe(True)
        self._probes[look] = None
        try:
            yield
        finally:
            self._probes.pop(look, None)
            self._engine.probe(False)

    def look_again(self) -> None:
        """Let everybody who probes look."""
        for look in tuple(self._probes):
            look()

    async def run(self) -> None:
        """Take in whatever there is whenever the bell rings."""
        trio.lowlevel.add_instrument(self)
        try:
            while True:
                await trio.lowlevel.wait_readable(self._bell)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                self.take_in()
                self.look_again()
        finally:
            trio.lowlevel.remove_instrument(self)

    def before_io_wait(self, timeout: float) -> None:
        """Let the engine wake the loop, which is about to sleep."""
        if timeout > 0:
            self._sleeps = True
            self._engine.loop(False)

    def after_io_wait(self, timeout: float) -> None:
        """Let the engine leave what comes to the loop, which is awake."""
        if self._sleeps:
            self._sleeps = False
            self._engine.loop(True)
