"""Methods for exchanges between pairs of ranks, and for barriers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from ...collectives.kinds import ALL_TO_ALL, BARRIER, PERMUTE
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
        Counts,
        DTypeOf,
        Input,
        Like,
        Memory,
        Numbers,
        Of,
        Options,
        Out,
        Output,
        RowTable,
        S,
        Shape,
        SingleInput,
        Tree,
        V,
    )


@hide_class_name
class Exchanges(Issues):
    """Operations between pairs of ranks, and the barrier."""

    @overload
    def all_to_all(self, x: Of[S], out: None = ..., **options: Unpack[Counts]) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def all_to_all(
        self, x: Numbers | Memory, out: None = ..., **options: Unpack[Counts]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def all_to_all(
        self, x: Mapping[str, Future[V]], out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def all_to_all(
        self, x: Sequence[Future[V]], out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def all_to_all(
        self, x: Arrays | Future[Arrays], out: None = ..., **options: Unpack[Chosen]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def all_to_all(self, x: SingleInput, out: Out | None = ..., **options: Unpack[Counts]) -> CollectiveFuture[Out]: ...

    def all_to_all(
        self,
        x: Input,
        out: Output | None = None,
        *,
        counts: RowTable | None = None,
        algorithm: str | None = None,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[object]:
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
            counts: Table of numbers of rows: `counts[i][j]` of them go from rank i to rank j; the same table on all
                ranks. Equal numbers by default.

        Cost over p ranks: one step, (p-1)/p of the array sent by each rank.
        """
        return self._ports.issue(
            ALL_TO_ALL, x, out, stream, priority, name, timeout_s, call_site, algorithm, counts=counts
        )

    @overload
    def permute(
        self, x: Of[S], pairs: Sequence[tuple[int, int]], out: None = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def permute(
        self, x: Numbers | Memory, pairs: Sequence[tuple[int, int]], out: None = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def permute(
        self, x: Mapping[str, Future[V]], pairs: Sequence[tuple[int, int]], out: None = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def permute(
        self, x: Sequence[Future[V]], pairs: Sequence[tuple[int, int]], out: None = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def permute(
        self, x: Arrays | Future[Arrays], pairs: Sequence[tuple[int, int]], out: None = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def permute(
        self, x: SingleInput, pairs: Sequence[tuple[int, int]], out: Out | None = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[Out]: ...

    def permute(
        self,
        x: Input,
        pairs: Sequence[tuple[int, int]],
        out: Output | None = None,
        *,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[object]:
        """Send each source's array to its destination; a rank that is no destination gets zeros.

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
        return self._ports.issue(PERMUTE, x, out, stream, priority, name, timeout_s, call_site, pairs=pairs)

    def barrier(
        self,
        *,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[None]:
        """Wait until every rank has issued the barrier and finished all earlier operations of this stream's window."""
        return self._ports.issue(BARRIER, None, None, stream, priority, name, timeout_s, call_site)

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
        """Send an array or a tree of arrays to one rank; done when the array may be written again.

        That is sometimes before the receiver has issued its `recv`, and sometimes only after: two ranks that both await
        a send to each other before they receive may wait for ever. Issue both, then await them.

        Matched with `recv` by (source, destination, tag), first come first served. Point-to-point operations do not
        take room in the stream's window, so their order across peers and tags does not matter.

        Example:
            rank.send({"w": w, "b": b}, dst=1)

        Args:
            x: An array of any shape; or a dict, list or tuple of arrays, at any depth, which is copied at the call; or
                a future of either. Leaves may be futures.
            dst: Group rank of the receiver.
            tag: From 0 to 2**24 - 1.

        Returns:
            A future of None.

        Raises:
            UsageError: At the call (for a future, at the await): such an `x`, `dst` or `tag` cannot be sent.
            CollectiveMismatchError: At the await: the receiver's `like` has another shape, dtype or form.
        """
        return self._messages.send(x, dst, tag, stream, priority, name, timeout_s, call_site)

    @overload
    def recv(
        self, like: tuple[Shape, DTypeOf[S]], src: int | None = ..., tag: int = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def recv(
        self, like: Like, src: int | None = ..., tag: int = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def recv(
        self, like: Mapping[str, Like], src: int | None = ..., tag: int = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[dict[str, Array]]: ...

    @overload
    def recv(
        self, like: Out, src: int | None = ..., tag: int = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[Out]: ...

    @overload
    def recv(
        self, like: Arrays, src: int | None = ..., tag: int = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[Arrays]: ...

    # Any: only the sender knows whether an array or a tree comes, and `object` would make every caller cast.
    @overload
    def recv(
        self, like: None = ..., src: int | None = ..., tag: int = ..., **options: Unpack[Options]
    ) -> CollectiveFuture[Any]: ...

    def recv(
        self,
        like: Output | Like | Tree | None = None,
        src: int | None = None,
        tag: int = 0,
        *,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> CollectiveFuture[Any]:
        """Receive an array or a tree of arrays from one rank, or from any rank.

        Without `like`, the receiver gets the sender's arrays in new memory. Each message has its
        shape and dtype with it, so that costs no message.

        With `src=None`, the message that was sent first is taken, of all ranks of the group; the future's `src` is its
        sender. It goes to the oldest such receive of its tag, and must fit its `like`. Receives that name a rank go
        before those that do not.

        A message of another process counts from its arrival here, by whatever wire; a message of this process from its
        send, once the message before it has been received.

        Example:
            layer = await rank.recv(src=0)  # a dict, if rank 0 sent one
            w = await rank.recv(like=w, src=0)  # into an existing array

        Args:
            like: A writable array, which is filled and returned, and belongs to the operation until then;
                `(shape, dtype)` for a new array; a dict, list or tuple of either, at any depth; None for the shape and
                dtype of the sender. A named tuple comes as a tuple unless `like` has one, as classes do not travel.
            src: Group rank of the sender; None for any.
            tag: From 0 to 2**24 - 1.

        Returns:
            A future of the array or tree.

        Raises:
            UsageError: At the call: such a `like`, `src` or `tag` cannot be received.
            CollectiveMismatchError: At the await: the sender's array or tree has another shape, dtype or form.
            PeerFailedError: At the await: the sender failed.
        """
        return self._messages.receive(like, src, tag, stream, priority, name, timeout_s, call_site)
