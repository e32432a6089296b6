"""Mpi: the transport that leaves the bytes to the cluster's own MPI library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self

import trio
from trio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled

from transports.base import (
    ArgumentError,
    Buffer,
    Delivery,
    Endpoint,
    LinkLostError,
    Statistics,
    Transport,
    TransportClosedError,
    as_bytes,
    check_length,
    check_tag,
    describe_ranks,
)
from transports.factory import Bootstrap
from transports.mpi.bootstrap import wait_for
from transports.mpi.header import RANK_LIMIT
from transports.mpi.library import world
from transports.mpi.mailroom import Mailroom
from transports.mpi.pace import Pace
from transports.mpi.waiting import Key
from transports.mpi.wire import MpiWire, Wire
from transports.rooms import Rooms

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Mpi", "factory"]


class Mpi(Transport):
    """Joins the processes of an MPI job, one object in each: ``mpiexec -n 4 python -m mpi4py train.py``.

    Messages up to 16 KiB travel at once; `Endpoint.send` then returns before they are received, as long as no more
    than 16 MiB of them wait at the receiving process (less each beyond 16 processes). Longer ones are announced, and
    go from the sender's array into the receiver's when both are there. Priorities order what one process sends to
    another beyond four pieces of 4 MiB.

    MPI is called from the Trio thread only. Nothing can wake an event loop when a message comes, so a task looks for
    it: at every turn for a millisecond after something happened, then ever less often, see `pace.Pace`.

    MPI decides what happens when a process dies: nearly always the launcher ends the job. An uncaught exception ends
    it only under ``python -m mpi4py``, or through `abort`; otherwise the other processes wait for ever. A process that
    stops without dying holds up what it was receiving or sending, cancelled or not.

    Args:
        placement: Ranks of every process, by its rank in the communicator; by default one each, the same number.
        comm: The processes; by default all that the launcher started. `open` makes a copy, so that nothing else that
            uses the communicator meets messages of ours.
        linger_s: How long closing waits for the other processes to close, too, and for what has been sent.
        report: Called with one line when closing has waited in vain.

    Raises:
        ArgumentError: The placement does not fit the communicator, or a rank has two places.
        ImportError: mpi4py is not installed.
    """

    def __init__(
        self,
        *,
        placement: Sequence[Sequence[int]] | None = None,
        comm: MPI.Intracomm | None = None,
        linger_s: float = 5.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._comm = world() if comm is None else comm
        self.member = self._comm.Get_rank()
        members = self._comm.Get_size()
        self._placement = _checked([[rank] for rank in range(members)] if placement is None else placement, members)
        self._linger_s = linger_s
        self._report = report
        self.ranks = self._placement[self.member]
        self.peers = tuple(sorted(rank for ranks in self._placement for rank in ranks))
        self._known = frozenset(self.peers)
        self._endpoints = {rank: _MpiEndpoint(self, rank) for rank in self.ranks}
        self._pace = Pace()
        self._rooms = Rooms()
        self._wire: Wire | None = None
        self._mailroom: Mailroom | None = None
        self._closed = False
        self._settled = trio.Event()
        self._stopped = False

    def endpoint(self, rank: int) -> Endpoint:
        """Return the endpoint of a local rank.

        Raises:
            ArgumentError: The rank does not live here.
        """
        try:
            return self._endpoints[rank]
        except KeyError:
            raise ArgumentError(f"rank {rank} does not live here; this process has {self._names}") from None

    def statistics(self) -> Statistics:
        """Return what waits here: calls of local ranks, and what has come from others and is not received yet."""
        return Statistics() if self._mailroom is None else self._mailroom.statistics()

    def open(self) -> AbstractAsyncContextManager[Self]:
        """Keep the transport open for the length of an ``async with``. Every process must open its own, and once.

        What the block raises comes out of it in an exception group.
        """
        return self._opened()

    def abort(self, code: int = 1) -> NoReturn:
        """End all processes of the job at once, this one too. For when one has failed and others may not notice."""
        self._comm.Abort(code)
        raise AssertionError("MPI_Abort does not return")

    async def aclose(self) -> None:
        """Close this end: see `Transport.aclose`.

        What has been sent still arrives, and what both ends have agreed on is finished. Then this waits for the other
        processes to close, too, but no longer than ``linger_s``; their calls that wait for ours raise `LinkLostError`.
        """
        if self._closed or self._mailroom is None:
            self._closed = True
            await cancel_shielded_checkpoint()
            return
        self._closed = True
        try:
            self._mailroom.close()
        except LinkLostError as error:
            self._lose(error)
        self._pace.stir()
        with trio.move_on_after(self._linger_s, shield=True):
            await self._settled.wait()
        self._let_go()

    def _let_go(self) -> None:
        assert self._mailroom is not None
        assert self._wire is not None
        agreed = self._settled.is_set() and not self._stopped
        self._stopped = True
        self._pace.stir()
        if not agreed and self._report is not None:
            waited_for = self._mailroom.missing or "what it was sending"
            self._report(f"closed without agreement: process {self.member} waited {self._linger_s} s for {waited_for}")
        self._wire.close(agreed=agreed)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Self]:
        if self._wire is not None or self._closed:
            raise TransportClosedError("an Mpi transport is opened once; make another one")
        self._wire = await self._join()
        self._mailroom = Mailroom(member=self.member, placement=self._placement, wire=self._wire)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            try:
                yield self
            finally:
                await self.aclose()

    async def _join(self) -> Wire:
        """Make a communicator of our own, which all processes do together."""
        comm, request = self._comm.Idup()
        await wait_for(request)
        return MpiWire(comm)

    async def _look(self) -> None:
        """Look for what has come until everything is closed; shielded, for calls that have met must be completed."""
        mailroom = self._open_mailroom()
        with trio.CancelScope(shield=True):
            try:
                while not self._stopped:
                    self._poll(mailroom)
                    if self._closed and mailroom.settled:
                        self._settled.set()
                        return
                    await self._pace.rest(urgent=self._closed or mailroom.urgent, moving=mailroom.moving)
            except Exception as error:
                self._lose(LinkLostError(f"the transport has failed: {error!r}"))  # nobody else would wake them
                raise

    def _poll(self, mailroom: Mailroom) -> None:
        try:
            if not self._stopped and mailroom.poll():
                self._pace.stir()
        except LinkLostError as error:
            self._lose(error)

    def _lose(self, error: LinkLostError) -> None:
        """Give up: the MPI library has failed."""
        self._stopped = True
        self._settled.set()
        self._open_mailroom().lose_all(error.reason)

    def _open_mailroom(self) -> Mailroom:
        if self._mailroom is None:
            raise TransportClosedError("the transport is not open yet: async with transport.open()")
        return self._mailroom

    def _key(self, src: int, dst: int, peer: int, tag: int) -> Key:
        check_tag(tag)
        if peer not in self._known:
            raise ArgumentError(f"there is no rank {peer} here; this Mpi joins {describe_ranks(self.peers)}")
        return src, dst, tag

    @property
    def _names(self) -> str:
        return describe_ranks(self.ranks)


class _MpiEndpoint(Endpoint):
    def __init__(self, transport: Mpi, rank: int) -> None:
        self.rank = rank
        self._transport = transport

    async def send(self, dst: int, tag: int, data: Buffer, *, priority: int = 0) -> None:
        view = as_bytes(data)
        key = self._transport._key(self.rank, dst, dst, tag)
        mailroom = self._transport._open_mailroom()
        await checkpoint_if_cancelled()
        self._transport._poll(mailroom)  # credit may have come
        sending = mailroom.send(key, view, priority)
        if sending is None:
            await cancel_shielded_checkpoint()
            return
        self._transport._pace.stir()
        await sending.wait(partial(mailroom.withdraw_send, sending))

    async def recv(self, src: int, tag: int, nbytes: int) -> Delivery:
        check_length(nbytes)
        room = self._transport._rooms.take(nbytes)
        await self.recv_into(src, tag, room[:nbytes])
        return Delivery(room[:nbytes].toreadonly(), partial(self._transport._rooms.give_back, room))

    async def recv_into(self, src: int, tag: int, out: Buffer) -> None:
        view = as_bytes(out, name="out", writable=True)
        key = self._transport._key(src, self.rank, src, tag)
        mailroom = self._transport._open_mailroom()
        await checkpoint_if_cancelled()
        self._transport._poll(mailroom)  # it may be here already
        receive = mailroom.receive(key, view)
        if receive is None:
            await cancel_shielded_checkpoint()
            return
        self._transport._pace.stir()
        await receive.wait(partial(mailroom.withdraw_receive, receive))


def _checked(placement: Sequence[Sequence[int]], members: int) -> tuple[tuple[int, ...], ...]:
    if len(placement) != members:
        raise ArgumentError(f"the placement is for {len(placement)} processes; the communicator has {members}")
    ranks = [rank for here in placement for rank in here]
    if len(set(ranks)) != len(ranks) or not all(placement) or not all(0 <= rank < RANK_LIMIT for rank in ranks):
        raise ArgumentError(f"placement is {placement!r}; give every process ranks from 0 up, each rank once")
    return tuple(tuple(here) for here in placement)


def factory(bootstrap: Bootstrap) -> Mpi:
    """Make the transport of a process that an MPI launcher started. The library encrypts and connects as it is set up.

    Raises:
        ArgumentError: The placement does not fit the communicator of all processes.
        ImportError: mpi4py is not installed.
    """
    return Mpi(placement=bootstrap.placement, report=bootstrap.report)
