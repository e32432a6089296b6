"""Methods for collectives of Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...collectives.kinds import ALL_GATHER, BROADCAST, GATHER, SCATTER
from ...hints import hide_class_name
from ..future import Future
from .issues import Issues

if TYPE_CHECKING:
    from ..outstanding import CallSite
    from ..stream import Stream
    from .shapes import V


@hide_class_name
class Objects(Issues):
    """Operations on Python objects.

    Each method returns the future of its result at once. `GroupCalls` describes the arguments that all methods share.
    """

    def all_gather_object(
        self,
        value: V,
        *,
        pickle: bool = False,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> Future[list[V]]:
        """Give every rank the objects of all ranks, as a list in rank order.

        Args:
            value: This rank's object; see `GroupCalls` for the types that can travel. Sizes may differ between ranks.
            pickle: Whether to send pickles; see `GroupCalls`.

        Other arguments, and errors: see `GroupCalls`.
        """
        from ..objects import gather_objects  # not at the top: loads msgpack, which few programs need

        name = "all_gather_object" if name is None else name
        return gather_objects(self._ports, ALL_GATHER, value, 0, pickle, stream, priority, name, timeout_s, call_site)

    def gather_object(
        self,
        value: V,
        root: int = 0,
        *,
        pickle: bool = False,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> Future[list[V] | None]:
        """Give the root the objects of all ranks, as a list in rank order; the other ranks get None.

        Args:
            value: This rank's object; see `GroupCalls` for the types that can travel.
            root: Group rank that gets the objects.
            pickle: Whether to send pickles; see `GroupCalls`.

        Other arguments, and errors: see `GroupCalls`.
        """
        from ..objects import gather_objects

        name = "gather_object" if name is None else name
        return gather_objects(self._ports, GATHER, value, root, pickle, stream, priority, name, timeout_s, call_site)

    def broadcast_object(
        self,
        value: V | None = None,
        root: int = 0,
        *,
        pickle: bool = False,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> Future[V]:
        """Give every rank the root's object.

        Args:
            value: On the root, the object; see `GroupCalls` for the types that can travel. Ignored on other ranks.
            root: Group rank of the sender.
            pickle: Whether to send pickles; see `GroupCalls`.

        Other arguments, and errors: see `GroupCalls`.
        """
        from ..objects import send_objects

        name = "broadcast_object" if name is None else name
        return send_objects(self._ports, BROADCAST, value, root, pickle, stream, priority, name, timeout_s, call_site)

    def scatter_object(
        self,
        values: Sequence[V] | None = None,
        root: int = 0,
        *,
        pickle: bool = False,
        priority: int = 0,
        stream: Stream | str | None = None,
        name: str | None = None,
        timeout_s: float | None = None,
        call_site: CallSite | None = None,
    ) -> Future[V]:
        """Give rank i object i of the root's list.

        Args:
            values: On the root, one object for each rank of the group, in rank order. Ignored on other ranks.
            root: Group rank of the sender.
            pickle: Whether to send pickles; see `GroupCalls`.

        Other arguments, and errors: see `GroupCalls`.
        """
        from ..objects import send_objects

        name = "scatter_object" if name is None else name
        return send_objects(self._ports, SCATTER, values, root, pickle, stream, priority, name, timeout_s, call_site)
