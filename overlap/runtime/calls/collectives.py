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
        Arrays,
        Chosen,
        CountsExact,
        CountsShared,
        Exact,
        ExactShared,
        Input,
        Memory,
        Numbers,
        Of,
        Op,
        Out,
        Output,
        Rows,
        S,
        Shared,
        SingleInput,
        V,
    )


@hide_class_name
class CollectiveCalls(Issues):
    """Operations that combine the arrays of all ranks, or copy those of all ranks or of a root to others."""

    # -- reductions ----------------------------------------------------------------------------------------------------

    @overload
    def all_reduce(
        self, x: Of[S], op: Op = ..., out: None = ..., **options: Unpack[ExactShared]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def all_reduce(
        self, x: Numbers | Memory, op: Op = ..., out: None = ..., **options: Unpack[ExactShared]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def all_reduce(
        self, x: Mapping[str, Future[V]], op: Op = ..., out: None = ..., **options: Unpack[Exact]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def all_reduce(
        self, x: Sequence[Future[V]], op: Op = ..., out: None = ..., **options: Unpack[Exact]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def all_reduce(
        self, x: Arrays | Future[Arrays], op: Op = ..., out: None = ..., **options: Unpack[Exact]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def all_reduce(
        self, x: SingleInput, op: Op = ..., out: Out | None = ..., **options: Unpack[ExactShared]
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
            x: Any shape, the same on all ranks.
            op: A name in `overlap.OPS`: "sum", "mean", "max", "min", "prod", or of integers and bool "band", "bor",
                "bxor". The mean of integers is truncated towards zero.
            out: Array for the result, of the shape and dtype of `x`; `out=x` is in place.
            exact: Reduce every element in the order of ranks, ((x0 + x1) + x2) + ..., whatever algorithm, placement and
                place in the array: the same bits for any buckets, in one process, over wires and in virtual time (but
                for the bits of a NaN).
            shared: Return a read-only array that ranks of one host share; see `GroupCalls`.

        Cost: in one process, each input is read and each output written once. As a ring over p ranks, 2(p-1) steps and
        2(p-1)/p of the array sent by each rank. With `exact` nothing more in one process; over wires each rank sends
        the same bytes, but to all others, in two steps, and needs memory for another array; or, where that is cheaper,
        sums go through all ranks in a chain. `overlap plan --exact` prints the price on a machine.
        """
        return self._ports.issue(
            ALL_REDUCE, x, out, stream, priority, name, timeout_s, call_site, algorithm, op, 0, exact, shared=shared
        )

    @overload
    def reduce_scatter(
        self, x: Of[S], op: Op = ..., out: None = ..., **options: Unpack[CountsExact]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def reduce_scatter(
        self, x: Numbers | Memory, op: Op = ..., out: None = ..., **options: Unpack[CountsExact]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def reduce_scatter(
        self, x: Mapping[str, Future[V]], op: Op = ..., out: None = ..., **options: Unpack[Exact]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def reduce_scatter(
        self, x: Sequence[Future[V]], op: Op = ..., out: None = ..., **options: Unpack[Exact]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def reduce_scatter(
        self, x: Arrays | Future[Arrays], op: Op = ..., out: None = ..., **options: Unpack[Exact]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def reduce_scatter(
        self, x: SingleInput, op: Op = ..., out: Out | None = ..., **options: Unpack[CountsExact]
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
        """Combine the arrays of all ranks, with block r of the result on rank r.

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
            x: Axis 0 divisible by the size of the group; with `counts`, `sum(counts)` rows.
            op: As for `all_reduce`.
            out: Shape `(x.shape[0] // size, *x.shape[1:])`, or `(counts[rank], *x.shape[1:])`; may not overlap `x`.
            counts: Rows of every rank's block, from 0, the same list on all ranks; equal numbers by default.
            exact: As for `all_reduce`, at the same cost: one step, the same bytes, and memory for another array.

        Cost as a ring over p ranks: p-1 steps, (p-1)/p of the array sent by each rank. Blocks that differ are sent by
        the same algorithms without padding; a step of a ring takes as long as its largest block.
        """
        return self._ports.issue(
            REDUCE_SCATTER, x, out, stream, priority, name, timeout_s, call_site, algorithm, op, 0, exact, counts=counts
        )

    @overload
    def reduce(
        self, x: Of[S], root: int = ..., op: Op = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[NDArray[S] | None]: ...

    @overload
    def reduce(
        self, x: Numbers | Memory, root: int = ..., op: Op = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Array | None]: ...

    @overload
    def reduce(
        self, x: Mapping[str, Future[V]], root: int = ..., op: Op = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[dict[str, V] | None]: ...

    @overload
    def reduce(
        self, x: Sequence[Future[V]], root: int = ..., op: Op = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Sequence[V] | None]: ...

    @overload
    def reduce(
        self, x: Arrays | Future[Arrays], root: int = ..., op: Op = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Arrays | None]: ...

    @overload
    def reduce(
        self, x: SingleInput, root: int = ..., op: Op = ..., out: Out | None = ..., **options: Unpack[Chosen]
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
        return self._ports.issue(REDUCE, x, out, stream, priority, name, timeout_s, call_site, algorithm, op, root)

    # -- copies --------------------------------------------------------------------------------------------------------

    @overload
    def all_gather(
        self, x: Of[S], out: None = ..., **options: Unpack[CountsShared]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def all_gather(
        self, x: Numbers | Memory, out: None = ..., **options: Unpack[CountsShared]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def all_gather(
        self, x: Mapping[str, Future[V]], out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def all_gather(
        self, x: Sequence[Future[V]], out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def all_gather(
        self, x: Arrays | Future[Arrays], out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def all_gather(
        self, x: SingleInput, out: Out | None = ..., **options: Unpack[CountsShared]
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
            x: At least one axis; the same shape on all ranks, but for axis 0 with `counts`.
            out: Shape `(x.shape[0] * size, *x.shape[1:])`, or `(sum(counts), *x.shape[1:])`; `x` may be this rank's own
                block of it.
            counts: Rows of every rank's `x`, from 0, the same list on all ranks; equal numbers by default.
            shared: Return a read-only array that ranks of one host share; see `GroupCalls`.

        Cost as a ring over p ranks: p-1 steps, p-1 blocks sent by each rank. Blocks that differ are sent as in
        `reduce_scatter`.
        """
        return self._ports.issue(
            ALL_GATHER, x, out, stream, priority, name, timeout_s, call_site, algorithm, counts=counts, shared=shared
        )

    @overload
    def gather(
        self, x: Of[S], root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[NDArray[S] | None]: ...

    @overload
    def gather(
        self, x: Numbers | Memory, root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Array | None]: ...

    @overload
    def gather(
        self, x: Mapping[str, Future[V]], root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[dict[str, V] | None]: ...

    @overload
    def gather(
        self, x: Sequence[Future[V]], root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Sequence[V] | None]: ...

    @overload
    def gather(
        self, x: Arrays | Future[Arrays], root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Arrays | None]: ...

    @overload
    def gather(
        self, x: SingleInput, root: int = ..., out: Out | None = ..., **options: Unpack[Chosen]
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
        return self._ports.issue(GATHER, x, out, stream, priority, name, timeout_s, call_site, algorithm, None, root)

    @overload
    def broadcast(
        self, x: Of[S] | None, root: int = ..., out: None = ..., **options: Unpack[Shared]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def broadcast(
        self, x: Numbers | Memory | None, root: int = ..., out: None = ..., **options: Unpack[Shared]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def broadcast(
        self, x: Mapping[str, Future[V]] | None, root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def broadcast(
        self, x: Sequence[Future[V]] | None, root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def broadcast(
        self, x: Arrays | Future[Arrays] | None, root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def broadcast(
        self, x: SingleInput | None, root: int = ..., out: Out | None = ..., **options: Unpack[Shared]
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
            x: On the root, the array. Elsewhere an array of the same shape and dtype, which is only compared, or None.
            root: Group rank of the sender.
            out: Array for the result; `out=x` is in place.
            shared: Return a read-only array that ranks of one host share; see `GroupCalls`.
        """
        return self._ports.issue(
            BROADCAST, x, out, stream, priority, name, timeout_s, call_site, algorithm, None, root, shared=shared
        )

    @overload
    def scatter(
        self, x: Of[S] | None, root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def scatter(
        self, x: Numbers | Memory | None, root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def scatter(
        self, x: Mapping[str, Future[V]] | None, root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def scatter(
        self, x: Sequence[Future[V]] | None, root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def scatter(
        self, x: Arrays | Future[Arrays] | None, root: int = ..., out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def scatter(
        self, x: SingleInput | None, root: int = ..., out: Out | None = ..., **options: Unpack[Chosen]
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
        return self._ports.issue(SCATTER, x, out, stream, priority, name, timeout_s, call_site, algorithm, None, root)
