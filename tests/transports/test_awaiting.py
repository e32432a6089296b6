"""Awaiting calls over wires that do everything in the worst order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from transports import Envelope, NeuronLink, Request
from transports.wire import finish
from transports.wrappers import WrappedWire


class Late(WrappedWire):
    """A wire whose message arrives in another thread, as the first watcher begins to watch: too late to notify."""

    message: Envelope | None = None

    def unexpected(self, tag: int | None = None) -> list[Envelope]:
        return [] if self.message is None else [self.message]

    @contextmanager
    def watch(self, notify: Callable[[], None]) -> Iterator[None]:
        self.message = Envelope(src=1, dst=0, tag=2, nbytes=1)
        yield


async def test_a_message_that_arrives_just_before_the_watch_is_found(autojump_clock) -> None:
    late = Late(NeuronLink(2).wire(0), [0, 1])
    with trio.fail_after(10):
        assert await late.wait_any([(1, 2)]) == Envelope(src=1, dst=0, tag=2, nbytes=1)


async def test_a_request_that_ends_in_another_thread_wakes_its_task() -> None:
    begun: list[Request] = []
    ended: list[Request | None] = []

    async def wait() -> None:
        ended.append(await finish(begin))

    def begin(done: Callable[[Request], None]) -> Request:
        begun.append(Request(done))
        return begun[0]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert ended == []
        await trio.to_thread.run_sync(begun[0].end)
    assert ended == begun


@pytest.mark.parametrize("ends", ["at once", "later", "in time"])
async def test_a_cancelled_call_waits_for_the_end_of_its_request(ends: str) -> None:
    """Withdrawn at once or later it raises Cancelled; what has met its other end ends well."""
    ended: list[str] = []

    def withdraw(request: Request) -> None:
        if ends == "at once":
            request.end(withdrawn=True)

    request = Request(print, withdraw=withdraw)

    def begin(done: Callable[[Request], None]) -> Request:
        request.done = done
        return request

    async def call() -> None:
        try:
            await finish(begin)
            ended.append("well")
        except trio.Cancelled:
            ended.append("cancelled")
            raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            assert ended == (["cancelled"] if ends == "at once" else [])
            request.end(withdrawn=ends == "later")
    assert ended == ["well" if ends == "in time" else "cancelled"]
