"""Messages of one operation that go to several ranks in other processes are under way at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import trio
from trio.testing import wait_all_tasks_blocked

import overlap
from transports import NeuronLink, Request, Router, Transport, Wire
from transports.request import Done
from transports.wrappers import RelayedRequest, WrappedWire, Wrapper

from .companies import Company, in_memory, run_far


class Noting(Wrapper):
    """Notes when sends begin and when they end."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.events: list[str] = []

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        return True

    def wrap(self, wire: Wire) -> Wire:
        return _NotingWire(wire, self.peers, self.events)


class _NotingWire(WrappedWire):
    def __init__(self, inner: Wire, peers: tuple[int, ...], events: list[str]) -> None:
        super().__init__(inner, peers)
        self._events = events

    def begin_send(self, *args: Any, done: Done, **options: Any) -> Request | None:
        """Send in the next turn of the event loop: a receive that waits would acknowledge it in the call."""
        self._events.append("begun")
        done = self._noting("acknowledged", done)
        request = RelayedRequest(done, 0, partial(self.inner.begin_send, *args, **options))
        trio.lowlevel.current_trio_token().run_sync_soon(request.begin)
        return request

    def begin_recv(self, *args: Any, done: Done, **options: Any) -> Request:
        if args[2] is not None:
            return self.inner.begin_recv(*args, done=done, **options)
        self._events.append("posted")
        return self.inner.begin_recv(*args, done=self._noting("came", done), **options)

    def _noting(self, event: str, done: Done) -> Done:
        def note(request: Request) -> None:
            self._events.append(event)
            done(request)

        return note


def noting(
    main: Callable[[overlap.Rank], Awaitable[list[int]]], nodes: int, algorithm: str | None = None
) -> tuple[list[list[int]], list[list[str]]]:
    """Run a program with a rank a node; return its results and what each node's messages did."""
    wires: list[Noting] = []

    @asynccontextmanager
    async def noted(companies: list[Company], placement: Sequence[range]) -> AsyncIterator[list[Transport]]:
        async with in_memory(companies, placement) as whole:
            wires.extend(map(Noting, whole))
            memory = [NeuronLink(list(ranks)) for ranks in placement]
            yield [Router(parts) for parts in zip(memory, wires, strict=True)]

    return run_far(main, nodes, 1, wires=noted, algorithm=algorithm), [wire.events for wire in wires]


def test_all_sends_of_an_exchange_begin_before_the_first_is_acknowledged() -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        received = await rank.all_to_all(np.full((4, 1 << 12), rank.rank))
        return received[:, 0].tolist()

    results, events = noting(main, 4, "mesh")
    assert results == [[0, 1, 2, 3]] * 4
    assert events == [["begun"] * 3 + ["acknowledged"] * 3] * 4


def test_all_slices_of_a_step_are_wanted_before_the_first_has_come() -> None:
    """A wire between hosts carries the next slice while one is added, so nobody may wait with asking for it."""

    async def main(rank: overlap.Rank) -> list[int]:
        if rank.rank:
            await wait_all_tasks_blocked()
        reduced = await rank.all_reduce(np.arange(1 << 18, dtype=np.int64))
        return reduced[[0, -1]].tolist()

    results, [events, _] = noting(main, 2)
    assert results == [[0, (1 << 19) - 2]] * 2
    assert [event for event in events if event in ("posted", "came")][:5] == ["posted"] * 4 + ["came"]
