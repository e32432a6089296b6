"""Collectives of trees of arrays, and of futures that may become trees.

Such a collective has one number on its stream, whatever the tree holds, because ranks count operations at the call,
before a future has a value. Arrays that are only moved travel packed in one array. Of a reduction, the arrays of the
first dtype travel so; the arrays of each further dtype travel as a `TreePart`, at the same time, on a communicator of
the stream for the index of the dtype in the tree. Parts have the number of their operation, which is unfinished, and
takes room in the window of its stream, until all of its parts have ended. So the window bounds the numbers under way on
those communicators too (see `stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from ..collectives.call import Call
from ..collectives.kinds import BROADCAST, SCATTER
from ..collectives.reduce import Array
from ..errors import CollectiveMismatchError, NonFiniteError, PeerError, UsageError
from ..timeline.recording import RawMatch
from .context import RankContext
from .derived import Derived, check_here, futures_in, resolve
from .failure import Failure
from .forms import outline_of
from .operation import NOWHERE, CollectiveFuture, Operation
from .settling import settle_and_deliver
from .state import DONE
from .trees import arrays_of, copy_tree, make_unpacker, packs, unpacked_as

if TYPE_CHECKING:
    from .port import Port

# Errors that fail an operation on all of its ranks: no rank goes on with its parts.
_OF_ALL_RANKS = (PeerError, CollectiveMismatchError, NonFiniteError, UsageError)


class TreePart(CollectiveFuture[Any]):
    """The arrays of one dtype of a tree that is reduced, other than the first dtype."""

    __slots__ = ()

    def finish(self, end_ns: int, meeting: RawMatch) -> None:
        """Keep the result; the timeline shows the operation that it is part of."""
        if self.state < DONE:
            self.context.flight.carried(self.record, self.started_ns, end_ns, None)
            value = self.out
            self.release()
            settle_and_deliver(self, value)


class TreeOperation(CollectiveFuture[Any]):
    """The handle of a collective of a tree of arrays, or of the value of a future.

    Attributes:
        parts: Operations of the arrays of further dtypes, of a reduction.
    """

    # No slots: most operations hold no tree of several dtypes, and read these defaults.
    call: Call
    caller_out: object
    source: Array | None
    parts: Sequence[TreePart] = ()
    # Issues a part at its index, for a port and with a number; None once it has: the group may be dropped then.
    issue_part: Callable[[CollectiveFuture[Any], int, Port, int], None] | None = None
    _unfinished_parts: int = 0
    _make: Callable[[list[Any]], object] | None = None  # Makes the tree of results
    _meeting: RawMatch | None = None  # The match of its own arrays, once their result has arrived

    def pack(self, tree: object, call_with: Callable[[CollectiveFuture[Any], Array, str], Call]) -> None:
        """Pack the arrays of a tree into `source` and new parts, and set `call`.

        Args:
            call_with: Function that returns the call of an operation, its array and the outline of the tree.

        Raises:
            UsageError: If the tree is empty, or cannot travel in this call.
        """
        check_tree(self)
        arrays = self.context.arrays
        leaves = arrays_of(tree)
        packed = packs(self.kind, leaves, self.member.size, arrays)
        outline = outline_of(tree, leaves, parsable=self.kind is BROADCAST or self.kind is SCATTER)
        self.source, self.call = packed[0].packed, call_with(self, packed[0].packed, outline)
        self._make = make_unpacker(tree, packed, arrays)
        if len(packed) > 1:
            self.parts = [self._part(pack.packed, call_with(self, pack.packed, outline)) for pack in packed[1:]]
            self._unfinished_parts = len(self.parts)

    def _part(self, packed: Array, call: Call) -> TreePart:
        """Return the operation of the packed arrays of one dtype."""
        part = TreePart(self.kind, None, None, self.place, 0, f"{self.name}: {packed.dtype}")
        part.arguments = self.arguments
        part.context, part.member, part.step = self.context, self.member, self.step
        part.source, part.call = packed, call
        part._callbacks = [self._part_ended]
        return part

    @property
    def end_wakes_loop(self) -> bool:
        """Whether its end is for the loop alone, as the ends of parts are."""
        return bool(self.parts) or super().end_wakes_loop

    # -- life --------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Add the operation and its parts to their communicators, to be matched with the other ranks."""
        port, issue_part, self.issue_part = self.port, self.issue_part, None
        if not self.parts:
            port.arrive(self)
            return
        for index, part in enumerate(self.parts):
            part.priority = self.priority  # with that of the stream
            assert issue_part is not None, "an operation arrives once"
            issue_part(part, index, port, self.seq)
        failure = self._failure_of_parts
        if failure is None:
            port.arrive(self)
        elif self.state < DONE:
            port.communicator.withdraw(self, failure)

    def fit(self, pattern: Call) -> None:
        """Make the result's array; on a rank that has passed no tree, take the form of the root's tree."""
        super().fit(pattern)
        if pattern.form and self._make is None:
            self._make = unpacked_as(self.kind, pattern.form, self.member.size, self.context.arrays)

    def finish(self, end_ns: int, meeting: RawMatch) -> None:
        """Finish with the tree of results, once the parts have ended as well."""
        if self._make is None or self.state >= DONE:
            super().finish(end_ns, meeting)
        elif self._unfinished_parts:
            self._meeting = meeting
        else:
            self._finish_tree(end_ns, meeting)

    @property
    def can_start(self) -> bool:
        """Whether the bytes of its own arrays neither move nor have moved: they may end before those of its parts."""
        return self._meeting is None and super().can_start

    @property
    def _failure_of_parts(self) -> Failure | None:
        """Failure of the first part that has failed, perhaps while its bytes still move."""
        return next((part._failure for part in self.parts if part._failure is not None), None)

    def _part_ended(self) -> None:
        """Count the end of a part; the last one ends the tree."""
        self._unfinished_parts -= 1
        if self._meeting is not None and not self._unfinished_parts and self.state < DONE:
            self._finish_tree(self.context.now_ns(), self._meeting)

    def _finish_tree(self, end_ns: int, meeting: RawMatch) -> None:
        """Unpack the results, or fail with the failure of a part."""
        failure = self._failure_of_parts
        if failure is None:
            try:
                assert self._make is not None
                self.caller_out = self._make([self.out, *(part._value for part in self.parts)])
            except Exception as error:  # no memory for the arrays
                failure = Failure(error)
        if failure is not None:
            super().fail(failure)
            return
        kind, algorithm, group, seq, nbytes, dtype, met_ns = meeting
        nbytes += sum(part.call.nbytes for part in self.parts)
        super().finish(end_ns, (kind, algorithm, group, seq, nbytes, dtype, met_ns))
        self.parts, self._make = (), None  # and their results

    def fail(self, failure: Failure) -> None:
        """End with an error, that of the first part that has failed if one has, and with it the parts under way.

        Where only this rank has failed, its peers may need its parts: it reports to them that it gave up.
        """
        if self.state < DONE:
            failure = self._failure_of_parts or failure
            super().fail(failure)
            for part in self.parts:
                if part.port is not NOWHERE and not part.done:
                    if isinstance(failure.error, _OF_ALL_RANKS):
                        part.port.communicator.forget(part.seq)
                        part.fail(failure)
                    else:
                        part.port.communicator.give_up(part, failure)

    def release(self) -> None:
        """Release the arrays, and drop the packed ones."""
        super().release()
        self._make = None


def finish_part(part: Operation, failure: Failure | None) -> None:
    """Remove a part that has ended from the unfinished operations; its operation has the failure."""
    outstanding = part.context.outstanding
    outstanding.operations.pop(part, None)
    outstanding.record_end(part, None)


def tree_future(x: object, context: RankContext) -> object:
    """Return a tree that holds futures as a future, with copies of its arrays; any other tree as it is.

    Raises:
        UsageError: If a leaf can be no array, or is a future of another world.
    """
    futures = list(futures_in(x))
    if not futures:
        return x
    for future in futures:
        check_here(future, context.thread)
    copy = copy_tree(x, context.arrays)
    tree = Derived(futures, lambda _: resolve(copy)[0], context, "tree")
    if get_ident() == context.thread:
        tree.begin()
    else:
        context.from_thread(tree.begin)
    return tree


def check_tree(operation: CollectiveFuture[Any]) -> None:
    """Raise `UsageError` if an operation has arguments that are for single arrays."""
    if operation.out is not None or operation.arguments.counts is not None:
        raise UsageError("x: a list or dict of arrays takes neither out= nor counts=; leave them out")
    if operation.arguments.shared:
        raise UsageError("x: a list or dict of arrays cannot be shared; issue a call with shared=True for each")
