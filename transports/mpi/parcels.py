"""Large messages under way: cut into pieces, the most urgent first, a few pieces at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count

from transports.mpi.wire import CHUNK_BYTES, Wire

__all__ = ["Inbound", "Outbox", "Parcel"]

#: Pieces under way at once, to one process or of one receive: enough to keep the wire full while a finished one is
#: noticed, few enough for a more urgent message to get its turn soon.
WINDOW = 4


class Parcel:
    """A message that is sent or received piece by piece. An empty message is one empty piece.

    Attributes:
        slot: The receiver's slot.
        done: Called when the last piece has been sent or received.
    """

    __slots__ = ("_begun_bytes", "_flying", "_untouched", "_view", "done", "slot")

    def __init__(self, view: memoryview, slot: int, done: Callable[[], None]) -> None:
        self._view = view
        self._begun_bytes = 0
        self._flying = 0
        self._untouched = True
        self.slot = slot
        self.done = done

    @property
    def all_begun(self) -> bool:
        """Whether no piece is left to begin."""
        return not self._untouched and self._begun_bytes == self._view.nbytes

    def begin(self) -> memoryview:
        """Return the next piece."""
        piece = self._view[self._begun_bytes : self._begun_bytes + CHUNK_BYTES]
        self._begun_bytes += piece.nbytes
        self._flying += 1
        self._untouched = False
        return piece

    def landed(self) -> None:
        """Note that the oldest piece is through, and call ``done`` if it was the last one."""
        self._flying -= 1
        if self.all_begun and not self._flying:
            self.done()

    @property
    def full(self) -> bool:
        """Whether as many pieces are under way as may be."""
        return self._flying >= WINDOW


class Outbox:
    """What one process has been asked for by another, and sends in the order of priority."""

    def __init__(self, wire: Wire, member: int) -> None:
        self._wire = wire
        self._member = member
        self._heap: list[tuple[int, int, Parcel]] = []
        self._order = count()
        self._flying = 0

    def add(self, parcel: Parcel, priority: int) -> None:
        """Send a parcel when its turn comes; lower is more urgent, equal ones go in the order of adding."""
        heappush(self._heap, (priority, next(self._order), parcel))
        self._fill()

    def _fill(self) -> None:
        while self._heap and self._flying < WINDOW:
            parcel = self._heap[0][2]
            self._flying += 1
            self._wire.send(self._member, parcel.slot, parcel.begin(), partial(self._landed, parcel))
            if parcel.all_begun:
                heappop(self._heap)

    def _landed(self, parcel: Parcel) -> None:
        self._flying -= 1
        self._fill()
        parcel.landed()


class Inbound:
    """A message that is being received, its slot's pieces posted a few ahead."""

    def __init__(self, wire: Wire, member: int, parcel: Parcel) -> None:
        self._wire = wire
        self._member = member
        self._parcel = parcel
        self._posted: list[Callable[[], None]] = []
        self._fill()

    @property
    def slot(self) -> int:
        """The slot that it occupies."""
        return self._parcel.slot

    def _fill(self) -> None:
        while not self._parcel.all_begun and not self._parcel.full:
            piece = self._parcel.begin()
            self._posted.append(self._wire.receive(self._member, self._parcel.slot, piece, self._landed))

    def _landed(self) -> None:
        self._posted.pop(0)  # pieces of a slot arrive in order
        self._fill()
        self._parcel.landed()

    def take_back(self) -> None:
        """Post no more, and take back what is posted; the sender has said that it sends nothing."""
        for take_back in reversed(self._posted):
            take_back()
        self._posted.clear()
