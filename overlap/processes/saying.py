"""What this process says to the others of its world: messages, and how much of each is told at most."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from traceback import format_exception, format_tb
from typing import Protocol

from ..diagnostics import where
from ..errors import CollectiveMismatchError, GroupAbortedError, in_one_line, text_of, type_name
from ..notice import notify
from ..runtime.blame.standing import Standing
from ..runtime.match import Voice
from .codec import cut, pack_call, pack_standings

# What is told at most, in UTF-8: together less than half of what fits in a message.
LINE_BYTES, _LINES = 500, 24
MOST_ALIKE = 4096  # operations that one message speaks of


class ControlConnection(Protocol):
    """What a world needs of its membership among processes; `overlap.launch.Membership` is one."""

    member: int
    members: int

    def tell(self, message: Mapping[str, object]) -> None:
        """Queue a message to every other process; any thread."""

    def messages(self) -> AsyncIterator[tuple[int, Mapping[str, object] | None, str]]:
        """Yield (member, message, ""), or (member, None, reason) once for a member that is lost."""

    async def barrier(self, name: str) -> None:
        """Wait for every other process to come here."""


class Saying:
    """Says things to the other processes.

    Args:
        connection: The way to them.
    """

    def __init__(self, connection: ControlConnection) -> None:
        self._connection = connection
        self._announced: dict[tuple[int, Voice], list[int]] = {}  # not told yet: by communicator, which operations
        self._asked: set[int] = set()  # communicators in which somebody needs to be told

    def _tell(self, what: str, **fields: object) -> None:
        """Tell all others; that something cannot be told is no failure of what was to be told."""
        try:
            self._connection.tell({"what": what, **fields})
        except Exception as error:
            notify(f"the other processes cannot be told of '{what}': {in_one_line(error)[:LINE_BYTES]}")

    def tell_failure(self, rank: int, error: BaseException, doing: list[str]) -> None:
        """Say that a rank here has ended the world."""
        trace = _trace_of(error)
        self._tell(
            "failed", culprit=rank, type=cut(type_name(error), LINE_BYTES), text=cut(text_of(error)),
            trace=cut(trace, last=True), place=cut(where(error), LINE_BYTES), doing=_cut_lines(doing),
        )  # fmt: skip

    def tell_call(self, communicator_id: int, seqs: Sequence[int], said: Voice) -> None:
        """Say what a rank here has called, in some operations; without a dtype, it asks for it."""
        self._tell(
            "call",
            channel=communicator_id,
            seqs=list(seqs),
            rank=said.rank,
            call=pack_call(said.call),
            site=said.call_site,
        )

    def announce_call(self, communicator_id: int, seq: int, said: Voice) -> None:
        """Say what a rank here has called, within `_WATCH_S`, or at once where somebody has asked.

        Most ranks know what they receive. A message for each operation, and the threads that it wakes, would take
        longer than a broadcast of a gradient bucket.
        """
        if communicator_id in self._asked:
            self.tell_call(communicator_id, (seq,), said)
        else:
            self._announced.setdefault((communicator_id, said), []).append(seq)

    def _tell_announced(self) -> None:
        announced, self._announced = self._announced, {}
        for (communicator_id, said), seqs in announced.items():
            for first in range(0, len(seqs), MOST_ALIKE):
                self.tell_call(communicator_id, seqs[first : first + MOST_ALIKE], said)

    def tell_difference(self, communicator_id: int, seq: int, error: CollectiveMismatchError) -> None:
        """Say that two ranks mean different operations."""
        self._tell(
            "differ", channel=communicator_id, seq=seq, group=cut(error.group, LINE_BYTES), ranks=list(error.ranks),
            calls=_cut_lines(error.calls), sites=_cut_lines(error.call_sites),
        )  # fmt: skip

    def tell_failed_end(self, communicator_id: int, seq: int, rank: int, error: BaseException) -> None:
        """Say that a rank here cannot take part in an operation."""
        self._tell("end failed", channel=communicator_id, seq=seq, rank=rank, text=cut(text_of(error)))

    def tell_broken(self, communicator_id: int, culprit: int, error: BaseException) -> None:
        """Say that nothing of a communicator, or of a group, goes on because of a rank here."""
        aborted = isinstance(error, GroupAbortedError)
        self._tell("broken", channel=communicator_id, rank=culprit, text=cut(text_of(error)), aborted=aborted)

    def tell_quiet(self, standings: Sequence[Standing]) -> None:
        """Let the others know which ranks here make no progress."""
        self._tell("quiet", standings=pack_standings(standings))

    def tell_busy(self, rank: int, place: str) -> None:
        """Say that a rank here keeps the loop of this process, and where, or that it does no more; any thread."""
        self._tell("busy", rank=rank, place=cut(place, LINE_BYTES))

    def _announce_at_once(self, communicator_id: int) -> None:
        """Tell what has been announced, and from now on at once what is called there: somebody asks for it."""
        self._asked.add(communicator_id)
        self._tell_announced()


def _trace_of(error: BaseException) -> str:
    try:
        return "".join(format_exception(error))
    except Exception:  # its text cannot be had
        return "".join(format_tb(error.__traceback__))


def _cut_lines(lines: Sequence[str]) -> list[str]:
    told = [cut(line, LINE_BYTES) for line in lines[:_LINES]]
    return told if len(lines) <= _LINES else [*told, f"and {len(lines) - _LINES} lines more"]
