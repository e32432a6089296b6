"""Collectives between processes of one host, out of each other's memory.

Each rank says on a board where its input lies, and takes what it needs once those have come whom it needs: small inputs
lie on the board itself, middling ones are copied into memory that all map, large ones are read where they are. Inputs
that are read where they are may change only when all have read them: whoever gives one waits for that.
Cost: each input is read once by whoever needs it, and each result written once; one to three meetings.
"""

from __future__ import annotations

from transports import Transport
from transports.common import OPERATIONS

from ...collectives.call import Call
from ..communicator import Communicator
from ..executor import Executor
from ..match import Match
from ..operation import Operation
from .meeting import Common, Meeting
from .on_board import Exchange, small
from .on_host import HostRun
from .shared_result import SharedRun


class HostExecutor(Executor):
    """Carries out operations of one rank out of the memory of the processes of this host.

    Args:
        meeting: Of the ranks.
        call: The call: kind, sizes and dtype.
    """

    def __init__(self, meeting: Meeting, call: Call) -> None:
        self._meeting, self._run = meeting, SharedRun if call.shared else HostRun
        # what is small goes on the board, once that is ready; uneven blocks seldom repeat
        self.lasts: bool = not (small(call) or call.counts)

    def __str__(self) -> str:
        return "memory of this host, one result" if self._run is SharedRun else "memory of this host"

    def start(self, match: Match, operation: Operation) -> None:
        """Arrive, and go on as far as the others have come."""
        self._run(self._meeting, match, operation).start()

    def takes_threads(self) -> bool:
        """Whether the board can be used; before, it takes a task."""
        board = self._meeting.board
        return board.ready and board.usable and board.lost is None


class HostMemory:
    """Executors of operations whose ranks are in several processes of this host.

    Args:
        transport: Knows who has what in common.
        common: What all meetings share.
    """

    def __init__(self, transport: Transport, common: Common) -> None:
        self._transport, self._common = transport, common
        self._meetings: dict[Communicator, Meeting | None] = {}

    def executor(self, communicator: Communicator, call: Call, operation: Operation) -> Executor | None:
        """Return how one rank's operations with a call are carried out; None if the ranks have no memory in common."""
        if communicator not in self._meetings:
            self._meetings[communicator] = self._open(communicator, operation)
        meeting = self._meetings[communicator]
        if meeting is None:
            return None
        if small(operation.call) and meeting.board.ready and meeting.board.usable:
            return Exchange(meeting, call, communicator.members.index(operation.context.rank))
        return HostExecutor(meeting, call)

    def close(self, communicator: Communicator) -> None:
        """Give back the memory of a communicator; no rank, of any process, uses it any more."""
        meeting = self._meetings.pop(communicator, None)
        if meeting is not None:
            meeting.close()

    def _open(self, communicator: Communicator, operation: Operation) -> Meeting | None:
        if operation.port.stream.window > OPERATIONS // 2:
            return None
        board = self._transport.board(communicator.key.tag_base(), communicator.members)
        if board is None:
            return None
        self._common.workers.share(board.processes)
        return Meeting(self._common, board, communicator)
