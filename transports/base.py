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
        """Return whether any two of the ranks can read each other's memory at no cost.

        If True, callers copy between the ranks' arrays and send no messages. This default returns False. So do wrappers
        that emulate or damage a wire: they would not see such copies.
        """
        return False

    def board(self, key: int, ranks: Sequence[int]) -> Board | None:
        """Return the board of a group: memory that its ranks, in several processes of one host, share. None: no board.

        This default returns None, as do wrappers that emulate or damage a wire.

        Args:
            key: The group's number, below 2**64, the same on every rank.
            ranks: Ranks of the group, in its order.
        """
        return None

    def loan(self, nbytes: int) -> tuple[memoryview, Callable[[], None]] | None:
        """Return memory of `nbytes` that other processes of the host can read, and a function that releases the memory.

        None if there is no such memory, as by default. Any thread may call this, and the release. In a forked process
        the release does nothing.
        """
        return None

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether this transport joins some of the ranks over a network, because they live on different hosts.

        The answer is the same in all processes of the ranks. This default returns False.
        """
        return False

    @property
    def ranks_joined_by_sockets(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each process, if sockets join all processes of the world, even those of one host; else empty.

        The prices of collectives use it: between processes that only sockets join, messages cost as much as between
        hosts. The value is the same in all processes. This default is empty.
        """
        return ()

    @abstractmethod
    def wire(self, rank: int) -> Wire:
        """Return the wire of a local rank, the same one each time.

        Raises:
            ArgumentError: The rank does not live here.
        """

    def lose(self, ranks: Sequence[int], reason: str) -> None:  # noqa: B027 - some wires notice by themselves
        """Fail the calls that wait for some ranks of other processes, because these processes are known to be lost.

        Args:
            ranks: All ranks of the lost processes.
            reason: Evidence of the loss, for messages.
        """

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Keep the transport open for the length of an ``async with``; background tasks, if any, run within it.

        This default yields the transport. At the end it closes the transport, even if the block was cancelled.
        """
        try:
            yield self
        finally:
            with trio.CancelScope(shield=True):
                await self.aclose()

    async def aclose(self) -> None:
        """Close this end: pending operations and later calls raise `TransportClosedError`. It may be called twice."""
        await trio.lowlevel.checkpoint()

    def __repr__(self) -> str:
        """Name the ranks."""
        return f"<{type(self).__name__} of {describe_ranks(self.ranks)}>"
