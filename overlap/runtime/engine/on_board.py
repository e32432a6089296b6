"""Small collectives between processes of one host, whose data lies on the board itself.

These are barriers, and operations whose inputs fit in a post.

Nobody waits for the others to have read what it posts: rows of a board are used again only when they have. A rank that
only gives something, such as the root of a broadcast, waits for nobody at all.
"""

from __future__ import annotations

from math import prod
from typing import cast

import numpy as np

from transports import LinkLostError
from transports.common import OPERATIONS, PAYLOAD_BYTES, PHASES

from ...collectives.call import Call
from ...collectives.kinds import Collective
from ...collectives.reduce import Array
from ..executor import Executor
from ..match import Match
from ..operation import Operation
from .meeting import BoardRun, Meeting, Mode
from .pulls import gives, needed, pulls, rings

_ARRIVED = 1


class Exchange(Executor):
    """Carries out operations of one rank with one small call on a board: what the ranks of its group post, as arrays.

    Args:
        meeting: Of the ranks; its board is ready.
        call: Which: one that is `small`.
        position: Of the rank in the group.

    Attributes:
        seq: Number of the operation whose input was posted last.
        tag: Its tag.
    """

    meeting: Meeting
    seq: int
    tag: int

    def __init__(self, meeting: Meeting, call: Call, position: int) -> None:
        self.meeting, self._call, self._position, self.seq, self.tag = meeting, call, position, -1, 0
        self._needed, nbytes = needed(call, position), _input_bytes(call)
        self._posts = nbytes > 0 and (call.reducer is not None or gives(call, position))
        self._said = (nbytes, Mode.ON_BOARD) if self._posts else (0, Mode.NOWHERE)
        self._rings = rings(call, position)
        self._posted = [_posted(meeting, call, each) for each in range(call.size)] if nbytes else []
        self._pieces = [pull for pull in pulls(call, position) if pull.size]

    def post(self, operation: Operation) -> bool:
        """Post a rank's input, and wake who waits for it; return whether all have come whom this rank needs."""
        board, self.seq = self.meeting.board, (number := operation.seq)
        self.tag = tag = self.meeting.communicator.tag(self._call, number)
        if self._posts:
            row = number % OPERATIONS, ...  # "...", or an array without dimensions would be a number
            source: Array = operation.source  # type: ignore[assignment]  # whoever posts something has it
            posted = self._posted[self._position]
            posted[row] = source if posted.ndim == source.ndim + 1 else source.reshape(-1)
        where, mode = self._said
        board.arrive(self._position, number, tag, where=where, mode=mode)
        if self._needed is None:
            if not board.reached(number, tag, _ARRIVED):
                return False
            board.ring()
            self.meeting.met(number)
            return True
        if self._rings or (self._posts and board.reached(number, tag, _ARRIVED)):
            board.ring()
        return self.came(number, tag)

    def came(self, number: int, tag: int) -> bool:
        """Whether all have come to an operation whom this rank needs."""
        board = self.meeting.board
        if self._needed is not None:
            return all(board.has_come(other, number, tag) for other in self._needed)
        if not board.reached(number, tag, _ARRIVED):
            return False
        self.meeting.met(number)
        return True

    def make(self, operation: Operation) -> None:
        """Make the result of what has been posted, if this rank gets one."""
        row, quiet, reducer = operation.seq % OPERATIONS, self.meeting.common.workers.quiet, self._call.reducer
        if reducer is None:
            if self._posted:
                operation.fit(self._call)
                self._copy(operation, row)
            return
        if not self._pieces:
            return
        out = operation.out if operation.target is None else operation.target
        values: list[Array] = [posted[row, ...] for posted in self._posted]
        if self._call.kind is Collective.REDUCE_SCATTER:
            operation.fit(self._call)
            out, (piece,) = cast(Array, operation.target).reshape(-1), self._pieces
            values = [value[piece.sources[0][1] :][: piece.size] for value in values]
        if out is None:
            operation.out = quiet.run(reducer.total, values)
        else:
            quiet.run(reducer.fold, values, out)

    def _copy(self, operation: Operation, row: int) -> None:
        for start, size, ((who, first),) in self._pieces:
            held = self._posted[who][row] if who != self._position else cast(Array, operation.source).reshape(-1)
            cast(Array, operation.target).reshape(-1)[start : start + size] = held[first : first + size]

    def __str__(self) -> str:
        return "board of this host"

    def takes_threads(self) -> bool:
        """Whether no rank is lost, which is the end of the world."""
        return self.meeting.board.lost is None

    def finish_now(self, operation: Operation) -> bool:
        """Post a rank's input, and end if all have come whom it needs, and that does not fail; else it waits."""
        if not (self.meeting.free(operation) and self.post(operation)):
            return False
        try:
            self.make(operation)
        except Exception:  # which the match is told of
            return False
        self.meeting.board.end(self._position, operation.seq, self.tag)
        operation.finish(operation.context.now_ns(), operation.describe(self._call, operation.started_ns))
        return True

    def start(self, match: Match, operation: Operation) -> None:
        """Post a rank's input as soon as its row is free, unless that is done; who comes last ends at once."""
        run = SmallRun(self, match, operation)
        if self.seq == operation.seq:  # `finish_now` has posted it
            run.wait()
        elif self.meeting.free(operation):
            run.arrive()
        else:
            operation.moves(run)
            operation.context.spawn(self.meeting.until_free, operation, run.arrive)


def small(call: Call) -> bool:
    """Whether all of an operation goes on a board."""
    if call.shared or call.counts:
        return False
    return 0 < _input_bytes(call) <= PAYLOAD_BYTES or call.kind is Collective.BARRIER


def _input_bytes(call: Call) -> int:
    return 0 if call.shape is None or call.dtype is None else prod(call.shape) * call.dtype.itemsize


def _posted(meeting: Meeting, call: Call, position: int) -> Array:
    """Return what a rank posts, by number of the operation modulo `OPERATIONS`; flat unless results have its shape."""
    shape, dtype = call.shape, call.dtype
    assert shape is not None and dtype is not None, "every rank says that of what is small"  # noqa: PT018
    if call.kind not in (Collective.ALL_REDUCE, Collective.REDUCE):
        shape = (prod(shape),)
    memory, apart = meeting.board.payloads(position, _input_bytes(call))
    strides = apart, *np.empty(shape, dtype).strides
    return np.ndarray((OPERATIONS, *shape), dtype, memory, strides=strides)


class SmallRun(BoardRun):
    """One rank's end of a small operation under way: it posts its input, and adds up what the others have posted."""

    __slots__ = ("_exchange", "_match", "_tag")

    def __init__(self, exchange: Exchange, match: Match, operation: Operation) -> None:
        self._exchange, self._meeting = exchange, exchange.meeting
        self._match, self._operation, self._tag = match, operation, -PHASES  # none, before it has arrived

    def arrive(self) -> None:
        """Post the input; who comes last is done, and wakes the others."""
        if self._exchange.post(self._operation):
            self._tag = self._exchange.tag
            self._operation.stopped()
            self._end()
        else:
            self.wait()

    def wait(self) -> None:
        """End when the others have come, who can know that this rank has."""
        operation, self._tag = self._operation, self._exchange.tag
        operation.moves(self)
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
        if self._exchange.came(operation.seq, self._tag):
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
        """Whether all have come who are needed, or one never will."""
        return self._exchange.came(self._operation.seq, self._tag) or self._meeting.board.lost is not None

    def _end(self) -> None:
        operation = self._operation
        error: BaseException | None = None
        try:
            if not operation.done:  # it was not given up
                self._exchange.make(operation)
                self._meeting.board.end(operation.port.position, operation.seq, self._tag)
        except Exception as raised:
            error = raised
        self._meeting.communicator.settle(self._match, operation, error)

    def cancel(self) -> None:
        """End: nothing of this rank's is touched."""
        self._meeting.board.waiting.unwatch(self)
        self._operation.stopped()
        self._meeting.communicator.ended(self._match, self._operation)
