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
        AlgorithmOptions,
        AllToAllOptions,
        ArrayOf,
        Arrays,
        DTypeOf,
        Input,
        Like,
        Memory,
        Numbers,
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
    """Operations between pairs of ranks, and the barrier.

    Each method returns the future of its result at once. `GroupCalls` describes the arguments that all methods share.
    """

    @overload
    def all_to_all(
        self, x: ArrayOf[S], out: None = ..., **options: Unpack[AllToAllOptions]
    ) -> CollectiveFuture[NDArray[S]]: ...

    @overload
    def all_to_all(
        self, x: Numbers | Memory, out: None = ..., **options: Unpack[AllToAllOptions]
    ) -> CollectiveFuture[Array]: ...

    @overload
    def all_to_all(
        self, x: Mapping[str, Future[V]], out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[dict[str, V]]: ...

    @overload
    def all_to_all(
        self, x: Sequence[Future[V]], out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Sequence[V]]: ...

    @overload
    def all_to_all(
        self, x: Arrays | Future[Arrays], out: None = ..., **options: Unpack[AlgorithmOptions]
    ) -> CollectiveFuture[Arrays]: ...

    @overload
    def all_to_all(
        self, x: SingleInput, out: Out | None = ..., **options: Unpack[AllToAllOptions]
    ) -> CollectiveFuture[Out]: ...

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
            x: Array whose axis 0 is divisible by the size of the group; with `counts`, it has `sum(counts[rank])` rows.
            out: Array for the result, with the shape of `x`; with `counts`, its rows are the sum of column `rank` of
                `counts`. May not overlap `x`.
            counts: Table in which `counts[i][j]` is the number of rows from rank i to rank j, the same on all ranks.
                By default all blocks have equally many rows.

        Other arguments, and errors: see `GroupCalls`.

        Cost over p ranks: one step, (p-1)/p of the array sent by each rank.
        """
        return self._ports.issue(
            ALL_TO_ALL, x, out, stream, priority, name, timeout_s, call_site, algorithm, counts=counts
        )

    @overload
    def permute(
        self, x: ArrayOf[S], pairs: Sequence[tuple[int, int]], out: None = ..., **options: Unpack[Options]
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
            x: Array of any shape, the same shape on all ranks.
            pairs: (source, destination) group ranks, the same list on all ranks. A rank may be a source once, and a
                destination once.
            out: Array for the result, with the shape of `x`; may not overlap `x`.

        Other arguments, and errors: see `GroupCalls`.
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
        """Return a future that is done when every rank has issued the barrier and finished earlier operations.

        Operations count that the rank issued before on the same stream and that are in the stream's window.

        Arguments and errors: see `GroupCalls`.
        """
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
        """Send an array or a tree of arrays to one rank. The future is done when the array may be written again.

        That may be before or only after the receiver has issued its `recv`. So two ranks that each await a send to the
        other before they receive may wait for ever: issue the send and the receive, then await both.

        A send meets the `recv` with the same source, destination and tag; of several, the oldest. Sends and receives do
        not count in the stream's window, so their order across peers and tags does not matter.

        Example:
            rank.send({"w": w, "b": b}, dst=1)

        Args:
            x: An array of any shape; or a dict, list or tuple of arrays, at any depth, which is copied at the call; or
                a future of either. Leaves may be futures.
            dst: Group rank of the receiver.
            tag: Number that the `recv` must have, too, from 0 to 2**24 - 1.

        Other arguments, and errors: see `GroupCalls`.

        Returns:
            A future of None.

        Raises:
            UsageError: At the call (for a future, at the await): `x`, `dst` or `tag` is invalid.
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

    # Any: only the sender knows whether it sends an array or a tree, and `object` would make every caller cast.
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

        Without `like`, the receiver gets the sender's arrays in new memory. This takes no further message, because each
        message contains its shape and dtype.

        With `src=None`, the receive takes the oldest message of any rank of the group. The future's `src` is then the
        sender. If several receives have this tag, a receive that names the sender gets the message first, then the
        oldest receive with `src=None`. The message must fit the `like` of the receive that gets it.

        The age of a message from another process begins with its arrival here, over any wire. The age of a message of
        this process begins with its send, or with the receive of the previous message on the same route if that is
        later.

        Example:
            layer = await rank.recv(src=0)  # a dict, if rank 0 sent one
            w = await rank.recv(like=w, src=0)  # into an existing array

        Args:
            like: A writable array, which is filled and becomes the result; it belongs to the operation until then. Or
                `(shape, dtype)` for a new array; or a dict, list or tuple of either, at any depth. None: as the sender
                has it. Classes do not travel, so a named tuple arrives as a tuple unless `like` has one.
            src: Group rank of the sender; None: any rank.
            tag: Number that the `send` must have, too, from 0 to 2**24 - 1.

        Other arguments, and errors: see `GroupCalls`.

        Returns:
            A future of the array or tree.

        Raises:
            UsageError: At the call: `like`, `src` or `tag` is invalid.
            CollectiveMismatchError: At the await: the sender's array or tree has another shape, dtype or form.
            PeerFailedError: At the await: the sender failed.
        """
        return self._messages.receive(like, src, tag, stream, priority, name, timeout_s, call_site)
