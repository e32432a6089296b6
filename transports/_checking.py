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
    # How many messages of one tag wait together: so many that a transport which swaps one in ten with the next is
    # overlooked only once in a million times.
    messages: int = 256
    # Lengths in bytes, ascending. Checks of sends that wait for their receiver try these until a send does wait.
    lengths: tuple[int, ...] = (8, 128, 2048, 32 << 10, 512 << 10, 8 << 20)
    patience_s: float = 5.0  # A send without a receiver that takes longer is taken to wait for the receiver
    timeout_s: float = 30.0  # A check that takes longer, on Trio's clock, is taken to hang


class BrokenPromise(Exception):
    """A promise was broken; `run_check` adds the name of the check."""


def require(holds: bool, reason: str) -> None:
    """Raise `BrokenPromise` with the reason unless the promise holds."""
    if not holds:
        raise BrokenPromise(reason)


def make_message(nbytes: int, seed: object = 0) -> bytearray:
    """Return `nbytes` pseudo-random bytes, the same for the same length and seed."""
    return bytearray(random.Random(f"{nbytes}/{seed}").randbytes(nbytes))


def clear(buffer: bytearray, _: Request | None = None) -> None:
    """Overwrite a buffer with zeros, as a sender may do after the end of its send. Also usable as a `done` callback."""
    buffer[:] = bytes(len(buffer))


@dataclass(slots=True)
class CallTask:
    """A call that was started in a task of its own."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)
    error: BaseException | None = None  # The error of the call, which may be a cancellation

    async def run(self, call: Call) -> None:
        """Run the call, and record its end and its error; anything but an `Exception` is raised again."""
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
        """Wait for the end of the call, and return its error; None if it had none."""
        await self.ended.wait()
        return self.error


class BegunMessage:
    """A message that was begun by `Wire.begin_send` or `Wire.begin_recv`; `ended` is set at its end."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.calls: list[int] = []  # for each call of `done`, the identity of its thread
        self.ended: trio.Event = trio.Event()
        self.thread: int = get_ident()

    def done(self, request: Request) -> None:
        """Record the end and the thread of this call; `ended` is set only in the thread of the event loop."""
        self.calls.append(get_ident())
        # A Trio event may be set in the loop's thread only; the rule `ends` finds the other thread in `calls`.
        if get_ident() == self.thread:
            self.ended.set()

    async def wait(self) -> Exception | None:
        """Wait for the end of the request, and return its error; None if it had none."""
        if self.request is None:  # a send that has left
            return None
        await self.ended.wait()
        require(len(self.calls) == 1, "done was called twice")
        return self.request.error


class WirePair:
    """Two connected wires, of which `a` sends and `b` receives, with checks of the received bytes.

    The k-th receive of a tag must bring the k-th message of that tag. A sender overwrites its buffer as soon as its
    send has ended, so that a transport which reads the buffer later is found.

    Args:
        a: The wire that sends.
        b: The wire that receives.
        scale: Numbers and lengths of messages, and time limits.
        nursery: Runs the tasks of a rule.
    """

    def __init__(self, a: Wire, b: Wire, scale: Scale, nursery: trio.Nursery) -> None:
        self.a, self.b, self.scale, self.nursery = a, b, scale, nursery
        self.messages: defaultdict[int, list[bytearray]] = defaultdict(list)
        self._counts: Counter[tuple[str, int]] = Counter()
        self._serial = count()

    def next_message(self, end: str, tag: int, nbytes: int | None) -> bytearray:
        """Return the next message of a tag, as its sender or its receiver sees it.

        Sender and receiver are counted separately: the k-th call for either of them returns the k-th message of the
        tag. The first of the two calls makes the message, of `nbytes` random bytes.

        Args:
            end: "send" or "receive".
            tag: Tag of the message.
            nbytes: Length of a new message; None: a call for the other end has made the message already.
        """
        place, messages = self._counts[end, tag], self.messages[tag]
        self._counts[end, tag] += 1
        if place == len(messages):
            assert nbytes is not None, "nothing was sent that could be received"
            messages.append(make_message(nbytes, (self.a.rank, next(self._serial))))
        return messages[place]

    def drop_message(self, tag: int) -> None:
        """Remove the last message of a tag, because its send was withdrawn."""
        self.messages[tag].pop()
        self._counts["send", tag] -= 1

    def make_send(self, tag: int, nbytes: int, priority: int = 0) -> Call:
        """Return a call that sends the next message of a tag, and overwrites its buffer afterwards.

        The message is the next one at the time of this call, not when the returned call runs. If its receive was made
        before, with a length, that length is used in place of `nbytes`.
        """
        buffer = bytearray(self.next_message("send", tag, nbytes))

        async def send() -> None:
            await self.a.send(self.b.rank, tag, buffer, priority=priority)
            clear(buffer)

        return send

    def make_receive(self, tag: int, nbytes: int | None = None, *, loan: bool = False) -> Call:
        """Return a call that receives the next message of a tag, and raises `BrokenPromise` if the bytes are wrong.

        The message is the next one at the time of this call, not when the returned call runs.

        Args:
            tag: Tag of the message.
            nbytes: Length of a message that is not sent yet; None: the send was made before, with a length.
            loan: Whether to receive it on loan instead of into a buffer.
        """
        message = self.next_message("receive", tag, nbytes)
        case = f"message {self._counts['receive', tag]} of tag {tag}, {len(message)} bytes{' on loan' * loan}"

        async def receive() -> None:
            require(
                await self.receive_bytes(tag, len(message), loan=loan) == message,
                f"{case}: other bytes than those sent",
            )

        return receive

    async def receive_bytes(self, tag: int, nbytes: int, *, loan: bool) -> bytes:
        """Receive a message of `nbytes` into a buffer, or on loan, and return its bytes.

        Raises `BrokenPromise` if a loan is not flat or not read-only. A loan is released twice, which must do no harm.
        """
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
        """Send the next message of a tag in a new task; return when that task waits for the receiver, or has ended.

        Arguments are as of `make_send`.
        """
        self.nursery.start_soon(self.make_send(tag, nbytes, priority))
        await self.wait_all_blocked()

    async def receive(self, tag: int, nbytes: int | None = None, *, loan: bool = False) -> None:
        """Receive the next message of a tag, and check its bytes.

        If the message was not sent yet, a new task receives it, and this method returns when that task waits for a
        later `send`. Arguments are as of `make_receive`.
        """
        call = self.make_receive(tag, nbytes, loan=loan)
        if self._counts["receive", tag] <= self._counts["send", tag]:
            await call()
        else:
            self.nursery.start_soon(call)
            await self.wait_all_blocked()

    async def start(self, call: Call) -> CallTask:
        """Run a call in a new task; return when all tasks wait. The call may be cancelled by its scope, or fail."""
        started = CallTask()
        self.nursery.start_soon(started.run, call)
        await self.wait_all_blocked()
        return started

    async def wait_all_blocked(self) -> None:
        """Wait until all tasks are blocked, at most 20 ms: tasks that poll are never blocked."""
        with trio.move_on_after(_ALL_BLOCKED_S):
            await wait_all_tasks_blocked()

    def begin_send(self, tag: int, data: Buffer, signature: PlainSignature | None = None) -> BegunMessage:
        """Begin a send from `a` to `b` with `Wire.begin_send`."""
        begun = BegunMessage()
        begun.request = self.a.begin_send(self.b.rank, tag, data, signature=signature, done=begun.done)
        return begun

    def begin_recv(self, tag: int, out: Buffer | None, nbytes: int, **options: Any) -> BegunMessage:
        """Begin a receive by `b` from `a` with `Wire.begin_recv`, which gets the options."""
        begun = BegunMessage()
        begun.request = self.b.begin_recv(self.a.rank, tag, out, nbytes, done=begun.done, **options)
        return begun


def for_each_size(rule: Callable[[WirePair, int], Awaitable[None]]) -> Rule:
    """Return a rule that runs `rule` with length 0, and with each length of `Scale.sizes`."""

    @wraps(rule)
    async def run_with_each_size(pair: WirePair) -> None:
        for nbytes in (0, *pair.scale.sizes):
            await rule(pair, nbytes)

    return run_with_each_size
