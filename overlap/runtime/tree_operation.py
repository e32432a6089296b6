"""Collectives of trees of arrays, and of futures that may become trees.

Such a collective has one number on its stream, whatever the tree contains, because ranks count operations at the call,
before a future has a value. If the arrays are only moved, they all travel packed in one array. In a reduction, only the
arrays of the first dtype do. Those of each further dtype travel at the same time as a `TreePart`, a second collective,
on a communicator of its own: there is one for each index of a dtype.

A part has the number of the operation on the tree. That operation is unfinished, and takes room in the window of its
stream, until all of its parts have ended. So the window also bounds the numbers under way on the parts' communicators
(see `stream`).
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
from .derived import Derived, check_same_world, futures_in, replace_futures
from .failure import Failure
from .forms import comparable_form
from .operation import NOWHERE, CollectiveFuture, Operation
from .settling import settle_and_deliver
from .state import DONE
from .trees import arrays_of, copy_tree, make_unpacker, pack_leaves, unpacker_for_form

if TYPE_CHECKING:
    from .port import Port

# Errors that fail an operation on all ranks, so that no rank goes on with its parts.
_OF_ALL_RANKS = (PeerError, CollectiveMismatchError, NonFiniteError, UsageError)


class TreePart(CollectiveFuture[Any]):
    """Operation on the arrays of one dtype, other than the first, of a tree that is reduced."""

    __slots__ = ()

    def finish(self, end_ns: int, meeting: RawMatch) -> None:
        """End with the result, but without a span: the operation of the whole tree has one; `meeting` is not used."""
        if self.state < DONE:
            self.context.flight.record_success(self.record, self.started_ns, end_ns, None)
            value = self.out  # `release_arrays` drops it
            self.release_arrays()
            settle_and_deliver(self, value)


class TreeOperation(CollectiveFuture[Any]):
    """Handle of a collective on a tree of arrays, or on the value of a future, which may be a tree.

    Attributes:
        parts: In a reduction, the operations on the arrays of further dtypes; else empty.
        issue_part: `Ports._issue_part`, which takes a part, its index, the port and the number of the whole operation;
            None once the parts are issued, so that the group may be dropped.
    """

    # No slots: most operations have no tree of several dtypes, and read these defaults of the class.
    call: Call
    caller_out: object
    source: Array | None
    parts: Sequence[TreePart] = ()
    issue_part: Callable[[CollectiveFuture[Any], int, Port, int], None] | None = None
    _unfinished_parts: int = 0
    _make_tree: Callable[[list[Any]], object] | None = None  # Makes the tree of results
    _end_of_own_arrays: RawMatch | None = None  # `meeting` of `finish`, while the parts go on after the own arrays' end

    def pack_tree(self, tree: object, make_call: Callable[[CollectiveFuture[Any], Array, str], Call]) -> None:
        """Pack the arrays of a tree into `source` and the sources of new `parts`, and set `call`.

        Args:
            tree: The tree.
            make_call: Makes the call of an operation from (operation, packed array, form of the tree).

        Raises:
            UsageError: If the tree is empty, or cannot travel in this call.
        """
        check_tree_arguments(self)
        arrays = self.context.arrays
        leaves = arrays_of(tree)
        packed = pack_leaves(self.kind, leaves, self.member.size, arrays)
        form = comparable_form(tree, leaves, parsable=self.kind is BROADCAST or self.kind is SCATTER)
        self.source, self.call = packed[0].packed, make_call(self, packed[0].packed, form)
        self._make_tree = make_unpacker(tree, packed, arrays)
        if len(packed) > 1:
            self.parts = [self._make_part(pack.packed, make_call(self, pack.packed, form)) for pack in packed[1:]]
            self._unfinished_parts = len(self.parts)

    def _make_part(self, packed: Array, call: Call) -> TreePart:
        part = TreePart(self.kind, None, None, self.place, 0, f"{self.name}: {packed.dtype}")
        part.arguments = self.arguments
        part.context, part.member, part.step = self.context, self.member, self.step
        part.source, part.call = packed, call
        part._callbacks = [self._on_part_end]  # set directly, without a lock: nothing else knows the part yet
        return part

    @property
    def end_wakes_loop(self) -> bool:
        """Whether only the loop may end the operation: always with parts, because their ends call back."""
        return bool(self.parts) or super().end_wakes_loop

    # -- life --------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Match the operation and its parts with those of the other ranks, each on its communicator."""
        port, issue_part, self.issue_part = self.port, self.issue_part, None
        if not self.parts:
            port.arrive(self)
            return
        for index, part in enumerate(self.parts):
            part.priority = self.priority  # the priority of the stream is added to it already
            assert issue_part is not None, "an operation arrives once"
            issue_part(part, index, port, self.seq)
        failure = self._failure_of_parts
        if failure is None:
            port.arrive(self)
        elif self.state < DONE:
            port.communicator.fail_and_report(self, failure)

    def prepare_result(self, pattern: Call) -> None:
        """Make the array of the result; on a rank without an input, also prepare to unpack the root's tree.

        Raises:
            UsageError: If the form of the root's tree is not known.
            MemoryError: If there is no memory for the array.
        """
        super().prepare_result(pattern)
        if pattern.form and self._make_tree is None:
            root = f"rank {self.member.label[1][pattern.root]}, the root of {self.label} ({self.call_site})"
            self._make_tree = unpacker_for_form(self.kind, pattern.form, self.member.size, self.context.arrays, root)

    def finish(self, end_ns: int, meeting: RawMatch) -> None:
        """Finish with the tree of results, if all parts have ended; without a tree, like any other collective.

        If parts still go on, the end of the last one finishes. Arguments: see `CollectiveFuture.finish`.
        """
        if self._make_tree is None or self.state >= DONE:
            super().finish(end_ns, meeting)
        elif self._unfinished_parts:
            self._end_of_own_arrays = meeting
        else:
            self._finish_tree(end_ns, meeting)

    @property
    def is_unstarted(self) -> bool:
        """Whether the bytes of the own arrays have not begun to move; they may have ended while parts go on."""
        return self._end_of_own_arrays is None and super().is_unstarted

    @property
    def _failure_of_parts(self) -> Failure | None:
        """Failure of the first failed part, whose bytes may still move; None: none has failed."""
        return next((part._failure for part in self.parts if part._failure is not None), None)

    def _on_part_end(self) -> None:
        """Count the end of a part; the last one finishes the operation, if its own arrays have ended."""
        self._unfinished_parts -= 1
        if self._end_of_own_arrays is not None and not self._unfinished_parts and self.state < DONE:
            self._finish_tree(self.context.now_ns(), self._end_of_own_arrays)

    def _finish_tree(self, end_ns: int, meeting: RawMatch) -> None:
        """Finish with the tree of results, or fail with the failure of a part, or of the unpacking."""
        failure = self._failure_of_parts
        if failure is None:
            try:
                assert self._make_tree is not None
                self.caller_out = self._make_tree([self.out, *(part._value for part in self.parts)])
            except Exception as error:  # no memory for the arrays
                failure = Failure(error)
        if failure is not None:
            super().fail(failure)
            return
        kind, algorithm, group, seq, nbytes, dtype, met_ns = meeting
        nbytes += sum(part.call.nbytes for part in self.parts)
        super().finish(end_ns, (kind, algorithm, group, seq, nbytes, dtype, met_ns))
        self.parts, self._make_tree = (), None  # drops the results of the parts, too

    def fail(self, failure: Failure) -> None:
        """End with an error, or with that of the first failed part if there is one; parts that go on fail, too.

        If only this rank has failed, the other ranks may wait for its parts: they get a report that this rank gave up.
        """
        if self.state < DONE:
            failure = self._failure_of_parts or failure
            super().fail(failure)
            for part in self.parts:
                if part.port is not NOWHERE and not part.done:
                    if isinstance(failure.error, _OF_ALL_RANKS):
                        part.port.communicator.forget_operation(part.seq)
                        part.fail(failure)
                    else:
                        part.port.communicator.give_up_waiting(part, failure)

    def release_arrays(self) -> None:
        """Release the arrays, and drop the packed ones."""
        super().release_arrays()
        self._make_tree = None


def remove_ended_part(part: Operation, failure: Failure | None) -> None:
    """Remove a part that has ended from the unfinished operations; the operation on the tree reports its failure."""
    outstanding = part.context.outstanding
    outstanding.operations.pop(part, None)
    outstanding.record_end(part, None)


def tree_future(x: object, context: RankContext) -> object:
    """Return a future of the tree `x` with results in place of its futures, and with copies of its arrays.

    Return `x` itself if it contains no futures. Any thread may call this.

    Args:
        x: The tree.
        context: Context of the rank.

    Raises:
        UsageError: If a leaf can be no array, or is a future of another world.
    """
    futures = list(futures_in(x))
    if not futures:
        return x
    for future in futures:
        check_same_world(future, context.thread)
    copy = copy_tree(x, context.arrays)
    tree = Derived(futures, lambda _: replace_futures(copy)[0], context, "tree")
    if get_ident() == context.thread:
        tree.watch_parts()
    else:
        context.post_to_loop(tree.watch_parts)
    return tree


def check_tree_arguments(operation: CollectiveFuture[Any]) -> None:
    """Raise `UsageError` if an operation on a tree has arguments that only work with a single array."""
    if operation.out is not None or operation.arguments.counts is not None:
        raise UsageError("x: a list or dict of arrays takes neither out= nor counts=; leave them out")
    if operation.arguments.shared:
        raise UsageError("x: a list or dict of arrays cannot be shared; issue a call with shared=True for each")
