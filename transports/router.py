"""Router: one transport made of several, which reaches each rank by the first that can."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Self

import trio

from transports.base import Endpoint, Envelope, Statistics, Transport, check_choices, describe_ranks
from transports.buffers import Buffer, Delivery
from transports.failures import ArgumentError, TransportError
from transports.starter import Starter

if TYPE_CHECKING:
    from transports.common import Board
    from transports.shared_memory.engine import Post


class Router(Transport):
    """Sends every message over the first of its parts that joins the two ranks.

    Parts are in order of preference, such as memory inside a process, then sockets. It adds one look-up to a message.

    Args:
        parts: Transports of the same local ranks.

    Raises:
        ArgumentError: No parts, or parts with other local ranks.
    """

    def __init__(self, parts: Sequence[Transport]) -> None:
        if not parts or any(part.ranks != parts[0].ranks for part in parts):
            raise ArgumentError(f"parts is {list(parts)!r}; name transports of the same local ranks")
        self.parts: tuple[Transport, ...] = tuple(parts)
        self.ranks: tuple[int, ...] = parts[0].ranks
        self.peers: tuple[int, ...] = tuple(sorted({peer for part in parts for peer in part.peers}))
        self._endpoints = {rank: _RouterEndpoint(self, rank) for rank in self.ranks}

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Return whether all of the ranks live in this process and the parts that join them share their memory.

        A group that reaches into another process does not, however much of it lives here.
        """
        if not set(ranks) <= set(self.ranks):
            return False
        return all(self._find_part(ranks[0], rank).shares_memory(ranks) for rank in ranks)

    def board(self, key: int, ranks: Sequence[int]) -> Board | None:
        """Return the board of the first part that has one for all of the ranks."""
        return next((board for part in self.parts if (board := part.board(key, ranks)) is not None), None)

    def loan(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory of the first part that has some."""
        return next((loan for part in self.parts if (loan := part.loan(nbytes)) is not None), None)

    def post(self, ranks: Sequence[int]) -> Post | None:
        """Return the mailbox of the first part that has one for all of the ranks."""
        return next((post for part in self.parts if (post := part.post(ranks)) is not None), None)

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether any of the parts joins some of the ranks across hosts."""
        return any(part.spans_hosts(ranks) for part in self.parts)

    @property
    def socket_placement(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each process, if sockets of a part join all processes."""
        return next(filter(None, (part.socket_placement for part in self.parts)), ())

    def lose(self, ranks: Sequence[int], reason: str) -> bool:
        """Give up lost ranks in every part; return whether any part knew them."""
        lost = [part.lose(ranks, reason) for part in self.parts]
        return any(lost)

    def _find_part(self, rank: int, peer: int) -> Transport:
        """Return the first part that joins two ranks; `ArgumentError` if none does."""
        for part in self.parts:
            if peer in part.peers:
                return part
        raise ArgumentError(f"rank {rank} cannot reach rank {peer}; this router reaches {describe_ranks(self.peers)}")

    def endpoint(self, rank: int) -> Endpoint:
        """Return the endpoint of a local rank.

        Raises:
            ArgumentError: The rank does not live here.
        """
        if rank not in self._endpoints:
            raise ArgumentError(f"there is no rank {rank} here; this router serves {describe_ranks(self.ranks)}")
        return self._endpoints[rank]

    def statistics(self) -> Statistics:
        """Return the unmatched messages of all parts."""
        parts = [part.statistics() for part in self.parts]
        return Statistics(
            unmatched_sends=tuple(envelope for part in parts for envelope in part.unmatched_sends),
            unmatched_receives=tuple(envelope for part in parts for envelope in part.unmatched_receives),
        )

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Self]:
        """Open all parts, in their order, for the length of a block."""
        async with AsyncExitStack() as stack:
            for part in self.parts:
                await stack.enter_async_context(part.open())
            yield self

    async def aclose(self) -> None:
        """Close all parts, one after the other."""
        for part in self.parts:
            await part.aclose()


class _RouterEndpoint(Endpoint):
    def __init__(self, router: Router, rank: int) -> None:
        self.rank = rank
        self._router = router
        self._routes: dict[int, Endpoint] = {}

    def _route(self, peer: int) -> Endpoint:
        """Return the endpoint that reaches a peer."""
        route = self._routes.get(peer)
        if route is None:
            route = self._routes[peer] = self._router._find_part(self.rank, peer).endpoint(self.rank)
        return route

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        await self._route(dst).send(dst, tag, data, priority=priority)

    def starter(self, peer: int) -> Starter | None:
        return self._route(peer).starter(peer)

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        await self._route(src).recv_into(src, tag, out)

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        return await self._route(src).recv(src, tag, nbytes)

    def announced(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope | None:
        routes = self._group_by_route(choices).items()
        announced = [route.announced(part, free_bits=free_bits) for route, part in routes]
        return min((message for message in announced if message is not None), key=_since_ns, default=None)

    def unexpected(self) -> Sequence[Envelope]:
        return [each for part in self._router.parts for each in part.endpoint(self.rank).unexpected()]

    async def wait_any(self, choices: Sequence[tuple[int, int]], *, free_bits: int = 0) -> Envelope:
        """Wait at every endpoint that a choice needs; return the oldest message that is announced then."""
        routes = self._group_by_route(choices)
        if len(routes) == 1:
            return await self._route(choices[0][0]).wait_any(choices, free_bits=free_bits)
        waited_for = await _wait_first(routes, free_bits)
        # the wait takes turns of the loop, in which another receive may have taken the message that ended it
        return self.announced(choices, free_bits=free_bits) or min(waited_for, key=_since_ns)

    def _group_by_route(self, choices: Sequence[tuple[int, int]]) -> dict[Endpoint, list[tuple[int, int]]]:
        """Return the choices of each endpoint that they need."""
        check_choices(choices)
        routes: dict[Endpoint, list[tuple[int, int]]] = {}
        for choice in choices:
            routes.setdefault(self._route(choice[0]), []).append(choice)
        return routes


_since_ns = attrgetter("since_ns")


async def _wait_first(routes: Mapping[Endpoint, Sequence[tuple[int, int]]], free_bits: int) -> Sequence[Envelope]:
    """Wait at several endpoints, each for its own choices, until the first ones have a message."""
    announced: list[Envelope] = []
    errors: list[TransportError] = []

    async def wait_at(endpoint: Endpoint, choices: Sequence[tuple[int, int]]) -> None:
        """Wait at one endpoint, and end the wait at the others."""
        try:
            announced.append(await endpoint.wait_any(choices, free_bits=free_bits))
        except TransportError as error:
            errors.append(error)
        await trio.lowlevel.cancel_shielded_checkpoint()  # other endpoints may have a message now, too
        nursery.cancel_scope.cancel()  # wait_any receives nothing, so no message is lost

    async with trio.open_nursery() as nursery:
        for endpoint, choices in routes.items():
            nursery.start_soon(wait_at, endpoint, choices)
    if not announced:
        raise errors[0]
    return announced
