"""Who awaits what is done checks for cancellation each time, and lets others run when it is their turn."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import assert_checkpoints

from overlap.runtime.event_loop import CallbackTurns

FOR_EVER_S = 1e9


async def pauses_beside(every_s: float) -> bool:
    """Return whether another task runs in two pauses; it has the first turn or the second."""
    ran: list[bool] = []

    async def other() -> None:
        ran.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        turns = CallbackTurns(every_s)
        await turns.pause()
        await turns.pause()
        return bool(ran)


async def checkpoint_in(pause: Callable[[], Awaitable[None]]) -> None:
    with assert_checkpoints():
        await pause()


def test_when_it_is_their_turn_others_run() -> None:
    assert trio.run(pauses_beside, 0.0)
    trio.run(checkpoint_in, CallbackTurns(0.0).pause)


def test_before_that_they_do_not() -> None:
    assert not trio.run(pauses_beside, FOR_EVER_S)


@pytest.mark.parametrize("every_s", [0.0, FOR_EVER_S])
def test_a_cancellation_is_noticed_always(every_s: float) -> None:
    async def main() -> bool:
        with trio.CancelScope() as scope:
            scope.cancel()
            await CallbackTurns(every_s).pause()
        return scope.cancelled_caught

    assert trio.run(main)
