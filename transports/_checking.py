"""A pair of wires, and what the rules of the contract suite, `transports.testing`, do with them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from typing import Any, TypeAlias

import trio
from trio.testing import wait_all_tasks_blocked

from transports.buffers import Buffer, Delivery
from transports.request import Request
from transports.signature import PlainSignature
from transports.wire import Wire

_SETTLING_S = 0.02
Call: TypeAlias = "Callable[[], Awaitable[object]]"


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


def make_message(nbytes: int, seed: int = 0) -> bytearray:
    """Return bytes that differ from place to place, and from message to message by the seed."""
    return bytearray(random.Random(f"{nbytes}/{seed}").randbytes(nbytes))


async def settle() -> None:
    """Wait until all tasks are blocked, at most 20 ms: tasks that poll are never blocked."""
    with trio.move_on_after(_SETTLING_S):
        await wait_all_tasks_blocked()


@asynccontextmanager
async def begun(*calls: Call) -> AsyncIterator[trio.Nursery]:
    """Begin calls, each once the ones before it are blocked, and wait for their ends after the block."""
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(call)
            await settle()
        yield nursery


async def meet(*calls: Call) -> None:
    """Begin calls, each once the ones before it are blocked, and wait for their ends."""
    async with begun(*calls):
        pass


async def outcome_of(call: Call, outcome: list[BaseException | None]) -> None:
    """Add the end of a call to a list: None, or its error. A cancellation is raised again."""
    try:
        await call()
    except Exception as error:
        outcome.append(error)
    except trio.Cancelled as cancelled:
        outcome.append(cancelled)
        raise
    else:
        outcome.append(None)


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

    async def wait(self) -> Request | None:
        """Wait for the end; None for a send that has left."""
        if self.request is not None:
            await self.ended.wait()
        require(len(self.calls) <= 1, "done was called twice")
        return self.request

    @property
    def error(self) -> Exception | None:
        """Error of the request."""
        return None if self.request is None else self.request.error


@dataclass(frozen=True, slots=True)
class Pair:
    """Two connected wires, of which `a` sends and `b` receives."""

    a: Wire
    b: Wire
    scale: Scale

    async def send(self, tag: int, data: Buffer, priority: int = 0) -> None:
        """Send a message."""
        await self.a.send(self.b.rank, tag, data, priority=priority)

    async def delivery(self, tag: int, nbytes: int) -> Delivery:
        """Receive a message on loan."""
        delivery: object = await self.b.recv(self.a.rank, tag, nbytes)
        if not isinstance(delivery, Delivery):
            raise BrokenPromise(f"recv returned {delivery!r}; a Delivery is promised")
        return delivery

    async def receive(self, tag: int, nbytes: int, *, loan: bool) -> bytes:
        """Receive a message, on loan or into a buffer."""
        if loan:
            with await self.delivery(tag, nbytes) as delivery:
                return bytes(delivery.view)
        out = bytearray(nbytes)
        await self.b.recv_into(self.a.rank, tag, out)
        return bytes(out)

    async def expect(self, tag: int, sent: bytes | bytearray, case: str, *, loan: bool = False) -> None:
        """Receive a message, and require the bytes that were sent."""
        require(await self.receive(tag, len(sent), loan=loan) == sent, f"{case}: other bytes than those sent")

    async def still_works(self, tag: int, case: str) -> None:
        """Send one more message, and require that it arrives."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.send, tag, b"next")
            await self.expect(tag, b"next", case)

    def begin_send(self, tag: int, data: Buffer, signature: PlainSignature | None = None) -> Begun:
        """Begin a send."""
        begun = Begun()
        begun.request = self.a.begin_send(self.b.rank, tag, data, signature=signature, done=begun.done)
        return begun

    def begin_recv(
        self,
        tag: int,
        out: Buffer | None,
        nbytes: int,
        signature: PlainSignature | None = None,
        allocate: Callable[[Any], Buffer] | None = None,
    ) -> Begun:
        """Begin a receive."""
        begun = Begun()
        begun.request = self.b.begin_recv(
            self.a.rank, tag, out, nbytes, signature=signature, done=begun.done, allocate=allocate
        )
        return begun


Rule: TypeAlias = "Callable[[Pair], Awaitable[None]]"


def each_size(rule: Callable[[Pair, int], Awaitable[None]]) -> Rule:
    """Return a rule that tries each length."""

    @wraps(rule)
    async def try_all(p: Pair) -> None:
        for nbytes in (0, *p.scale.sizes):
            await rule(p, nbytes)

    return try_all
