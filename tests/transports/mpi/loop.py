"""A wire in memory in place of MPI's, so that everything above it is tested wherever the suite runs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import trio

from transports.mpi import Mpi
from transports.mpi.mpi_link import CREDIT_BYTES
from transports.mpi.wire import Wire

if TYPE_CHECKING:
    from mpi4py import MPI

_Entry = tuple[memoryview, Callable[[], None]]


class Fabric:
    """What is under way among a few members, each with a `LoopWire`."""

    def __init__(self, members: int) -> None:
        self.headers: list[deque[tuple[int, bytes]]] = [deque() for _ in range(members)]
        self.sends: defaultdict[tuple[int, int, int], deque[_Entry]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int, int], deque[_Entry]] = defaultdict(deque)
        self.dones: list[list[Callable[[], None]]] = [[] for _ in range(members)]
        self.wires = [LoopWire(self, member) for member in range(members)]


class LoopWire(Wire):
    """One member's end. `begun` lists (slot, nbytes) of the pieces sent; `agreed` says how it was closed."""

    def __init__(self, fabric: Fabric, member: int) -> None:
        self.fabric = fabric
        self.member = member
        self.begun: list[tuple[int, int]] = []
        self.agreed: bool | None = None
        self._under_way = 0

    def send_header(self, member: int, header: bytes) -> None:
        self.fabric.headers[member].append((self.member, header))

    def send(self, member: int, slot: int, piece: memoryview, done: Callable[[], None]) -> None:
        self._under_way += 1
        self.begun.append((slot, piece.nbytes))
        self.fabric.sends[self.member, member, slot].append((piece, done))

    def receive(self, member: int, slot: int, piece: memoryview, done: Callable[[], None]) -> Callable[[], None]:
        self._under_way += 1
        entry = (piece, done)
        queue = self.fabric.receives[member, self.member, slot]
        queue.append(entry)

        def take_back() -> None:
            self._under_way -= 1
            queue.remove(entry)

        return take_back

    def poll(self, handle: Callable[[int, memoryview], None]) -> bool:
        headers = self.fabric.headers[self.member]
        happened = bool(headers)
        for _ in range(len(headers)):
            src, header = headers.popleft()
            handle(src, memoryview(header))
        for (src, dst, slot), queue in list(self.fabric.receives.items()):
            sends = self.fabric.sends[src, dst, slot]
            while dst == self.member and queue and sends:
                happened = True
                (piece, sent), (room, received) = sends.popleft(), queue.popleft()
                room[:] = piece
                self.fabric.dones[src].append(sent)
                self._under_way -= 1
                received()
        dones, self.fabric.dones[self.member] = self.fabric.dones[self.member], []
        self._under_way -= len(dones)
        for done in dones:
            done()
        return happened or bool(dones)

    @property
    def busy(self) -> bool:
        return self._under_way > 0

    def close(self, *, agreed: bool) -> None:
        self.agreed = agreed


class _Comm:
    def __init__(self, member: int, members: int) -> None:
        self._member, self._members = member, members

    def Get_rank(self) -> int:
        return self._member

    def Get_size(self) -> int:
        return self._members


class LoopMpi(Mpi):
    """An `Mpi` whose wire is in memory."""

    def __init__(
        self,
        fabric: Fabric,
        member: int,
        *,
        placement: Sequence[Sequence[int]] | None = None,
        credit_bytes: int = CREDIT_BYTES,
        linger_s: float = 60.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        comm = cast("MPI.Intracomm", _Comm(member, len(fabric.wires)))
        super().__init__(placement=placement, comm=comm, credit_bytes=credit_bytes, linger_s=linger_s, report=report)
        self._loop = fabric.wires[member]

    async def _make_wire(self) -> Wire:
        await trio.lowlevel.checkpoint()
        return self._loop
