"""Daemons that ignore their cancellation are named and closed, with the tasks in their nurseries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import trio

import overlap
from overlap.runtime import world

from .worlds import TIMEOUT_S, failing

R = overlap.Rank


async def shielded() -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()


async def catching() -> None:
    while True:
        with suppress(trio.Cancelled):
            await trio.sleep(10)


def parent_pid(child: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def parent() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)

    return parent


def boom() -> None:
    raise ValueError("boom")


async def returns(rank: R) -> str:
    return "ended"


async def raises(rank: R) -> None:
    boom()


async def computes(rank: R) -> None:
    rank.compute(boom, seconds=0.1)
    await trio.sleep_forever()


WAYS = {"shielded": shielded, "catching": catching}
WAYS |= {f"{name} child": parent_pid(child) for name, child in WAYS.items()}


@pytest.mark.parametrize("end", [returns, raises, computes])
@pytest.mark.parametrize("clock", ["real", "virtual"])
@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_that_ignores_its_cancellation_is_named_and_closed(
    way: str,
    clock: Any,
    end: Callable[[R], Awaitable[object]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """However its rank ends: by itself, by an error, or because another rank fails."""
    monkeypatch.setattr(world, "GRACE_S", 0.05)

    async def main(rank: R) -> object:
        rank.spawn(WAYS[way], daemon=True, name="stubborn", call_site="serve.py:7")
        await trio.sleep(0.01)
        if rank.rank == 0 or end is returns:
            return await end(rank)
        return await trio.sleep_forever()

    if end is returns:
        assert overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S) == ["ended", "ended"]
    else:
        with failing() as failed:
            overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S)
        assert (failed[0].rank, repr(failed[0].cause)) == (0, "ValueError('boom')")
    assert sorted(capfd.readouterr().err.splitlines()) == [
        f"overlap: daemon 'stubborn' (serve.py:7) of rank {rank} goes on although it was cancelled, and is closed: "
        "let it end on trio.Cancelled, and shield for bounded clean-up only"
        for rank in range(2)
    ]


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_a_daemon_cleans_up_before_the_failure_of_its_rank_is_reported(clock: Any) -> None:
    events: list[str] = []

    async def serve() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(10, shield=True):
                await trio.sleep(0.02)
                events.append("closed")

    async def main(rank: R) -> None:
        daemon = rank.spawn(serve, daemon=True)
        daemon.add_done_callback(lambda done: events.append(f"done, {type(done.exception()).__name__}"))
        await trio.sleep(0.01)
        boom()

    with pytest.raises(overlap.RankFailedError, match="ValueError: boom"):
        overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    assert events == ["closed", "done, PeerFailedError"]


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_a_daemon_that_catches_its_cancellation_a_few_times_ends_by_itself(
    clock: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []

    async def reluctant() -> None:
        for _ in range(20):
            with suppress(trio.Cancelled):
                await trio.sleep(10)
        events.append("ended")

    async def main(rank: R) -> None:
        daemon = rank.spawn(parent_pid(reluctant), daemon=True)
        await trio.sleep(0.01)
        assert daemon.cancel()
        assert daemon.cancel()

    overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    assert (events, capfd.readouterr().err) == (["ended"], "")
