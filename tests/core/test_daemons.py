"""Daemons that ignore their cancellation are named and closed, with the tasks in their nurseries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import trio

import overlap
from overlap.runtime import forcing, world

from .worlds import TIMEOUT_S


async def shielded() -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()


async def catching() -> None:
    while True:
        with suppress(trio.Cancelled):
            await trio.sleep(10)


def parent_of(child: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def parent() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)

    return parent


def run(daemon: Callable[[], Awaitable[None]], clock: str) -> list[str]:
    async def main(rank: overlap.Rank) -> str:
        rank.spawn(daemon, daemon=True, name="stubborn")
        await trio.sleep(0.01)
        return "ended"

    if clock == "virtual":
        return overlap.run(main, ranks=2, clock="virtual", cluster="trn1.32xlarge")
    return overlap.run(main, ranks=2, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("daemon", "clock"),
    [
        pytest.param(shielded, "real", id="shielded-real"),
        pytest.param(shielded, "virtual", id="shielded-virtual"),
        pytest.param(catching, "real", id="catching-real"),
        pytest.param(catching, "virtual", id="catching-virtual"),
        pytest.param(parent_of(shielded), "real", id="shielded-child-real"),
        pytest.param(parent_of(shielded), "virtual", id="shielded-child-virtual"),
        pytest.param(parent_of(catching), "real", id="catching-child-real"),
    ],
)
def test_a_daemon_that_ignores_its_cancellation_is_named_and_closed(
    daemon: Callable[[], Awaitable[None]],
    clock: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(world, "GRACE_S", 0.05)
    assert run(daemon, clock) == ["ended", "ended"]
    said = capfd.readouterr().err
    for rank in range(2):
        assert f"of rank {rank} goes on although it was cancelled, and is closed" in said


def test_trio_has_the_private_parts_that_forcing_uses() -> None:
    """A new Trio without them leaves shielded daemons running: see `overlap.runtime.forcing`."""

    async def main() -> None:
        task = trio.lowlevel.current_task()
        with trio.CancelScope(shield=True) as inner:  # noqa: ASYNC100 (it is looked at, not used)
            status = task._cancel_status  # type: ignore[attr-defined]
            assert status._scope is inner
            assert status._parent is not None
            inner.cancel()
            forcing._lift_shields(task)
            assert inner.shield  # a scope that is cancelled itself is not looked through
        task.coro = task.coro  # which must stay assignable

    trio.run(main)
