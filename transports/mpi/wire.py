"""The wire of MPI links: headers and pieces of messages. No Trio here; every call returns at once.

Headers travel with MPI tag 0 into a ring of receives that are always posted. Bytes travel with tag 1 + slot, in chunks,
from the sender's array into the receiver's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from transports.failures import LinkLostError
from transports.matching import MessageKind
from transports.mpi.bootstrap import mpi
from transports.packets import Packets

if TYPE_CHECKING:
    from mpi4py import MPI

#: Longest message that travels inside its header: up to here two copies cost less than a rendezvous.
EAGER_BYTES = 16 << 10

#: The kind of the last header of a process.
BYE = 64
#: Headers: an ACCEPT has one more field here, the receiver's slot for the bytes. The magic names the version.
HEADERS = Packets({MessageKind.ACCEPT: 2, BYE: 0}, magic=b"oMP3")

#: Length of a piece of a large message. Over shared memory MPICH copies a piece in one go, in which the event loop
#: stands still: 4 MiB take half a millisecond, and smaller pieces cost bandwidth.
CHUNK_BYTES = 4 << 20

#: Messages that one process may be sending to another at once; MPI guarantees 32767 tags.
SLOTS = 256

#: Posted receives for headers. MPI keeps further headers that arrive at once.
_RING = 32

#: How often one poll tests for finished pieces. Every test moves some bytes, and costs less than another poll.
_LOOKS = 8

_HEADER_TAG = 0


class Wire(ABC):
    """Interface of links to MPI. Only `poll` calls callbacks, never the other methods."""

    @abstractmethod
    def send_header(self, member: int, header: bytes) -> None:
        """Send a header; headers to one member arrive in this order."""

    @abstractmethod
    def send(self, member: int, slot: int, piece: memoryview, done: Callable[[], None]) -> None:
        """Send a piece, which must not change until ``done`` is called; pieces in one slot arrive in this order."""

    @abstractmethod
    def receive(self, member: int, slot: int, piece: memoryview, done: Callable[[], None]) -> Callable[[], None]:
        """Receive the next piece of a slot, and call ``done`` then.

        Returns:
            A function that cancels the receive; only for a piece that its sender will never send.
        """

    @abstractmethod
    def poll(self, handle: Callable[[int, memoryview], None]) -> bool:
        """Call ``handle(member, header)`` for arrived headers, and callbacks of finished pieces; return whether any.

        The memory of a header is used again after ``handle`` returns.
        """

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a transfer that was started here is not finished; receives of headers do not count."""

    @abstractmethod
    def close(self, *, agreed: bool) -> None:
        """Release the wire. ``agreed``: all members release theirs, and nothing is under way."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _translate_errors(method: Callable[Concatenate[MpiWire, _P], _R]) -> Callable[Concatenate[MpiWire, _P], _R]:
    """Return a method that raises `LinkLostError` for errors of MPI."""

    @wraps(method)
    def call(self: MpiWire, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except self.failure as error:
            raise LinkLostError(f"the MPI library failed: {error}; see what MPI has printed") from error

    return call


class MpiWire(Wire):
    """The wire over a communicator of its own."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._mpi = mpi()
        self.failure: type[Exception] = self._mpi.Exception
        self._comm = comm
        self._byte = self._mpi.BYTE
        self._testsome = self._mpi.Request.Testsome
        self._status = self._mpi.Status()
        self._pending: list[MPI.Request] = []
        self._dones: list[Callable[[], None] | None] = []
        self._buffers = [memoryview(bytearray(HEADERS.head_bytes + EAGER_BYTES)) for _ in range(_RING)]
        self._ring = [comm.Recv_init([room, self._byte], self._mpi.ANY_SOURCE, _HEADER_TAG) for room in self._buffers]
        self._next = 0
        self._polling = False
        for request in self._ring:
            request.Start()

    @_translate_errors
    def send_header(self, member: int, header: bytes) -> None:
        """Send a header without waiting."""
        request = self._comm.Isend([header, self._byte], member, _HEADER_TAG)
        if not request.Test():  # most are sent at once
            self._pending.append(request)
            self._dones.append(None)

    @_translate_errors
    def send(self, member: int, slot: int, piece: memoryview, done: Callable[[], None]) -> None:
        """Send a piece without waiting; `done` is called by a later `poll`."""
        self._pending.append(self._comm.Isend([piece, self._byte], member, 1 + slot))
        self._dones.append(done)

    @_translate_errors
    def receive(self, member: int, slot: int, piece: memoryview, done: Callable[[], None]) -> Callable[[], None]:
        """Receive the next piece of a slot without waiting; return a function that cancels the receive."""
        request = self._comm.Irecv([piece, self._byte], member, 1 + slot)
        self._pending.append(request)
        self._dones.append(done)

        def cancel() -> None:
            """Cancel the receive, which must not have matched."""
            at = self._pending.index(request)
            self._remove_entry(at)
            request.Cancel()
            request.Wait()  # a local operation after Cancel, says the standard

        return cancel

    @_translate_errors
    def poll(self, handle: Callable[[int, memoryview], None]) -> bool:
        """Handle headers and call callbacks of finished pieces; False, at once, for a call from such a callback."""
        if self._polling:
            return False
        self._polling = True
        try:
            return self._poll_once(handle)
        finally:
            self._polling = False

    def _poll_once(self, handle: Callable[[int, memoryview], None]) -> bool:
        """Handle up to a ring of headers, and test for finished pieces; return whether there were any."""
        happened = False
        for _ in range(_RING):  # bounded, because other tasks need their turn
            if not self._ring[self._next].Test(self._status):
                break
            happened = True
            at, status = self._next, self._status
            handle(status.Get_source(), self._buffers[at][: status.Get_count(self._byte)])
            self._ring[at].Start()
            self._next = (at + 1) % _RING
        for _ in range(_LOOKS):
            if not self._pending:
                break
            if self._finish_pieces():
                return True
        return happened

    def _finish_pieces(self) -> bool:
        """Remove the pieces that MPI has finished, and call their callbacks; return whether there were any."""
        finished = self._testsome(self._pending)
        if not finished:
            return False
        dones = [self._dones[at] for at in finished]
        for at in sorted(finished, reverse=True):
            self._remove_entry(at)
        for done in dones:
            if done is not None:
                done()
        return True

    def _remove_entry(self, at: int) -> None:
        """Remove a pending transfer by moving the last one into its place."""
        request, done = self._pending.pop(), self._dones.pop()
        if at < len(self._pending):
            self._pending[at], self._dones[at] = request, done

    @property
    def busy(self) -> bool:
        """Whether a header or a piece is under way."""
        return bool(self._pending)

    @_translate_errors
    def close(self, *, agreed: bool) -> None:
        """Cancel the ring, and free the communicator, which is a collective of all members."""
        for request in self._ring:
            request.Cancel()
            request.Wait()
            request.Free()
        if agreed:
            self._comm.Free()
