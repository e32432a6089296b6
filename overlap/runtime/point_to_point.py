"""Point-to-point messages as users call them."""

from __future__ import annotations

from sys import _getframe
from typing import cast

from ..collectives.kinds import Collective
from ..collectives.reduce import Array
from .issuing import Issuer
from .operation import CollectiveFuture
from .outstanding import CallSite, Issued
from .request import Input, Like
from .stream import Stream


class PointToPoint:
    """The messages of `Calls`."""

    _issuer: Issuer

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
        return cast(
            "CollectiveFuture[None]",
            self._issuer.send(
                CollectiveFuture(
                    Collective.P2P,
                    x,
                    None,
                    _getframe(1) if call_site is None else call_site,
                    priority,
                    "send" if name is None else name,
                ),
                dst,
                tag,
                stream,
                timeout_s,
            ),
        )

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
        """Receive an array from one rank, or from whoever sends one.

        With `src=None`, the message that was sent first is taken, of all ranks of the group; the future's `src` says
        whose it was. Receives that name a rank go before those that do not.

        Args:
            like: A writable array, which is filled and returned, or `(shape, dtype)` for a new one.
            src: Group rank of the sender; None for any.
            tag: From 0 to 2**24 - 1.
        """
        return self._issuer.receive(
            CollectiveFuture(
                Collective.P2P,
                None,
                None,
                _getframe(1) if call_site is None else call_site,
                priority,
                "recv" if name is None else name,
            ),
            like,
            src,
            tag,
            stream,
            timeout_s,
        )
