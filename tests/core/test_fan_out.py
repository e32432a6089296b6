"""Messages of one operation that go to several ranks in other processes are under way at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

import overlap
from transports import Buffer, Endpoint, NeuronLink, Router, Transport
from transports.wrappers import Wrapper, WrapperEndpoint

from .companies import Company, in_memory, run_far


class Noting(Wrapper):
    """Notes when sends begin and when they end."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.events: list[str] = []

    def wrap(self, endpoint: Endpoint) -> Endpoint:
        return _NotingEndpoint(endpoint, self.peers, self.events)


class _NotingEndpoint(WrapperEndpoint):
    def __init__(self, inner: Endpoint, peers: tuple[int, ...], events: list[str]) -> None:
        super().__init__(inner, peers)
        self._events = events

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        self._events.append("begun")
        await self.inner.send(dst, tag, data, priority=priority)
        self._events.append("acknowledged")


def test_all_sends_of_an_exchange_begin_before_the_first_is_acknowledged() -> None:
    wires: list[Noting] = []

    @asynccontextmanager
    async def noted(companies: list[Company], placement: Sequence[range]) -> AsyncIterator[list[Transport]]:
        async with in_memory(companies, placement) as whole:
            wires.extend(map(Noting, whole))
            memory = [NeuronLink(list(ranks)) for ranks in placement]
            yield [Router(parts) for parts in zip(memory, wires, strict=True)]

    async def main(rank: overlap.Rank) -> list[int]:
        received = await rank.all_to_all(np.full((4, 1 << 12), rank.rank))
        return received[:, 0].tolist()

    assert run_far(main, 4, 1, wires=noted) == [[0, 1, 2, 3]] * 4
    assert [wire.events for wire in wires] == [["begun"] * 3 + ["acknowledged"] * 3] * 4
