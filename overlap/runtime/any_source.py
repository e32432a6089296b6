"""Receives from any source: they wait until a rank of the group has sent, and receive from that rank.

Sends of this process show up in their communicators; the transport announces sends of other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from ..collectives.reduce import Array
from ..errors import RankLeftError
from ..flight.recorder import Known
from .communicators import Communicators
from .context import RankContext
from .future import Failure, call_when_done, outcome, settle, tell
from .match import Key
from .operation import Members, Operation
from .outstanding import Issued


class AnyReceive(Issued[Array]):
    """The handle of a receive from any source; `await` it for the array.

    Attributes:
        name: As given by the caller, or "recv".
        src: Group rank that the message came from, once it is known.
    """

    __slots__ = (
        "_communicators", "_context", "_group", "_keys", "_leave", "_operation", "_receive", "_scope", "deadline_s",
        "record", "src",
    )  # fmt: skip

    def __init__(
        self,
        context: RankContext,
        communicators: Communicators,
        group: Members,
        keys: Sequence[Key],
        operation: Operation,
        receive: Callable[[int], None],
    ) -> None:
        """Make one; `start` it on the loop.

        Args:
            context: Of the rank that receives.
            communicators: Of its world.
            group: The group whose ranks may send.
            keys: Of the messages from each of them, by group rank.
            operation: The receive, once its source is known.
            receive: Issues it for a group rank.
        """
        super().__init__()
        self.name, self.place = operation.name, operation.place
        self.src: int | None = None
        self._context, self._communicators, self._group = context, communicators, group
        self._keys, self._operation, self._receive = keys, operation, receive
        self._scope: trio.CancelScope | None = None  # of the task that listens to other processes
        self._leave: Callable[[], None] = _nothing
        self.record = -1  # in the flight record
        self.deadline_s: float | None = None  # within which it must end

    @property
    def label(self) -> str:
        """Its name in messages."""
        tag = self._keys[0].tag
        return f"{self.name} from any rank{f' with tag {tag}' if tag else ''} on group '{self._group.name}'"

    def told(self) -> dict[str, str]:
        """Return its words for the flight record."""
        kind = "receive from any rank"
        return {"name": kind, "what": kind, "kind": kind, "group": self._group.name, "site": self.call_site}

    @property
    def awaits(self) -> Sequence[int]:
        """World ranks of which it waits for any one, until one has sent; then the receive from it says the rest."""
        others = [key for key in self._keys if key.src != self._group.rank]
        return [key.ends[0] for key in others] if self.src is None else ()

    def state(self, now_ns: int) -> str:
        """Describe its present state for people."""
        return "waits for any of them to send" if self.src is None else ""

    def _loop_thread(self) -> int | None:
        return self._context.thread

    def start(self) -> None:
        """Look for a message, and go on looking; the loop's thread only."""
        context = self._context
        context.outstanding.operations[self] = None
        self.record = context.flight.issued(self, Known(), None, 0, context.now_ns())
        if self.deadline_s is not None:
            context.expire(self, self.deadline_s)
        self._leave = self._communicators.queue(self._keys[0], self._look_soon)
        self._communicators.announce(self._keys[0])

    def expire(self, error: BaseException) -> None:
        """Fail it because it has not ended in time."""
        if self.src is None:
            self._end(None, Failure(error))
        else:
            self._operation.expire(error)

    def abandon(self, error: BaseException) -> None:
        """Fail it because the world has ended."""
        self.record = -1  # where it stays unfinished
        self._end(None, Failure(error, seen=True))

    def _look_soon(self) -> None:
        self._communicators.choose_soon(self._context, self._look)

    def _look(self) -> None:
        """Take the message that has been offered first; of those of one instant, that of the lowest rank."""
        if self.done or self.src is not None:
            return
        offered = [(self._communicators.offered_ns(key), key.src) for key in self._keys]
        broken = self._communicators.broken(self._keys[0])
        if broken is not None:
            self._end(None, Failure(broken(), seen=True))
            return
        first = min([(since_ns, src) for since_ns, src in offered if since_ns is not None], default=None)
        if first is not None:
            self._take(first[1])
        elif not self._all_have_left() and self._scope is None:
            self._scope = trio.CancelScope()
            elsewhere = [key for key in self._keys if self._communicators.elsewhere(key)]
            if elsewhere:
                self._context.spawn(self._listen, elsewhere, self._scope)

    async def _listen(self, keys: Sequence[Key], scope: trio.CancelScope) -> None:
        with scope:
            try:
                chosen = await self._communicators.announced(self._context.rank, keys, self._operation.call)
            except Exception as error:  # the wire to one of them is lost
                self._end(None, Failure(error))
                return
            if not self.done and self.src is None:
                self._take(keys[chosen].src)

    def _take(self, src: int) -> None:
        self.src = src
        self._receive(src)
        call_when_done(self._operation, lambda: self._end(*outcome(self._operation)))

    def _all_have_left(self) -> bool:
        """Give up when every other rank has finished without having sent anything."""
        others = [key for key in self._keys if key.src != self._group.rank]
        if others and all(self._communicators.sends_no_more(key) for key in others):
            rank = others[-1].ends[0]
            message = f"all other ranks finished their programs while rank {self._context.rank} waits in {self.label}"
            self._end(None, Failure(RankLeftError(f"{message} ({self.call_site})", culprit=rank)))
        return bool(self.done)

    def _end(self, value: object, failure: Failure | None) -> None:
        if not settle(self, value, failure):
            return
        if self.deadline_s is not None:
            self._context.deadlines.drop(self, self.deadline_s)
        now_ns = self._context.now_ns()
        self._context.flight.ended(self.record, now_ns if failure is None else -now_ns)
        if self.src is None:
            self._operation.release()
        if self._scope is not None:
            self._scope.cancel()
        self._leave()
        outstanding = self._context.outstanding
        outstanding.operations.pop(self, None)
        if outstanding.draining or failure is not None:
            outstanding.note_end(self, failure)
        tell(self)


def _nothing() -> None:
    """End nothing."""
