"""Collectives between processes of one host, out of each other's memory.

Each rank says on a board where its input lies, and takes what it needs once those have come whom it needs: small inputs
lie on the board itself, middling ones are copied into memory that all map, large ones are read where they are. Inputs
that are read where they are may change only when all have read them: whoever gives one waits for that.
Cost: each input is read once by whoever needs it, and each result written once; one to three meetings.
"""

from __future__ import annotations

from transports import Transport
from transports.common import OPERATIONS

from ..communicator import Communicator
from ..match import Match
from ..operation import Operation
from .meeting import Common, Meeting
from .on_board import Exchange, SmallRun, small
from .on_host import HostRun
from .shared_result import SharedRun


class HostMemory:
    """Carries out operations whose ranks are in several processes of this host.

    Args:
        transport: Knows who has what in common.
        common: What all meetings share.
    """

    def __init__(self, transport: Transport, common: Common) -> None:
        self._transport, self._common = transport, common
        self._meetings: dict[Communicator, Meeting | None] = {}

    def start(self, communicator: Communicator, match: Match) -> bool:
        """Start all ends that are ready and not under way; False if the ranks have no memory in common."""
        ends = match.ends
        if communicator not in self._meetings:
            self._meetings[communicator] = self._open(communicator, ends[0])
        meeting = self._meetings[communicator]
        if meeting is None:
            return False
        for operation in ends:
            if operation.scope is None and not operation.done:
                _run(meeting, match, operation).start()
        return True

    def close(self, communicator: Communicator) -> None:
        """Give back the memory of a communicator; no rank, of any process, uses it any more."""
        meeting = self._meetings.pop(communicator, None)
        if meeting is not None:
            meeting.close()

    def at_once(self, communicator: Communicator, operation: Operation) -> bool:
        """Whether one end of an operation starts, and may go on, without a task that is started or woken."""
        meeting = self._meetings.get(communicator)
        if meeting is None or not operation.call.settled:  # it has to be told what travels
            return False
        return meeting.board.ready and meeting.board.usable and meeting.board.lost is None

    def _open(self, communicator: Communicator, operation: Operation) -> Meeting | None:
        if operation.port.stream.window > OPERATIONS // 2:
            return None
        board = self._transport.board(communicator.key.tag_base(), communicator.members)
        if board is None:
            return None
        self._common.workers.share(board.processes)
        return Meeting(self._common, board, communicator)


def _run(meeting: Meeting, match: Match, operation: Operation) -> HostRun | SmallRun:
    call = operation.call
    if call.shared:
        return SharedRun(meeting, match, operation)
    if not (small(call) and meeting.board.ready and meeting.board.usable):
        return HostRun(meeting, match, operation)
    exchange = Exchange(meeting, call, operation.port.position)
    meeting.communicator.shorten(call, exchange)
    return SmallRun(exchange, match, operation)
