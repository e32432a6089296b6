"""Communicators of a world of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transports import Transport

from ..errors import GroupAbortedError
from .communicator import BaseEngine, Communicator
from .communicators import Communicators
from .inbox import Inbox
from .match import Key, RankCall
from .spanning import SpanningCommunicator

if TYPE_CHECKING:
    from ..processes.control_plane import ControlPlane


class SpanningCommunicators(Communicators):
    """Communicators of a world of several processes: some have local ranks only, others span processes.

    Attributes:
        spanning: Communicators that span processes, by id.
    """

    def __init__(self, engine: BaseEngine, transport: Transport, notices: ControlPlane) -> None:
        self._transport, self._local, self._notices = transport, frozenset(transport.ranks), notices
        super().__init__(engine)
        self.spanning: dict[int, SpanningCommunicator] = {}
        self._ended_here: dict[int, Key] = {}  # groups that only ranks of other processes may still use
        # By group: number of its ranks that use it no more, and the ids of communicators that their processes have
        # reported.
        self._ended: dict[int, tuple[int, frozenset[int]]] = {}

    def make(self, key: Key, name: str, members: tuple[int, ...]) -> Communicator:
        """Make a communicator, of the kind for its members: all here, or in several processes."""
        if self._local.issuperset(members):
            return super().make(key, name, members)
        arguments = (self, key, name, members, self._local, self._notices)
        spanning = SpanningCommunicator(*arguments)
        self.spanning[spanning.id] = spanning
        return spanning

    def make_inbox(self) -> Inbox:
        """Return the inbox of the messages of the ranks here."""
        return Inbox(self, self.engine, self._notices, self._local)

    def abort(self, ranks: tuple[int, ...], occurrence: int, error: Callable[[], GroupAbortedError]) -> None:
        """Fail all present and later operations of a group, here and in other processes."""
        super().abort(ranks, occurrence, error)
        first_error = error()
        self._notices.send_broken(Key(ranks, occurrence, "").id, first_error.culprit, first_error)

    # -- ends of groups ------------------------------------------------------------------------------------------------

    def _ranks_here(self, key: Key) -> tuple[Key, int]:
        """Return the key of a group, and the number of its ranks in this process."""
        return key, len(self._local.intersection(key.ranks))

    def _end_group_here(self, group: Key) -> None:
        """Report that no rank here uses a group any more, and close it if no other rank does.

        Until then other processes may still need the calls of ranks here, and read the memory of this process. All
        reports of a process on a group reach the others before the report that it does not use the group any more.
        """
        ids = [group.id, *(key.id for key in self._keys_by_group.get(group[:2], ()))]
        here, size = len(self._local.intersection(group.ranks)), len(group.ranks)
        self._ended_here[ids[0]] = group
        self._notices.send_unused(ids[0], here, size, ids)
        self.end_elsewhere(ids[0], here, size, ids)

    def end_elsewhere(self, group_id: int, ranks: int, size: int, ids: Sequence[int]) -> bool:
        """Count ranks of other processes that no longer use a group; with the last of them, forget the group.

        Args:
            group_id: Id of the group's key.
            ranks: Number of these ranks.
            size: Ranks of the group.
            ids: Ids of the group and of its communicators that the process of these ranks has reported.

        Returns:
            False if the group would have more ranks than its size.
        """
        count, reported = self._ended.pop(group_id, (0, frozenset[int]()))
        count, reported = count + ranks, reported.union(ids)
        if count < size:
            self._ended[group_id] = count, reported
            return True
        group = self._ended_here.pop(group_id, None)
        if group is not None:
            self.close_group(group)
        for key_id in reported if self._off else ():
            self._off.pop(key_id, None)
        self._notices.forget(reported)
        return count == size

    def close_group(self, group: Key) -> None:
        """Close a group and its communicators."""
        keys = list(self._keys_by_group.get(group[:2], ()))
        super().close_group(group)
        ids = {key.id for key in keys}
        for key_id in ids:
            self.spanning.pop(key_id, None)

    def compare_call(self, communicator_id: int, seq: int, report: RankCall) -> bool:
        """Compare the call of another process with the one here; False if no rank here has arrived at it yet."""
        communicator = self.spanning.get(communicator_id)
        return communicator is not None and communicator.compare_call(seq, report)

    def issued_counts(self, rank: int) -> dict[int, int]:
        """Return the number of operations of a rank here on each communicator that spans processes."""
        return self.inbox.issued_counts(rank) | {
            c.id: c.issued[rank] for c in self.spanning.values() if rank in c.issued
        }
