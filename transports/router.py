"""Router: one transport made of several, which reaches each rank by the first that can."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self

from transports.base import Transport
from transports.buffers import Buffer
from transports.failures import ArgumentError, LinkLostError
from transports.request import Done, Request
from transports.wire import Envelope, Wire, describe_ranks

if TYPE_CHECKING:
    from transports.shared_memory.board import Board


class Router(Transport):
    """Sends every message over the first of its parts that joins the two ranks.

    The look-up of the part is all that a router adds to the cost of a message.

    Args:
        parts: Transports of the same local ranks, in order of preference, such as memory, then sockets.

    Raises:
        ArgumentError: No parts, or parts with other local ranks.
    """

    def __init__(self, parts: Sequence[Transport]) -> None:
        if not parts or any(part.ranks != parts[0].ranks for part in parts):
            owned = ", ".join(f"{type(part).__name__} of ranks {list(part.ranks)}" for part in parts)
            reason = f"parts: a router joins transports of the same local ranks, got {owned or 'no transport'}"
            raise ArgumentError(f"{reason}; name one or more transports, each made with the same ranks")
        self.parts: tuple[Transport, ...] = tuple(parts)
        self.ranks: tuple[int, ...] = parts[0].ranks
        self.peers: tuple[int, ...] = tuple(sorted({peer for part in parts for peer in part.peers}))
        self._wires = {rank: _RouterWire(self, rank) for rank in self.ranks}

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Return whether all of the ranks live in this process, and the parts that join them share memory.

        A group with a rank of another process never does.
        """
        if not set(ranks) <= set(self.ranks):
            return False
        return all(self._find_part(ranks[0], rank).shares_memory(ranks) for rank in ranks)

    def board(self, key: int, ranks: Sequence[int]) -> Board | None:
        """Return the board of the first part that has one for all of the ranks; None if no part has."""
        return next((board for part in self.parts if (board := part.board(key, ranks)) is not None), None)

    def loan(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory of the first part that has some, and its release; None if no part has."""
        return next((loan for part in self.parts if (loan := part.loan(nbytes)) is not None), None)

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether any of the parts joins some of the ranks across hosts."""
        return any(part.spans_hosts(ranks) for part in self.parts)

    @property
    def ranks_joined_by_sockets(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each process, if sockets of a part join all processes."""
        return next(filter(None, (part.ranks_joined_by_sockets for part in self.parts)), ())

    def lose(self, ranks: Sequence[int], reason: str) -> None:
        """Fail the calls that wait for lost ranks, in every part."""
        for part in self.parts:
            part.lose(ranks, reason)

    def _find_part(self, rank: int, peer: int) -> Transport:
        """Return the first part that reaches a peer; `ArgumentError` if none does."""
        for part in self.parts:
            if peer in part.peers:
                return part
        raise ArgumentError(f"rank {rank} cannot reach rank {peer}; this router reaches {describe_ranks(self.peers)}")

    def wire(self, rank: int) -> Wire:
        """Return the wire of a local rank.

        Raises:
            ArgumentError: The rank does not live here.
        """
        if rank not in self._wires:
            served = describe_ranks(self.ranks)
            raise ArgumentError(f"there is no rank {rank} here; this router serves {served}; ask for one of these")
        return self._wires[rank]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Open all parts, in their order, for the length of a block."""
        async with AsyncExitStack() as stack:
            for part in self.parts:
                await stack.enter_async_context(part.open())
            yield self

    async def aclose(self) -> None:
        """Close all parts, one after the other."""
        for part in self.parts:
            await part.aclose()


class _RouterWire(Wire):
    """Wire of one rank: each call goes to the wire of the part that reaches the peer."""

    def __init__(self, router: Router, rank: int) -> None:
        self.rank = rank
        self._router = router
        self._routes: dict[int, Wire] = {}

    def route(self, peer: int) -> Wire:
        """Return the wire of the part that reaches a peer."""
        route = self._routes.get(peer)
        if route is None:
            route = self._routes[peer] = self._router._find_part(self.rank, peer).wire(self.rank).route(peer)
        return route

    def begin_send(self, dst: int, tag: int, data: Buffer, *, done: Done, **options: Any) -> Request | None:
        """Begin a send on the wire that reaches `dst`; see `Wire.begin_send`."""
        return self.route(dst).begin_send(dst, tag, data, done=done, **options)

    def begin_recv(self, src: int, tag: int, out: Buffer | None, nbytes: int, *, done: Done, **options: Any) -> Request:
        """Begin a receive on the wire that reaches `src`; see `Wire.begin_recv`."""
        return self.route(src).begin_recv(src, tag, out, nbytes, done=done, **options)

    @property
    def _parts(self) -> list[Wire]:
        """The wires of this rank in all parts."""
        return [part.wire(self.rank) for part in self._router.parts]

    def unexpected(self, tag: int | None = None) -> list[Envelope]:
        return [each for part in self._parts for each in part.unexpected(tag)]

    @contextmanager
    def watch(self, notify: Callable[[], None]) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.watch(notify))
            yield

    def check(self, peer: int, tag: int = 0) -> None:
        self.route(peer).check(peer, tag)

    def lost(self, src: int, tag: int = 0) -> LinkLostError | None:
        return self.route(src).lost(src, tag)
