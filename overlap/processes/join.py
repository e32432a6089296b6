"""How the processes of one world find each other: member 0 is the host, at an endpoint; the others are its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from .client import join_as_client
from .hosting import join_as_host
from .identity import RendezvousConfig
from .member import Membership

#: How long the end of a block may wait for what its member has told to arrive.
_LAST_WORDS_S = 1.0


@asynccontextmanager
async def join(config: RendezvousConfig, *, report: Callable[[str], None]) -> AsyncIterator[Membership]:
    """Be a member of a world of several processes for the length of an ``async with``.

    Whoever ends the block without `Membership.leave`, by an error or not, is lost to the others.

    Args:
        config: Where and how.
        report: Gets lines for the user: who is missing, who was turned away, who is silent.

    Raises:
        JoinError: The world did not come together, or does not want this process.
        ListenError: This is member 0, and it cannot listen at the endpoint.
        ArgumentError: A TLS file is missing, or not what it should be.
    """
    if config.tls is not None:
        config.tls.check()
    enter = join_as_client if config.member else join_as_host
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        services = await nursery.start(_keep_open)
        try:
            membership = await enter(config, services, report)
            try:
                yield membership
            finally:  # also when cancelled: what a failing member tells is what the others report
                with trio.move_on_after(_LAST_WORDS_S, shield=True):
                    await membership.hang_up()
        except (trio.Cancelled, GeneratorExit):
            raise
        except BaseException as error:  # raised again below, where the nursery does not wrap it
            failure = error
        finally:
            services.cancel_scope.cancel()
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # or it would keep this frame alive, which keeps it alive


async def _keep_open(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Give a nursery that ends when its own scope is cancelled, and not sooner."""
    # Whoever was cancelled meanwhile would not get it, and so never end it; from here to there is no other checkpoint.
    await trio.lowlevel.checkpoint_if_cancelled()
    with trio.CancelScope(shield=True):
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await trio.sleep_forever()
