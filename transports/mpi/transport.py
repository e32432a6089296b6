"""Mpi: the transport that leaves the bytes to the cluster's own MPI library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import trio

from transports.factory import Bootstrap
from transports.failures import ArgumentError, LinkLostError
from transports.matched import MatchedTransport
from transports.mpi.bootstrap import mark_broken, wait_for, world
from transports.mpi.mpi_link import CREDIT_BYTES, MpiLink, limits
from transports.mpi.polling import PollPace
from transports.mpi.wire import MpiWire, Wire

if TYPE_CHECKING:
    from mpi4py import MPI


class Mpi(MatchedTransport):
    """Joins the processes of an MPI job, one object in each: ``mpiexec -n 4 python -m mpi4py train.py``.

    Messages up to 16 KiB travel at once; `Endpoint.send` then returns before they are received, as long as no more
    than 16 MiB of them wait at the receiving process (less each beyond 16 processes). Longer ones are announced, and
    go from the sender's array into the receiver's when both are there. Priorities order the messages from one process
    to another beyond four pieces of 4 MiB.

    MPI is called from the Trio thread only. MPI cannot wake an event loop when a message arrives, so a task polls: at
    every turn for a millisecond after the last message, then ever less often, see `polling.PollPace`.

    MPI decides what happens when a process dies: nearly always the launcher ends the job. An uncaught exception ends
    it only under ``python -m mpi4py``, or through `abort`; otherwise the other processes wait for ever. A process that
    stops without dying holds up the messages that it was receiving or sending, cancelled or not.

    Args:
        placement: Ranks of every process, by its rank in the communicator; by default one each, the same number.
        comm: The processes; by default all that the launcher started. `open` makes a copy, so that nothing else that
            uses the communicator meets messages of ours.
        credit_bytes: Bytes of small messages from one process that another has not received, at most.
        linger_s: How long closing waits for messages under way, and for the other processes to close.
        report: Prints a line when closing has waited in vain.

    Raises:
        ArgumentError: The placement does not fit the communicator, or a rank has two places.
        ImportError: mpi4py is not installed.
    """

    def __init__(
        self,
        *,
        placement: Sequence[Sequence[int]] | None = None,
        comm: MPI.Intracomm | None = None,
        credit_bytes: int = CREDIT_BYTES,
        linger_s: float = 5.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._comm = world() if comm is None else comm
        members = self._comm.Get_size()
        placement = [[rank] for rank in range(members)] if placement is None else placement
        if len(placement) != members or not all(placement):
            raise ArgumentError(
                f"placement is {placement!r}; the communicator has {members} processes: give every process ranks"
            )
        super().__init__(self._comm.Get_rank(), placement, joins_itself=True)
        self.links: dict[int, MpiLink] = {}
        self._limits = limits(members, credit_bytes=credit_bytes)
        self._linger_s = linger_s
        self._report = report
        self._pace = PollPace()
        self._wire: Wire | None = None
        self._settled = trio.Event()
        self._stopped = False

    def abort(self, code: int = 1) -> NoReturn:
        """End all processes of the job at once, this one too; for a failure that other processes may not notice."""
        self._comm.Abort(code)
        raise AssertionError("MPI_Abort does not return")

    async def leave(self) -> None:
        """Finish matched messages, and wait up to ``linger_s`` for the other processes to close.

        Sent messages still arrive; calls of other processes that wait for this one raise `LinkLostError`.
        """
        for link in self.links.values():
            link.give_up_waiting()
        if not self._has_lost_links():
            with trio.move_on_after(self._linger_s, shield=True):
                await self._settled.wait()
        self._close_wire()

    def _close_wire(self) -> None:
        """Close the wire, and report the processes that have not agreed to that in time."""
        assert self._wire is not None
        agreed = self._settled.is_set() and not self._stopped and not self._has_lost_links()
        self._stopped = True
        self._pace.stir()
        if not agreed:
            mark_broken()
        if not agreed and not self._has_lost_links() and self._report is not None:
            missing = ", ".join(link.name for link in self._remaining_links())
            waited_for = missing or "messages that it was sending"
            self._report(f"closed without agreement: process {self.member} waited {self._linger_s} s for {waited_for}")
        self._wire.close(agreed=agreed)

    async def join(self) -> None:
        """Make a communicator of this transport; a collective of all processes."""
        wire = self._wire = await self._make_wire()
        self.links = self.make_links(lambda member, ranks: self._make_link(member, ranks, wire))

    def _make_link(self, member: int, ranks: tuple[int, ...], wire: Wire) -> MpiLink:
        """Return the link to a process."""
        return MpiLink(
            member,
            ranks,
            self.ranks,
            self._limits,
            self.memory,
            wire=wire,
            look=lambda: self._poll_wire(wire),
            stir=self._pace.stir,
            failed=self._lose_all,
        )

    async def _make_wire(self) -> Wire:
        comm, request = self._comm.Idup()
        await wait_for(request)
        return MpiWire(comm)

    async def run(self) -> None:
        """Poll for messages until the transport is closed."""
        wire = self._wire
        assert wire is not None, "it has joined the others"
        try:
            while not self._stopped:
                self._poll_wire(wire)
                if self.state is not None and self._has_settled(wire):
                    self._settled.set()
                    return
                await self._pace.rest(urgent=self.state is not None or self._has_waiting_calls(), moving=wire.busy)
        except Exception as error:
            self._lose_all(
                LinkLostError(f"the transport has failed: {error!r}")
            )  # nothing else would wake the waiting calls
            raise

    def _has_settled(self, wire: Wire) -> bool:
        """Send goodbyes once nothing is unfinished; return whether all other processes have sent theirs."""
        if not all(link.engine.quiet for link in self.links.values()):
            return False
        for link in self.links.values():
            if link.member != self.member:
                link.send_bye()
        return not (wire.busy or self._remaining_links())

    def lose(self, ranks: Sequence[int], reason: str) -> bool:
        """Give up ranks of other processes, whose loss MPI does not report; closing does not wait for them."""
        lost = [member for member in self.links if not set(ranks).isdisjoint(self.placement[member])]
        for member in lost:
            self.links[member].give_up(reason)
        self._pace.stir()
        return bool(lost)

    def _has_lost_links(self) -> bool:
        return any(link.lost for link in self.links.values())

    def _remaining_links(self) -> list[MpiLink]:
        """Return the links to other processes that have not left."""
        return [link for link in self.links.values() if link.member != self.member and link.engine.gone is None]

    def _has_waiting_calls(self) -> bool:
        """Whether a call here waits for its other end."""
        engines = [link.engine for link in self.links.values()]
        return any(engine.outgoing.sends or engine.incoming.awaited for engine in engines)

    def _poll_wire(self, wire: Wire) -> None:
        """Handle arrived headers and finished pieces; an error of MPI ends all links."""
        try:
            if not self._stopped and wire.poll(lambda member, message: self.links[member].handle(message)):
                self._pace.stir()
        except LinkLostError as error:
            self._lose_all(error)

    def _lose_all(self, error: LinkLostError) -> None:
        """Stop, and fail the calls of all links, because the MPI library has failed."""
        self._stopped = True
        self._settled.set()
        for link in self.links.values():
            link.lose(error.reason)


def factory(bootstrap: Bootstrap) -> Mpi:
    """Make the transport of a process that an MPI launcher started. The library encrypts and connects as it is set up.

    Raises:
        ArgumentError: The placement does not fit the communicator of all processes.
        ImportError: mpi4py is not installed.
    """
    return Mpi(placement=bootstrap.placement, report=bootstrap.report)
