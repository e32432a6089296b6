"""The contract suite as assertions: one check of it, and all of them on a clock that jumps."""

from __future__ import annotations

from functools import partial

import trio
from trio.testing import MockClock

from transports._checking import Scale
from transports.testing import MakePair, check_transport, run_check

__all__ = ["assert_all_kept", "assert_kept"]


def assert_kept(check: str, make_pair: MakePair, *, eager_bytes: int | None = None) -> None:
    """Assert that a pair of endpoints passes a check."""
    scale = Scale() if eager_bytes is None else Scale(eager_bytes=eager_bytes)
    trio.run(partial(run_check, check, make_pair, scale=scale))


def assert_all_kept(make_pair: MakePair) -> None:
    """Assert that a pair of endpoints passes all checks, in virtual time."""
    trio.run(partial(check_transport, make_pair), clock=MockClock(autojump_threshold=0))
