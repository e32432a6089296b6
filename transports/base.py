"""The contract of transports.

A transport is one process's end of a fabric. Each rank that lives in the process has a wire there (`transports.wire`).
Bytes go from a buffer of one rank into a buffer of another; what they mean is not known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

import trio

from transports.wire import Wire, describe_ranks

if TYPE_CHECKING:
    from transports.shared_memory.board import Board

#: Operations under way at once on a board: a rank may post number n once all ranks have finished n - OPERATIONS.
OPERATIONS = 64
#: Longest payload of a post on a board, in bytes.
PAYLOAD_BYTES = 4096


class Transport(ABC):
    """One process's end of a fabric."""

    ranks: tuple[int, ...]  # The local ranks, whose wires live in this process
    # Ranks that the local ranks can send to and receive from; local ranks only if the transport joins them too.
    peers: tuple[int, ...]

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Return whether every two of some ranks can read each other's memory at no cost.

        This default returns False, as do wrappers that emulate or damage a wire: a short cut would lead around them.
        """
        return False

    def board(self, key: int, ranks: Sequence[int]) -> Board | None:
        """Return the shared memory of some ranks in several processes of one host; None if they share none.

        This default returns None, as do wrappers that emulate or damage a wire.

        Args:
            key: The group's number, below 2**64, the same on every rank.
            ranks: Ranks of the group, in its order.
        """
        return None

    def loan(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory that other processes of the host map, and its release; None: there is none.

        Any thread may call it and release the memory, at any time; the release does nothing in a forked process. This
        default returns None.
        """
        return None

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether some ranks live on different hosts, joined by a wire that is slower than a processor.

        All processes of the ranks return the same. This default returns False.
        """
        return False

    @property
    def socket_placement(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each process, if sockets join all processes of the world, inside a host as well; else empty.

        All processes return the same. This default is empty.
        """
        return ()

    @abstractmethod
    def wire(self, rank: int) -> Wire:
        """Return the wire of a local rank, the same one each time.

        Raises:
            ArgumentError: The rank does not live here.
        """

    def lose(self, ranks: Sequence[int], reason: str) -> None:  # noqa: B027 - some wires notice by themselves
        """Give up ranks of other processes that are known to be lost: calls that wait for them fail now.

        Args:
            ranks: All ranks of the lost processes.
            reason: Evidence of the loss, for messages.
        """

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Keep the transport open for the length of an ``async with``; background tasks, if any, live inside.

        This default yields the transport, and closes it at the end, whatever was cancelled.
        """
        try:
            yield self
        finally:
            with trio.CancelScope(shield=True):
                await self.aclose()

    async def aclose(self) -> None:
        """Close this end: pending operations and later calls raise `TransportClosedError`. Twice is harmless."""
        await trio.lowlevel.checkpoint()

    def __repr__(self) -> str:
        """Name the ranks."""
        return f"<{type(self).__name__} of {describe_ranks(self.ranks)}>"
