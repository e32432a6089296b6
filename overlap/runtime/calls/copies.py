"""Methods that copy arrays from all ranks, or from a root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, overload

from ...collectives.kinds import ALL_GATHER, BROADCAST, GATHER, SCATTER
from ...hints import plainly_named
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
        CountsShared,
        Input,
        Memory,
        Numbers,
        Of,
        Out,
        Output,
        Rows,
        S,
        Shared,
        SingleInput,
        V,
    )


@plainly_named
class Copies(Issues):
    """Operations that copy the arrays of all ranks, or of a root, to others."""

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
