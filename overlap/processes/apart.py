"""Joining a world from a loop of its own, so that no program that is busy counts as lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from .identity import RendezvousConfig
from .join import join
from .own_loop import own_loop
from .threaded import ThreadedMembership


@asynccontextmanager
async def join_apart(config: RendezvousConfig, *, report: Callable[[str], None]) -> AsyncIterator[ThreadedMembership]:
    """Do what `join` does, in a thread of its own: signs of life come from there, whatever this loop does.

    Args:
        config: Where and how.
        report: Gets lines for the user, in that thread.

    Raises:
        JoinError, ListenError, ArgumentError: As `join` does.
    """
    async with own_loop("overlap membership") as loop, loop.entered(join(config, report=report)) as there:
        membership = ThreadedMembership(loop, there)
        loop.start_soon(membership.forward)
        yield membership
