"""The collectives with a root, as users call them: what one rank gives to all, or gets from all."""

from __future__ import annotations

from sys import _getframe
from typing import cast

from ..collectives.kinds import Collective
from ..collectives.reduce import Array
from .issuing import Issuer
from .operation import CollectiveFuture
from .outstanding import CallSite
from .request import Input
from .stream import Stream


class Rooted:
    """The rooted ones of `Calls`."""

    _issuer: Issuer

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
            CollectiveFuture(
                Collective.BROADCAST,
                x,
                out,
                _getframe(1) if call_site is None else call_site,
                priority,
                name,
                None,
                root,
                algorithm,
                None,
                False,
                shared,
            ),
            stream,
            timeout_s,
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
        return cast(
            "CollectiveFuture[Array | None]",
            self._issuer.issue(
                CollectiveFuture(
                    Collective.REDUCE,
                    x,
                    out,
                    _getframe(1) if call_site is None else call_site,
                    priority,
                    name,
                    op,
                    root,
                    algorithm,
                ),
                stream,
                timeout_s,
            ),
        )

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
        return cast(
            "CollectiveFuture[Array | None]",
            self._issuer.issue(
                CollectiveFuture(
                    Collective.GATHER,
                    x,
                    out,
                    _getframe(1) if call_site is None else call_site,
                    priority,
                    name,
                    None,
                    root,
                    algorithm,
                ),
                stream,
                timeout_s,
            ),
        )

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
        return self._issuer.issue(
            CollectiveFuture(
                Collective.SCATTER,
                x,
                out,
                _getframe(1) if call_site is None else call_site,
                priority,
                name,
                None,
                root,
                algorithm,
            ),
            stream,
            timeout_s,
        )
