"""Methods for reductions, and for copies of the arrays of all ranks or of a root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, overload

from ...collectives.kinds import ALL_GATHER, ALL_REDUCE, BROADCAST, GATHER, REDUCE, REDUCE_SCATTER, SCATTER
from ...hints import hide_class_name
from ..operation import CollectiveFuture
from .issues import Issues

if TYPE_CHECKING:
    from typing import Unpack

    from numpy.typing import NDArray

    from ...collectives.reduce import Array
    from ..future import Future
    from ..outstanding import CallSite
    from ..stream import Stream
    from .shapes import (
        AlgorithmOptions,
        AllGatherOptions,
        AllReduceOptions,
        ArrayOf,
        Arrays,
        BroadcastOptions,
        ExactOptions,
        Input,
        Memory,
        Numbers,
        Op,
        Out,
        Output,
        ReduceScatterOptions,
        Rows,
        S,
        SingleInput,
        V,
    )


@hide_class_name
class CollectiveCalls(Issues):
    """Operations that combine the arrays of all ranks, or copy those of all ranks or of a root to others.

    Each method returns the future of its result at once. `GroupCalls` describes the arguments that all methods share.
    """

    # -- reductions ----------------------------------------------------------------------------------------------------

    @overload
    def all_reduce(
        self, x: ArrayOf[S], op: Op = ..., out: None = ..., **options: Unpack[AllReduceOptions]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def all_reduce(
        self, x: Numbers | Memory, op: Op = ..., out: None = ..., **options: Unpack[AllReduceOptions]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def all_reduce(
        self, x: Mapping[str, Future[V]], op: Op = ..., out: None = ..., **options: Unpack[ExactOptions]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def all_reduce(
        self, x: Sequence[Future[V]], op: Op = ..., out: None = ..., **options: Unpack[ExactOptions]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def all_reduce(
        self, x: Arrays | Future[Arrays], op: Op = ..., out: None = ..., **options: Unpack[ExactOptions]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def all_reduce(
        self, x: SingleInput, op: Op = ..., out: Out | None = ..., **options: Unpack[AllReduceOptions]
    ) -> CollectiveFuture[Out]: ...

    def all_reduce(
        self,
        x: Input,
        op: Op = "sum",
        out: Output | None = None,
        *,
        exact: bool = False,
        shared: bool = False,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[object]:
        """Combine the arrays of all ranks element by element; every rank gets the same bits.

        ======  ==========  =========
        rank    before      after
        ======  ==========  =========
        0       [1, 2]      [11, 22]
        1       [10, 20]    [11, 22]
        ======  ==========  =========

        Args:
            x: Array of any shape, the same shape on all ranks.
            op: A name in `overlap.OPS`: "sum", "mean", "max", "min", "prod"; for integers and bool also "band", "bor",
                "bxor". The mean of integers is truncated towards zero.
            out: Array for the result, of the shape and dtype of `x`; `out=x` is in place.
            exact: Whether to reduce every element in the order of ranks, ((x0 + x1) + x2) + ... Then the bits of a
                result do not depend on the algorithm, the placement of ranks, or the position in the array: they are
                the same for any buckets, in one process, over wires and in virtual time (except the bits of a NaN).
            shared: Return a read-only array that ranks of one host share; see `GroupCalls`.

        Other arguments, and errors: see `GroupCalls`.

        Cost: in one process, each input is read and each output written once. As a ring over p ranks, 2(p-1) steps and
        2(p-1)/p of the array sent by each rank. With `exact`, the same in one process. Over wires each rank then sends
        as many bytes, but to all other ranks, in two steps, and needs memory for another array; or, if that is cheaper,
        sums travel through all ranks in a chain. `overlap plan --exact` prints the price on a machine.
        """
        return self._ports.issue(
            ALL_REDUCE, x, out, stream, priority, name, timeout_s, call_site, algorithm, op, exact=exact, shared=shared
        )

    @overload
    def reduce_scatter(
        self, x: ArrayOf[S], op: Op = ..., out: None = ..., **options: Unpack[ReduceScatterOptions]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def reduce_scatter(
        self, x: Numbers | Memory, op: Op = ..., out: None = ..., **options: Unpack[ReduceScatterOptions]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def reduce_scatter(
        self, x: Mapping[str, Future[V]], op: Op = ..., out: None = ..., **options: Unpack[ExactOptions]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def reduce_scatter(
        self, x: Sequence[Future[V]], op: Op = ..., out: None = ..., **options: Unpack[ExactOptions]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def reduce_scatter(
        self, x: Arrays | Future[Arrays], op: Op = ..., out: None = ..., **options: Unpack[ExactOptions]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def reduce_scatter(
        self, x: SingleInput, op: Op = ..., out: Out | None = ..., **options: Unpack[ReduceScatterOptions]
    ) -> CollectiveFuture[Out]: ...

    def reduce_scatter(
        self,
        x: Input,
        op: Op = "sum",
        out: Output | None = None,
        *,
        counts: Rows | None = None,
        exact: bool = False,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[object]:
        """Combine the arrays of all ranks element by element; rank r gets block r of the result, along axis 0.

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
            x: Array whose axis 0 is divisible by the size of the group; with `counts`, it has `sum(counts)` rows.
            op: As for `all_reduce`.
            out: Array for the result, of shape `(x.shape[0] // size, *x.shape[1:])`; with `counts`,
                `(counts[rank], *x.shape[1:])`. May not overlap `x`.
            counts: Number of rows of each rank's block, 0 or more, the same list on all ranks. By default all blocks
                have equally many rows.
            exact: As for `all_reduce`. Cost over wires: one step, the same bytes, and memory for another array.

        Other arguments, and errors: see `GroupCalls`.

        Cost as a ring over p ranks: p-1 steps, (p-1)/p of the array sent by each rank. Blocks of different sizes are
        sent by the same algorithms, without padding; a step of a ring takes as long as its largest block.
        """
        return self._ports.issue(
            REDUCE_SCATTER, x, out, stream, priority, name, timeout_s, call_site, algorithm, op, exact=exact,
            counts=counts,
        )  # fmt: skip

    @overload
    def reduce(
        self, x: ArrayOf[S], root: int = ..., op: Op = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[NDArray[S] | None]: ...

    @overload
    def reduce(
        self, x: Numbers | Memory, root: int = ..., op: Op = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Array | None]: ...

    @overload
    def reduce(
        self,
        x: Mapping[str, Future[V]],
        root: int = ...,
        op: Op = ...,
        out: None = ...,
        **options: Unpack[AlgorithmOptions],
    ) -> CollectiveFuture[dict[str, V] | None]: ...

    @overload
    def reduce(
        self,
        x: Sequence[Future[V]],
        root: int = ...,
        op: Op = ...,
        out: None = ...,
        **options: Unpack[AlgorithmOptions],
    ) -> CollectiveFuture[Sequence[V] | None]: ...

    @overload
    def reduce(
        self,
        x: Arrays | Future[Arrays],
        root: int = ...,
        op: Op = ...,
        out: None = ...,
        **options: Unpack[AlgorithmOptions],
    ) -> CollectiveFuture[Arrays | None]: ...

    @overload
    def reduce(
        self, x: SingleInput, root: int = ..., op: Op = ..., out: Out | None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Out | None]: ...

    def reduce(
        self,
        x: Input,
        root: int = 0,
        op: Op = "sum",
        out: Output | None = None,
        *,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[object]:
        """Combine the arrays of all ranks element by element on the root; the other ranks get None.

        ======  ==========  =========
        rank    before      after
        ======  ==========  =========
        0       [1, 2]      [11, 22]
        1       [10, 20]    None
        ======  ==========  =========

        Args:
            x: Array of any shape, the same shape on all ranks.
            root: Group rank that gets the result.
            op: As for `all_reduce`.
            out: On the root, array for the result, of the shape and dtype of `x`; `out=x` is in place.

        Other arguments, and errors: see `GroupCalls`.
        """
        return self._ports.issue(REDUCE, x, out, stream, priority, name, timeout_s, call_site, algorithm, op, root)

    # -- copies --------------------------------------------------------------------------------------------------------

    @overload
    def all_gather(
        self, x: ArrayOf[S], out: None = ..., **options: Unpack[AllGatherOptions]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def all_gather(
        self, x: Numbers | Memory, out: None = ..., **options: Unpack[AllGatherOptions]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def all_gather(
        self, x: Mapping[str, Future[V]], out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def all_gather(
        self, x: Sequence[Future[V]], out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def all_gather(
        self, x: Arrays | Future[Arrays], out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def all_gather(
        self, x: SingleInput, out: Out | None = ..., **options: Unpack[AllGatherOptions]
    ) -> CollectiveFuture[Out]: ...

    def all_gather(
        self,
        x: Input,
        out: Output | None = None,
        *,
        counts: Rows | None = None,
        shared: bool = False,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[object]:
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
            x: Array with at least one axis, the same shape on all ranks; with `counts`, it has `counts[rank]` rows.
            out: Array for the result, of shape `(x.shape[0] * size, *x.shape[1:])`; with `counts`,
                `(sum(counts), *x.shape[1:])`. `x` may be this rank's own block of `out`.
            counts: Number of rows of each rank's `x`, 0 or more, the same list on all ranks. By default all have the
                same number.
            shared: Return a read-only array that ranks of one host share; see `GroupCalls`.

        Other arguments, and errors: see `GroupCalls`.

        Cost as a ring over p ranks: p-1 steps, p-1 blocks sent by each rank. Blocks of different sizes: see
        `reduce_scatter`.
        """
        return self._ports.issue(
            ALL_GATHER, x, out, stream, priority, name, timeout_s, call_site, algorithm, counts=counts, shared=shared
        )

    @overload
    def gather(
        self, x: ArrayOf[S], root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[NDArray[S] | None]: ...

    @overload
    def gather(
        self, x: Numbers | Memory, root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Array | None]: ...

    @overload
    def gather(
        self, x: Mapping[str, Future[V]], root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[dict[str, V] | None]: ...

    @overload
    def gather(
        self, x: Sequence[Future[V]], root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Sequence[V] | None]: ...

    @overload
    def gather(
        self, x: Arrays | Future[Arrays], root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Arrays | None]: ...

    @overload
    def gather(
        self, x: SingleInput, root: int = ..., out: Out | None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Out | None]: ...

    def gather(
        self,
        x: Input,
        root: int = 0,
        out: Output | None = None,
        *,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[object]:
        """Join the arrays of all ranks along axis 0, in rank order, on the root; the other ranks get None.

        ======  ==========  =================
        rank    before      after
        ======  ==========  =================
        0       [1, 2]      [1, 2, 10, 20]
        1       [10, 20]    None
        ======  ==========  =================

        Args:
            x: Array with at least one axis, the same shape on all ranks.
            root: Group rank that gets the result.
            out: On the root, array for the result, of shape `(x.shape[0] * size, *x.shape[1:])`.

        Other arguments, and errors: see `GroupCalls`.
        """
        return self._ports.issue(GATHER, x, out, stream, priority, name, timeout_s, call_site, algorithm, root=root)

    @overload
    def broadcast(
        self, x: ArrayOf[S] | None, root: int = ..., out: None = ..., **options: Unpack[BroadcastOptions]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def broadcast(
        self, x: Numbers | Memory | None, root: int = ..., out: None = ..., **options: Unpack[BroadcastOptions]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def broadcast(
        self, x: Mapping[str, Future[V]] | None, root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def broadcast(
        self, x: Sequence[Future[V]] | None, root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def broadcast(
        self, x: Arrays | Future[Arrays] | None, root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def broadcast(
        self, x: SingleInput | None, root: int = ..., out: Out | None = ..., **options: Unpack[BroadcastOptions]
    ) -> CollectiveFuture[Out]: ...

    def broadcast(
        self,
        x: Input | None,
        root: int = 0,
        out: Output | None = None,
        *,
        shared: bool = False,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[object]:
        """Give every rank the root's array.

        ======  ==========  =========
        rank    before      after
        ======  ==========  =========
        0       [1, 2]      [1, 2]
        1       [10, 20]    [1, 2]
        ======  ==========  =========

        Args:
            x: On the root, the array. On other ranks None, or an array whose shape and dtype are compared with the
                root's.
            root: Group rank of the sender.
            out: Array for the result, of the shape and dtype of the root's `x`; `out=x` is in place.
            shared: Return a read-only array that ranks of one host share; see `GroupCalls`.

        Other arguments, and errors: see `GroupCalls`.
        """
        return self._ports.issue(
            BROADCAST, x, out, stream, priority, name, timeout_s, call_site, algorithm, root=root, shared=shared
        )

    @overload
    def scatter(
        self, x: ArrayOf[S] | None, root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def scatter(
        self, x: Numbers | Memory | None, root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def scatter(
        self, x: Mapping[str, Future[V]] | None, root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def scatter(
        self, x: Sequence[Future[V]] | None, root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def scatter(
        self, x: Arrays | Future[Arrays] | None, root: int = ..., out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def scatter(
        self, x: SingleInput | None, root: int = ..., out: Out | None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Out]: ...

    def scatter(
        self,
        x: Input | None,
        root: int = 0,
        out: Output | None = None,
        *,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[object]:
        """Give rank i block i of the root's array, along axis 0.

        ======  ==========  =====
        rank    before      after
        ======  ==========  =====
        0       [1, 2]      [1]
        1       None        [2]
        ======  ==========  =====

        Args:
            x: On the root, an array whose axis 0 is divisible by the size of the group. On other ranks None, or an
                array whose shape and dtype are compared with the root's.
            root: Group rank of the sender.
            out: Array for the result, of shape `(x.shape[0] // size, *x.shape[1:])`.

        Other arguments, and errors: see `GroupCalls`.
        """
        return self._ports.issue(SCATTER, x, out, stream, priority, name, timeout_s, call_site, algorithm, root=root)
