"""Tasks in the background of a block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_background_nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery for tasks that run next to a block; the end of the block cancels them.

    An error of the block is raised as it is, and not in a group, as by a nursery of Trio.
    """
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except (trio.Cancelled, GeneratorExit):
            raise
        except BaseException as error:  # raised again below, where the nursery does not wrap it
            failure = error
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        try:
            raise failure
        finally:
            failure = None  # or it would keep this frame alive, which keeps it alive
