"""From a call to an operation that is under way: its checks, and the port it goes through."""

from __future__ import annotations

from copy import copy
from functools import partial
from threading import get_ident
from typing import Protocol, cast

from ..collectives.counts import check_counts
from ..collectives.kinds import PERMUTE
from ..collectives.reduce import Array
from ..errors import GroupAbortedError, UsageError, in_one_line
from .derived import Derived
from .enqueuing import Places
from .group_checks import check_pairs, check_root
from .match import Key
from .message_issuing import MessageIssuer
from .operation import CollectiveFuture, Port
from .stream import Stream
from .trees import is_tree, packs, unpacked

_FORMS = (list, tuple, dict)


class Surroundings(Places, Protocol):
    """What the groups of a rank find around them: its world, as they see it."""

    issuer: type[Issuer]  # What issues their operations

    def check_group(self, ranks: tuple[int, ...]) -> None:
        """Raise `topology.TopologyError` unless the cluster allows such a group."""

    def notes(self, key: object, seq: int) -> dict[int, list[int]]:
        """Return what ranks of this process tell each other besides an operation, where arrays have no data."""


class Issuer(MessageIssuer):
    """Issues the operations of one rank on one group.

    Any thread of the process may issue. What a thread that does not run the event loop issues is checked at once, its
    arrays are locked at once, and it is numbered when the loop comes to it: in the order of the calls.
    """

    def issue(
        self, operation: CollectiveFuture[Array], stream: Stream | str | None, timeout_s: float | None = None
    ) -> CollectiveFuture[Array]:
        """Check, number and start an operation: at once if its stream has room, which short latencies need."""
        kind = operation.kind
        if type(operation.input) in _FORMS and is_tree(operation.input):
            return self._issue_tree(operation, stream, timeout_s)
        if kind.traits.rooted:
            check_root(self._group, operation)
        elif kind is PERMUTE:
            operation.pairs = check_pairs(self._group, operation.pairs)
        elif operation.counts is not None:
            operation.counts = check_counts(kind, operation.counts, self._group.size)
        self._prepare(operation, timeout_s)
        if get_ident() == self._context.thread:
            try:
                port = self._ports.get(stream)
            except TypeError:  # not hashable, and so no stream, which is said where streams are found
                port = None
            self._enqueue(operation, port or self._open_port(stream))
        elif not self._enqueue_here(operation, self._opened.get(self._streams.find(stream))):
            self._enqueue_soon(operation, partial(self._open_port, self._streams.find(stream)))
        return operation

    def _issue_tree(
        self, operation: CollectiveFuture[Array], stream: Stream | str | None, timeout_s: float | None
    ) -> CollectiveFuture[Array]:
        """Issue one operation for the arrays of a tree, or one for each dtype that is reduced."""
        if operation.out is not None or operation.counts is not None:
            raise UsageError("x: a list or dict of arrays takes neither out= nor counts=; its results are new arrays")
        if operation.shared:
            raise UsageError("x: a list or dict of arrays cannot be shared; issue a call with shared=True for each")
        tree, arrays, thread = operation.input, self._context.arrays, self._context.thread
        made = packs(operation.kind, tree, self._group.size, arrays)
        parts = [operation, *(copy(operation) for _ in made[1:])]
        for part, pack in zip(parts, made, strict=True):
            part.input = pack.packed
        found: Derived[object] = Derived(parts, unpacked(tree, made, arrays), thread)
        for part in parts:
            self.issue(part, stream, timeout_s)
        return cast("CollectiveFuture[Array]", found)

    def _open_port(self, stream: Stream | str | None) -> Port:
        known = self._streams.find(stream)
        port = self._opened.get(known)
        if port is None:
            key = Key(self._ranks, self._occurrence, known.name)
            communicator = self._around.communicator(key, self._group.name, self._ranks)
            port = communicator.port(self._context, known, self._group.rank)
            port.group = self._group.label
            self._opened[known] = port
        self._ports[stream] = self._ports[known] = port
        return port

    def abort(self, error: BaseException | str | None) -> None:
        """Abort the group, here and elsewhere."""
        rank, name = self._context.rank, self._group.name
        why = "" if error is None else f": {error if isinstance(error, str) else in_one_line(error)}"
        cause = error if isinstance(error, BaseException) else None
        message = f"group '{name}' was aborted by rank {rank}{why}"

        def aborted() -> GroupAbortedError:
            made = GroupAbortedError(message, culprit=rank)
            made.__cause__ = cause
            return made

        abort = partial(self._around.communicators.abort, self._ranks, self._occurrence, aborted)
        if get_ident() == self._context.thread:
            abort()
        else:
            self._context.from_thread(abort)
