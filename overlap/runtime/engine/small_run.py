"""The smallest and most frequent operation between processes of one host, by the shortest way: all on the board."""

from __future__ import annotations

import numpy as np

from transports import LinkLostError

from ...collectives.reduce import Array
from ..match import Match
from ..operation import Operation
from .looking import Looking
from .meeting import Meeting, Mode
from .settling import settle

__all__ = ["SmallAllReduce"]

_ARRIVED = 1


class SmallAllReduce(Looking):
    """One rank's end of a small all-reduce: it posts its input, and adds up what the others have posted.

    Nobody waits for the others to have read it: rows of a board are used again only when they have.
    """

    __slots__ = ("_match", "_tag")

    def __init__(self, meeting: Meeting, match: Match, operation: Operation) -> None:
        self._meeting, self._match, self._operation = meeting, match, operation
        self._tag = meeting.communicator.tag(operation.call, operation.seq)

    def start(self) -> None:
        """Arrive; who comes last is done, and wakes the others."""
        operation, board = self._operation, self._meeting.board
        source = operation.source
        assert source is not None, "every rank gives something to an all-reduce"
        payload = memoryview(source.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        board.arrive(
            operation.port.position,
            operation.seq,
            self._tag,
            where=payload.nbytes,
            mode=Mode.ON_BOARD if payload.nbytes else Mode.NOWHERE,
            payload=payload,
        )
        if board.reached(operation.seq, self._tag, _ARRIVED):
            board.ring()
            self._end()
        else:
            operation.running, operation.scope = True, self
            operation.look = self.look_before_sleeping
            board.watch(self)

    def look(self) -> None:
        """End, if all have come."""
        board = self._meeting.board
        if board.reached(self._operation.seq, self._tag, _ARRIVED):
            board.unwatch(self)
            self._operation.stopped()
            self._end()
        elif board.lost is not None:
            board.unwatch(self)
            self._operation.stopped()
            settle(self._meeting.communicator, self._match, self._operation, LinkLostError(board.lost))

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
        error: BaseException | None = None
        try:
            self._add_up()
        except Exception as raised:
            error = raised
        settle(self._meeting.communicator, self._match, self._operation, error)

    def _add_up(self) -> None:
        operation, call, board = self._operation, self._operation.call, self._meeting.board
        if operation.done:  # it was given up
            return
        assert call.reducer is not None
        shape, dtype = call.shape, call.dtype
        values: list[Array] = [
            np.ndarray(shape, dtype, board.payload(other, operation.seq, call.nbytes))  # type: ignore[arg-type]
            for other in range(call.size)
        ]
        total = self._meeting.common.quiet.run(call.reducer.total, values)
        if operation.out is None:
            operation.out = total
        else:
            target = operation.out if operation.target is None else operation.target
            target[...] = total

    def cancel(self) -> None:
        """End: nothing of this rank's is touched."""
        self._meeting.board.unwatch(self)
        self._operation.stopped()
        self._meeting.communicator.ended(self._match, self._operation)
