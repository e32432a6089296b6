"""The contract suite as assertions: one check of it, and all of them on a clock that jumps."""

from functools import partial

import trio
from trio.testing import MockClock

from transports._checking import Scale
from transports.testing import MakePair, check_transport, run_check
from transports.wire import Wire


def assert_kept(check: str, make_pair: MakePair) -> None:
    """Assert that a pair of endpoints passes a check."""
    trio.run(partial(run_check, check, make_pair, scale=Scale()))


def assert_all_kept(make_pair: MakePair) -> None:
    """Assert that a pair of endpoints passes all checks, in virtual time."""
    trio.run(partial(check_transport, make_pair), clock=MockClock(autojump_threshold=0))


def leaves_at_once(end: Wire, dst: int, tag: int, data: bytes | bytearray) -> bool:
    """Begin a send; return whether the message has left without waiting for anything."""
    return end.begin_send(dst, tag, data, done=lambda _: None) is None
