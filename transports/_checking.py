"""A pair of wires, and what the rules of the contract suite, `transports.testing`, do with them."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from threading import get_ident
from typing import Any, TypeAlias

import trio
from trio.testing import wait_all_tasks_blocked

from transports.buffers import Buffer, Delivery
from transports.request import Request
from transports.signature import PlainSignature
from transports.wire import Wire

_ALL_BLOCKED_S = 0.02
Call: TypeAlias = "Callable[[], Awaitable[object]]"
Rule: TypeAlias = "Callable[[WirePair], Awaitable[None]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes and time limits of the checks."""

    # Lengths in bytes of the messages that are sent whole; 0 is always tried.
    sizes: tuple[int, ...] = (1, 2, 1000, 65_537, 4 * 2**20 + 1)
    tags: int = 2000  # How many tags are outstanding at once
    # How many messages of one tag wait together: where one in ten is swapped with the next, that is seen but once in
    # a million times.
    messages: int = 256
    # Lengths in bytes, ascending, among which a transport's first message is sought that waits for its receiver.
    lengths: tuple[int, ...] = (8, 128, 2048, 32 << 10, 512 << 10, 8 << 20)
    patience_s: float = 5.0  # A send that takes longer without a receiver waits for one
    timeout_s: float = 30.0  # A check that takes longer on Trio's clock hangs


class BrokenPromise(Exception):
    """A promise was broken; `run_check` adds the name of the check."""


def require(holds: bool, reason: str) -> None:
    """Raise `BrokenPromise` with the reason unless the promise holds."""
    if not holds:
        raise BrokenPromise(reason)


def make_message(nbytes: int, seed: object = 0) -> bytearray:
    """Return bytes that differ from place to place, and from message to message by the seed."""
    return bytearray(random.Random(f"{nbytes}/{seed}").randbytes(nbytes))


async def wait_all_blocked() -> None:
    """Wait until all tasks are blocked, at most 20 ms: tasks that poll are never blocked."""
    with trio.move_on_after(_ALL_BLOCKED_S):
        await wait_all_tasks_blocked()


def clear(buffer: bytearray, _: Request | None = None) -> None:
    """Overwrite a buffer, which is the sender's again."""
    buffer[:] = bytes(len(buffer))


@dataclass(slots=True)
class Started:
    """A call that was started in a task of its own."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)
    error: BaseException | None = None  # Of the call, also a cancellation

    async def run(self, call: Call) -> None:
        """Run the call, and note its end."""
        with self.scope:
            try:
                await call()
            except BaseException as error:
                self.error = error
                if not isinstance(error, Exception):
                    raise
            finally:
                self.ended.set()

    async def wait(self) -> BaseException | None:
        """Wait for the end, and return the error."""
        await self.ended.wait()
        return self.error


class Begun:
    """A message that was begun by a plain function; `ended` is set at its end."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.calls: list[int] = []  # threads of the calls of `done`
        self.ended: trio.Event = trio.Event()
        self.thread: int = get_ident()

    def done(self, request: Request) -> None:
        """Note the end."""
        self.calls.append(get_ident())
        if get_ident() == self.thread:
            self.ended.set()

    async def wait(self) -> Exception | None:
        """Wait for the end, and return the error."""
        if self.request is None:  # a send that has left
            return None
        await self.ended.wait()
        require(len(self.calls) == 1, "done was called twice")
        return self.request.error


class WirePair:
    """Two connected wires, of which `a` sends and `b` receives: the k-th receive of a tag must bring its k-th message.

    A sender overwrites its buffer as soon as it may.

    Args:
        scale: How many messages rules send, and how long.
        nursery: Runs the tasks of a rule.
    """

    def __init__(self, a: Wire, b: Wire, scale: Scale, nursery: trio.Nursery) -> None:
        self.a, self.b, self.scale, self.nursery = a, b, scale, nursery
        self.messages: defaultdict[int, list[bytearray]] = defaultdict(list)
        self._counts: Counter[tuple[str, int]] = Counter()
        self._serial = count()

    def next_message(self, end: str, tag: int, nbytes: int | None) -> bytearray:
        """Return the next message of a tag, as its sender or its receiver sees it."""
        place, messages = self._counts[end, tag], self.messages[tag]
        self._counts[end, tag] += 1
        if place == len(messages):
            assert nbytes is not None, "nothing was sent that could be received"
            messages.append(make_message(nbytes, (self.a.rank, next(self._serial))))
        return messages[place]

    def drop_message(self, tag: int) -> None:
        """Expect the last message no more: its send was withdrawn."""
        self.messages[tag].pop()
        self._counts["send", tag] -= 1

    def sending(self, tag: int, nbytes: int, priority: int = 0) -> Call:
        """Return a call that sends the next message of a tag."""
        buffer = bytearray(self.next_message("send", tag, nbytes))

        async def send() -> None:
            await self.a.send(self.b.rank, tag, buffer, priority=priority)
            clear(buffer)

        return send

    def receiving(self, tag: int, nbytes: int | None = None, *, loan: bool = False) -> Call:
        """Return a call that receives the next message of a tag, and requires its bytes."""
        message = self.next_message("receive", tag, nbytes)
        case = f"message {self._counts['receive', tag]} of tag {tag}, {len(message)} bytes{' on loan' * loan}"

        async def receive() -> None:
            require(await self.take(tag, len(message), loan=loan) == message, f"{case}: other bytes than those sent")

        return receive

    async def take(self, tag: int, nbytes: int, *, loan: bool) -> bytes:
        """Receive a message in any form; check that a loan is flat and read-only, and may be released twice."""
        if not loan:
            out = bytearray(nbytes)
            await self.b.recv_into(self.a.rank, tag, out)
            return bytes(out)
        delivery: object = await self.b.recv(self.a.rank, tag, nbytes)
        if not isinstance(delivery, Delivery):
            raise BrokenPromise(f"recv returned {delivery!r}; a Delivery is promised")
        with delivery:
            shape, message = (delivery.view.format, delivery.view.ndim, delivery.view.nbytes), bytes(delivery.view)
            require(delivery.view.readonly, "a delivery may be written to")
            require(shape == ("B", 1, nbytes), f"a delivery of {nbytes} bytes has (format, ndim, nbytes) {shape}")
            delivery.release()
        return message

    async def send(self, tag: int, nbytes: int, priority: int = 0) -> None:
        """Begin to send the next message of a tag, in a task of its own."""
        self.nursery.start_soon(self.sending(tag, nbytes, priority))
        await wait_all_blocked()

    async def receive(self, tag: int, nbytes: int | None = None, *, loan: bool = False) -> None:
        """Receive the next message of a tag; if it was not sent yet, a task of its own sends it."""
        call = self.receiving(tag, nbytes, loan=loan)
        if self._counts["receive", tag] <= self._counts["send", tag]:
            await call()
        else:
            self.nursery.start_soon(call)
            await wait_all_blocked()

    async def start(self, call: Call) -> Started:
        """Begin a call in a task of its own, which may be cancelled or fail."""
        started = Started()
        self.nursery.start_soon(started.run, call)
        await wait_all_blocked()
        return started

    def begin_send(self, tag: int, data: Buffer, signature: PlainSignature | None = None) -> Begun:
        """Begin a send by the plain function."""
        begun = Begun()
        begun.request = self.a.begin_send(self.b.rank, tag, data, signature=signature, done=begun.done)
        return begun

    def begin_recv(self, tag: int, out: Buffer | None, nbytes: int, **options: Any) -> Begun:
        """Begin a receive by the plain function."""
        begun = Begun()
        begun.request = self.b.begin_recv(self.a.rank, tag, out, nbytes, done=begun.done, **options)
        return begun


def each_size(rule: Callable[[WirePair, int], Awaitable[None]]) -> Rule:
    """Return a rule that tries each length."""

    @wraps(rule)
    async def try_all(p: WirePair) -> None:
        for nbytes in (0, *p.scale.sizes):
            await rule(p, nbytes)

    return try_all
