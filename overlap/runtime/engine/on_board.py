"""Small collectives between processes of one host, whose data lies on the board itself.

These are barriers, and all-reduces of inputs that fit in a post.

Nobody waits for the others to have read what it posts: rows of a board are used again only when they have.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from transports import LinkLostError
from transports.common import OPERATIONS, PAYLOAD_BYTES, PHASES

from ...collectives.call import Call
from ...collectives.kinds import Collective
from ...collectives.reduce import Array
from ..communicator import ShortWay
from ..match import Match
from ..operation import Operation
from .meeting import BoardRun, Meeting, Mode

_ARRIVED = 1


class Exchange(ShortWay):
    """Where the ranks of a group meet for one small operation again and again: what they post on a board, as arrays.

    Args:
        meeting: Of the ranks; its board is ready.
        call: Which: one that is `small`.

    Attributes:
        tag: Of the operation whose input was posted last.
    """

    __slots__ = ("_call", "_mode", "_posted", "meeting", "tag")
    meeting: Meeting
    tag: int

    def __init__(self, meeting: Meeting, call: Call) -> None:
        self.meeting, self._call, self.tag = meeting, call, 0
        self._mode = Mode.ON_BOARD if call.nbytes else Mode.NOWHERE
        self._posted = [_posted(meeting, call, position) for position in range(call.size)] if call.nbytes else []

    def post(self, operation: Operation) -> bool:
        """Post a rank's input; whether all others have come, who are woken then."""
        board, position, number = self.meeting.board, operation.port.position, operation.seq
        self.tag = tag = self.meeting.communicator.tag(self._call, number)
        if self._posted:
            row = number % OPERATIONS, ...  # "...", or an array without dimensions would be a number
            self._posted[position][row] = cast(Array, operation.source)
        board.arrive(position, number, tag, where=self._call.nbytes, mode=self._mode)
        if not board.reached(number, tag, _ARRIVED):
            return False
        board.ring()
        self.meeting.met(number)
        return True

    def add_up(self, operation: Operation) -> None:
        """Make the result of what all have posted, if there is one."""
        if not self._posted:
            return
        row = operation.seq % OPERATIONS, ...
        values: list[Array] = [posted[row] for posted in self._posted]
        reducer, quiet = self._call.reducer, self.meeting.common.workers.quiet
        assert reducer is not None, "it is an all-reduce"
        out = operation.out if operation.target is None else operation.target
        if out is None:
            operation.out = quiet.run(reducer.total, values)
        else:
            quiet.run(reducer.fold, values, out)

    def take(self, operation: Operation) -> None:
        """Carry out one rank's end: at once if all others have come, and that does not fail, else in a match."""
        free = self.meeting.free(operation)
        if free and self.post(operation) and self._ends_at_once(operation):
            return
        match = self.meeting.communicator.match_alone(operation)
        operation.lock()
        run = SmallRun(self, match, operation)
        if free:
            run.wait(self.tag)
        else:
            run.start()

    def _ends_at_once(self, operation: Operation) -> bool:
        """End an operation that all have come to; False if that fails, and then whoever waits will say so."""
        try:
            self.add_up(operation)
        except Exception:
            return False
        self.meeting.board.end(operation.port.position, operation.seq, self.tag)
        operation.finish(operation.context.now_ns(), operation.describe(self._call, operation.started_ns))
        return True


def small(call: Call) -> bool:
    """Whether all of an operation goes on a board."""
    reduces = call.kind is Collective.ALL_REDUCE and not call.shared and 0 < call.nbytes <= PAYLOAD_BYTES
    return reduces or call.kind is Collective.BARRIER


def _posted(meeting: Meeting, call: Call, position: int) -> Array:
    """Return what a rank posts, by number of the operation modulo `OPERATIONS`."""
    shape, dtype = call.shape, call.dtype
    assert shape is not None, "every rank of an all-reduce says that"
    memory, apart = meeting.board.payloads(position, call.nbytes)
    strides = apart, *np.empty(shape, dtype).strides
    return np.ndarray((OPERATIONS, *shape), dtype, memory, strides=strides)


class SmallRun(BoardRun):
    """One rank's end of a small operation under way: it posts its input, and adds up what the others have posted."""

    __slots__ = ("_exchange", "_match", "_tag")

    def __init__(self, exchange: Exchange, match: Match, operation: Operation) -> None:
        self._exchange, self._meeting = exchange, exchange.meeting
        self._match, self._operation, self._tag = match, operation, -PHASES  # none, before it has arrived

    def start(self) -> None:
        """Arrive, as soon as the row is free; who comes last is done, and wakes the others."""
        if self._meeting.free(self._operation):
            self._arrive()
            return
        self._operation.running, self._operation.scope = True, self
        self._operation.context.spawn(self._meeting.until_free, self._operation, self._arrive)

    def _arrive(self) -> None:
        if self._exchange.post(self._operation):
            self._tag = self._exchange.tag
            self._operation.stopped()
            self._end()
        else:
            self.wait(self._exchange.tag)

    def wait(self, tag: int) -> None:
        """End when the others have come, who can know that this rank has."""
        operation, self._tag = self._operation, tag
        operation.running, operation.scope = True, self
        operation.look = self.look_before_sleeping
        self._meeting.board.waiting.watch(self)

    def look_before_sleeping(self) -> None:
        """Look for a moment, on the loop's thread, before a task sleeps that waits for the operation."""
        self.look()
        if self.waits and self._meeting.communicator.here == 1 and self.waiting.wait(self):
            self.look()

    def look(self) -> None:
        """End, if all have come, or one never will."""
        operation, board = self._operation, self._meeting.board
        if board.reached(operation.seq, self._tag, _ARRIVED):
            self._meeting.met(operation.seq)
            board.waiting.unwatch(self)
            operation.stopped()
            self._end()
        elif board.lost is not None:
            board.waiting.unwatch(self)
            operation.stopped()
            self._meeting.communicator.settle(self._match, operation, LinkLostError(board.lost))

    @property
    def waits(self) -> bool:
        """Whether it is under way."""
        return self._operation.scope is self

    @property
    def others_came(self) -> bool:
        """Whether all have come, or one never will."""
        board = self._meeting.board
        return board.reached(self._operation.seq, self._tag, _ARRIVED) or board.lost is not None

    def _end(self) -> None:
        operation = self._operation
        error: BaseException | None = None
        try:
            if not operation.done:  # it was not given up
                self._exchange.add_up(operation)
                self._meeting.board.end(operation.port.position, operation.seq, self._tag)
        except Exception as raised:
            error = raised
        self._meeting.communicator.settle(self._match, operation, error)

    def cancel(self) -> None:
        """End: nothing of this rank's is touched."""
        self._meeting.board.waiting.unwatch(self)
        self._operation.stopped()
        self._meeting.communicator.ended(self._match, self._operation)
