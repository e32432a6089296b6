"""A nursery for background tasks, which end with the block that opens it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_background_nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery for tasks that run during the block; the end of the block cancels them.

    An error that the block raises leaves as it is; a nursery of Trio would raise it in an exception group.
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
            failure = None  # break the cycle of references between the error and this frame
