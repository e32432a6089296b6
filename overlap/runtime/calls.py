"""The collectives as users call them: plain functions that issue an operation and return its future at once.

Both `Group` and `Rank` (for its world) have these methods. None of them blocks; `await` the future for the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..collectives.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    PERMUTE,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from ..collectives.reduce import Array
from .arguments import Input, Like
from .future import Future
from .issue import Issuer
from .operation import CollectiveFuture
from .outstanding import CallSite, Issued
from .stream import Stream

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Rows: TypeAlias = "Sequence[int] | NDArray[np.integer]"
RowTable: TypeAlias = "Sequence[Rows] | NDArray[np.integer]"


class Calls:
    """Every collective and point-to-point operation of a group.

    What holds for all of them:

    * `x` is an array, something `numpy.asarray` understands, or a future of an array. It is read-only and belongs to
      the operation until its future is done; `out` likewise. The result belongs to the caller. Only these very array
      objects are locked: data written through other views of their memory meanwhile may or may not be sent.
    * `x` may also be a list, tuple or dict of arrays, at any depth, on all ranks alike: they travel as one operation
      (a reduction: as one for each dtype), and the result has the same form. They are copied at the call.
    * What exports its memory is used without a copy: CPU tensors (bfloat16 and float8 included), `array.array`,
      `bytearray`, DLPack. As `out`, the result is that very object. Such objects cannot be locked: a tensor that is
      changed while an operation reads it makes the operation fail, others are to be left alone meanwhile.
    * `priority` (lower is more urgent) is added to that of the stream. `stream` is the communication stream, or None
      for the default one. `name` appears in the timeline.
    * `timeout_s`: the operation must end within so many seconds of the call. Else it fails with a `DeadlineError` here
      and a `PeerFailedError` on the other ranks, and so do all later operations of its group on its stream, for the
      state of the other ranks is unknown; a message ends only messages of its source, destination and tag. The world
      lives on.
    * `call_site`: on whose behalf it is issued, for errors and the timeline: a frame, "file.py:41", or the `place`
      of another future. By default the line of the call; for adapters, whose callers are to be named.
    * `UsageError` is raised at the call; for futures, whose arrays do not exist yet, at the await.
    * `CollectiveMismatchError` is raised at the await, on every rank, when ranks disagree. `PeerFailedError` and
      `RankLeftError` are raised at the await when another rank cannot take part.
    * `shared=True`, the same on all ranks: the result of `all_reduce`, `all_gather` and `broadcast` is read-only, and
      lies once where ranks have memory in common: in one process, and in processes of one host on its own, up to
      `--shared-memory` each. Its memory is used again once every rank has dropped it, with all views of it. Where
      there is no such memory (left), on sockets and over MPI, each rank has a read-only array of its own.
    * `algorithm`, the same on all ranks: which one carries it, such as "ring"; for the rest of the run, and by default,
      it is `--algorithm`, or the cheapest. "direct" is the short cut through memory, where ranks have some in common. A
      name that the collective does not have, or that does not take so many ranks, is a `UsageError` that says which do.
    * Objects (`all_gather_object` and its like) travel as msgpack: None, bool, numbers, texts, bytes, numpy arrays, and
      lists, tuples and dicts of these. With `pickle=True`, on all ranks, they are pickled: anything goes, and any rank
      can make every other rank do anything, so all must be trusted, which they are where only this job knows its
      secret. Each call is one or two operations.
    * dtypes: every number type of numpy and the bfloat16 and float8 types of ml_dtypes, which accumulate in float32.
    """

    _issuer: Issuer

    def all_reduce(
        self,
        x: Input,
        op: str = "sum",
        out: Array | None = None,
        *,
        exact: bool = False,
        shared: bool = False,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Array]:
        """Combine the arrays of all ranks element by element; every rank gets the same bits.

        ======  ==========  =========
        rank    before      after
        ======  ==========  =========
        0       [1, 2]      [11, 22]
        1       [10, 20]    [11, 22]
        ======  ==========  =========

        Args:
            x: Any shape, the same on all ranks.
            op: A name in `overlap.OPS`: "sum", "mean", "max", "min", "prod", or of integers and bool "band", "bor",
                "bxor". The mean of integers is truncated towards zero.
            out: Where to put the result, of the shape and dtype of `x`; `out=x` is in place.
            exact: Reduce every element in the order of ranks, ((x0 + x1) + x2) + ..., whatever algorithm, placement and
                place in the array: the same bits for any buckets, in one process, over wires and in virtual time (of a
                NaN, that it is one).
            shared: Return a read-only array, which ranks of one host have in common: see above.

        Cost: in one process, each input is read and each output written once. As a ring over p ranks, 2(p-1) steps and
        2(p-1)/p of the array sent by each rank. With `exact` nothing more in one process; over wires each rank sends
        the same bytes, but to all others, in two steps, and needs memory for another array; or, where that is cheaper,
        sums go through all ranks in a chain. `overlap plan --exact` tells the price on a machine.
        """
        return self._issuer.issue(
            ALL_REDUCE, x, out, stream, priority, name, timeout_s, call_site, algorithm, op, 0, exact, shared=shared
        )

    def reduce_scatter(
        self,
        x: Input,
        op: str = "sum",
        out: Array | None = None,
        *,
        counts: Rows | None = None,
        exact: bool = False,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Array]:
        """Combine the arrays of all ranks and keep block r of the outcome on rank r.

        ======  ==========  =====
        rank    before      after
        ======  ==========  =====
        0       [1, 2]      [11]
        1       [10, 20]    [22]
        ======  ==========  =====

        With `counts=[2, 1]`:

        ======  =================  ===========
        rank    before             after
        ======  =================  ===========
        0       [1, 2, 3]          [11, 22]
        1       [10, 20, 30]       [33]
        ======  =================  ===========

        Args:
            x: Axis 0 divisible by the size of the group; with `counts`, of as many rows as these have together.
            op: As for `all_reduce`.
            out: Shape `(x.shape[0] // size, *x.shape[1:])`, or `(counts[rank], *x.shape[1:])`; may not overlap `x`.
            counts: Rows of every rank's block, from 0, the same list on all ranks; equal ones by default.
            exact: As for `all_reduce`, at the same cost: one step, the same bytes, and memory for another array.

        Cost as a ring over p ranks: p-1 steps, (p-1)/p of the array sent by each rank. Blocks that differ travel by the
        same algorithms without padding; a step of a ring takes as long as the largest block in it.
        """
        return self._issuer.issue(
            REDUCE_SCATTER, x, out, stream, priority, name, timeout_s, call_site, algorithm, op, 0, exact, counts=counts
        )

    def all_gather(
        self,
        x: Input,
        out: Array | None = None,
        *,
        counts: Rows | None = None,
        shared: bool = False,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Array]:
        """Join the arrays of all ranks along axis 0, in rank order, on every rank.

        ======  ==========  =================
        rank    before      after
        ======  ==========  =================
        0       [1, 2]      [1, 2, 10, 20]
        1       [10, 20]    [1, 2, 10, 20]
        ======  ==========  =================

        With `counts=[1, 2]`:

        ======  ==========  ============
        rank    before      after
        ======  ==========  ============
        0       [1]         [1, 10, 20]
        1       [10, 20]    [1, 10, 20]
        ======  ==========  ============

        Args:
            x: At least one axis; the same shape on all ranks, but for axis 0 with `counts`.
            out: Shape `(x.shape[0] * size, *x.shape[1:])`, or `(sum(counts), *x.shape[1:])`; `x` may be this rank's own
                block of it.
            counts: Rows of every rank's `x`, from 0, the same list on all ranks; equal ones by default.
            shared: Return a read-only array, which ranks of one host have in common: see above.

        Cost as a ring over p ranks: p-1 steps, p-1 blocks sent by each rank. Blocks that differ travel as in
        `reduce_scatter`.
        """
        return self._issuer.issue(
            ALL_GATHER, x, out, stream, priority, name, timeout_s, call_site, algorithm, counts=counts, shared=shared
        )

    def all_to_all(
        self,
        x: Input,
        out: Array | None = None,
        *,
        counts: RowTable | None = None,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Array]:
        """Send block i of axis 0 to rank i; block i of the result comes from rank i.

        ======  ==========  =========
        rank    before      after
        ======  ==========  =========
        0       [1, 2]      [1, 10]
        1       [10, 20]    [2, 20]
        ======  ==========  =========

        With `counts=[[1, 2], [0, 1]]`:

        ======  ===========  =============
        rank    before       after
        ======  ===========  =============
        0       [1, 2, 3]    [1]
        1       [20]         [2, 3, 20]
        ======  ===========  =============

        Args:
            x: Axis 0 divisible by the size of the group; with `counts`, of `sum(counts[rank])` rows.
            out: The shape of `x`; with `counts`, of as many rows as column `rank` of them has together. May not overlap
                `x`.
            counts: A table of rows, from 0: `counts[i][j]` of them go from rank i to rank j; the same table on all
                ranks. Equal ones by default.

        Cost over p ranks: one step, (p-1)/p of the array sent by each rank.
        """
        return self._issuer.issue(
            ALL_TO_ALL, x, out, stream, priority, name, timeout_s, call_site, algorithm, counts=counts
        )

    def permute(
        self,
        x: Input,
        pairs: Sequence[tuple[int, int]],
        out: Array | None = None,
        *,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Array]:
        """Send each source's array to its destination; a rank that nothing comes to gets zeros.

        With `pairs=[(0, 1)]`:

        ======  ==========  =========
        rank    before      after
        ======  ==========  =========
        0       [1, 2]      [0, 0]
        1       [10, 20]    [1, 2]
        ======  ==========  =========

        Args:
            x: Any shape, the same on all ranks.
            pairs: (source, destination) group ranks; each at most once as a source and once as a destination, the same
                list on all ranks.
            out: The shape of `x`; may not overlap it.
        """
        return self._issuer.issue(PERMUTE, x, out, stream, priority, name, timeout_s, call_site, pairs=pairs)

    def barrier(
        self,
        *,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[None]:
        """Be done once every rank has issued it and finished all earlier operations of this stream's window."""
        return self._issuer.issue(BARRIER, None, None, stream, priority, name, timeout_s, call_site)

    def broadcast(
        self,
        x: Input | None,
        root: int = 0,
        out: Array | None = None,
        *,
        shared: bool = False,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Array]:
        """Give every rank the root's array.

        ======  ==========  =========
        rank    before      after
        ======  ==========  =========
        0       [1, 2]      [1, 2]
        1       [10, 20]    [1, 2]
        ======  ==========  =========

        Args:
            x: On the root, the array. Elsewhere an array of the same shape and dtype, which is only compared, or None.
            root: Group rank of the sender.
            out: Where to put the result; `out=x` is in place.
            shared: Return a read-only array, which ranks of one host have in common: see `Calls`.
        """
        return self._issuer.issue(
            BROADCAST, x, out, stream, priority, name, timeout_s, call_site, algorithm, None, root, shared=shared
        )

    def reduce(
        self,
        x: Input,
        root: int = 0,
        op: str = "sum",
        out: Array | None = None,
        *,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Array | None]:
        """Combine the arrays of all ranks on the root; the others get None.

        ======  ==========  =========
        rank    before      after
        ======  ==========  =========
        0       [1, 2]      [11, 22]
        1       [10, 20]    None
        ======  ==========  =========

        Args:
            x: Any shape, the same on all ranks.
            root: Group rank that gets the result.
            op: As for `all_reduce`.
            out: On the root, where to put the result; `out=x` is in place.
        """
        return self._issuer.issue(REDUCE, x, out, stream, priority, name, timeout_s, call_site, algorithm, op, root)

    def gather(
        self,
        x: Input,
        root: int = 0,
        out: Array | None = None,
        *,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Array | None]:
        """Join the arrays of all ranks along axis 0 on the root; the others get None.

        ======  ==========  =================
        rank    before      after
        ======  ==========  =================
        0       [1, 2]      [1, 2, 10, 20]
        1       [10, 20]    None
        ======  ==========  =================

        Args:
            x: At least one axis; the same shape on all ranks.
            root: Group rank that gets the result.
            out: On the root, shape `(x.shape[0] * size, *x.shape[1:])`.
        """
        return self._issuer.issue(GATHER, x, out, stream, priority, name, timeout_s, call_site, algorithm, None, root)

    def scatter(
        self,
        x: Input | None,
        root: int = 0,
        out: Array | None = None,
        *,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Array]:
        """Give rank i block i of the root's array.

        ======  ==========  =====
        rank    before      after
        ======  ==========  =====
        0       [1, 2]      [1]
        1       None        [2]
        ======  ==========  =====

        Args:
            x: On the root, an array with axis 0 divisible by the size of the group. Elsewhere None, or an array of that
                shape, which is only compared.
            root: Group rank of the sender.
            out: Shape `(x.shape[0] // size, *x.shape[1:])`.
        """
        return self._issuer.issue(SCATTER, x, out, stream, priority, name, timeout_s, call_site, algorithm, None, root)

    def send(
        self,
        x: Input,
        dst: int,
        tag: int = 0,
        *,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[None]:
        """Send an array to one rank; done when the array may be written again.

        That is sometimes before the other side has asked for it, and sometimes only once it has: two ranks that both
        await a send to each other before they receive may wait for ever. Issue both, then await them.

        Matched with `recv` by (source, destination, tag), first come first served. Point-to-point operations do not
        take room in the stream's window, so their order across peers and tags does not matter.

        Args:
            x: Any shape; the receiver expects the same shape and dtype.
            dst: Group rank of the receiver.
            tag: From 0 to 2**24 - 1.
        """
        return self._issuer.send(x, dst, tag, stream, priority, name, timeout_s, call_site)

    def recv(
        self,
        like: Array | Like,
        src: int | None,
        tag: int = 0,
        *,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> Issued[Array]:
        """Receive an array from one rank, or from any rank.

        With `src=None`, the message that was sent first is taken, of all ranks of the group; the future's `src` says
        whose it was. Receives that name a rank go before those that do not.

        Args:
            like: A writable array, which is filled and returned, or `(shape, dtype)` for a new one.
            src: Group rank of the sender; None for any.
            tag: From 0 to 2**24 - 1.
        """
        return self._issuer.receive(like, src, tag, stream, priority, name, timeout_s, call_site)

    # -- objects -------------------------------------------------------------------------------------------------

    def all_gather_object(
        self,
        value: object,
        *,
        pickle: bool = False,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> Future[list[Any]]:
        """Give every rank the objects of all, as a list in rank order.

        Args:
            value: Any object that can be packed; it may differ in size between ranks.
            pickle: Whether to pickle it; see `Calls`.
        """
        from .objects import gather  # and with it msgpack, which few programs need

        name = "all_gather_object" if name is None else name
        return gather(self._issuer, ALL_GATHER, value, 0, pickle, stream, priority, name, timeout_s, call_site)

    def gather_object(
        self,
        value: object,
        root: int = 0,
        *,
        pickle: bool = False,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> Future[list[Any] | None]:
        """Give the root the objects of all, as a list in rank order; the others get None.

        Args:
            value: Any object that can be packed.
            root: Group rank that gets them.
            pickle: Whether to pickle it; see `Calls`.
        """
        from .objects import gather

        name = "gather_object" if name is None else name
        return gather(self._issuer, GATHER, value, root, pickle, stream, priority, name, timeout_s, call_site)

    def broadcast_object(
        self,
        value: object = None,
        root: int = 0,
        *,
        pickle: bool = False,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> Future[Any]:
        """Give every rank the root's object.

        Args:
            value: On the root, any object that can be packed; elsewhere it is not looked at.
            root: Group rank of the sender.
            pickle: Whether to pickle it; see `Calls`.
        """
        from .objects import give

        name = "broadcast_object" if name is None else name
        return give(self._issuer, BROADCAST, value, root, pickle, stream, priority, name, timeout_s, call_site)

    def scatter_object(
        self,
        values: Sequence[object] | None = None,
        root: int = 0,
        *,
        pickle: bool = False,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> Future[Any]:
        """Give rank i object i of the root's.

        Args:
            values: On the root, as many objects as there are ranks; elsewhere it is not looked at.
            root: Group rank of the sender.
            pickle: Whether to pickle them; see `Calls`.
        """
        from .objects import give

        name = "scatter_object" if name is None else name
        return give(self._issuer, SCATTER, values, root, pickle, stream, priority, name, timeout_s, call_site)
