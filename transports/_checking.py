"""Helpers of the checks in the contract suite, `transports.testing`."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio
from trio.testing import wait_all_tasks_blocked

from transports.buffers import Delivery
from transports.failures import ArgumentError
from transports.wire import Wire

_SETTLING_S = 0.02


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


async def wait_until_blocked() -> None:
    """Wait until all tasks are blocked, at most 20 ms: tasks that poll are never blocked."""
    with trio.move_on_after(_SETTLING_S):
        await wait_all_tasks_blocked()


async def delivery_from(end: Wire, src: Wire, tag: int, nbytes: int) -> Delivery:
    """Receive a message of rank ``src.rank`` on a tag, as memory on loan."""
    delivery: object = await end.recv(src.rank, tag, nbytes)
    if not isinstance(delivery, Delivery):
        raise BrokenPromise(f"recv returned {delivery!r}; a Delivery is promised")
    return delivery


async def expect_message(end: Wire, src: Wire, tag: int, sent: bytes | bytearray, case: str) -> None:
    """Receive a message of rank ``src.rank`` on a tag, and require the bytes that were sent."""
    out = bytearray(len(sent))
    await end.recv_into(src.rank, tag, out)
    require(out == sent, f"{case}: other bytes than those sent")


@contextmanager
def expect_rejection(case: str) -> Iterator[None]:
    """Require the block to raise `ArgumentError`."""
    try:
        yield
    except ArgumentError:
        return
    raise BrokenPromise(f"{case} was accepted; an ArgumentError is promised")


async def note_outcome(endpoint_call: Callable[[], Awaitable[None]], outcome: list[BaseException | None]) -> None:
    """Record the end of a call: None, or its error. A cancellation is recorded and raised again."""
    try:
        await endpoint_call()
    except Exception as error:
        outcome.append(error)
    except trio.Cancelled as cancelled:
        outcome.append(cancelled)
        raise
    else:
        outcome.append(None)
