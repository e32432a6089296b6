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
    """Operations on Python objects."""

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
            value: Any object that can be packed; it may differ in size between ranks.
            pickle: Whether to pickle it; see `GroupCalls`.
        """
        from ..objects import gather  # and with it msgpack, which few programs need

        name = "all_gather_object" if name is None else name
        return gather(self._ports, ALL_GATHER, value, 0, pickle, stream, priority, name, timeout_s, call_site)

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
        """Give the root the objects of all ranks, as a list in rank order; the others get None.

        Args:
            value: Any object that can be packed.
            root: Group rank that gets them.
            pickle: Whether to pickle it; see `GroupCalls`.
        """
        from ..objects import gather

        name = "gather_object" if name is None else name
        return gather(self._ports, GATHER, value, root, pickle, stream, priority, name, timeout_s, call_site)

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
            value: On the root, any object that can be packed; ignored elsewhere.
            root: Group rank of the sender.
            pickle: Whether to pickle it; see `GroupCalls`.
        """
        from ..objects import give

        name = "broadcast_object" if name is None else name
        return give(self._ports, BROADCAST, value, root, pickle, stream, priority, name, timeout_s, call_site)

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
            values: On the root, as many objects as there are ranks; ignored elsewhere.
            root: Group rank of the sender.
            pickle: Whether to pickle them; see `GroupCalls`.
        """
        from ..objects import give

        name = "scatter_object" if name is None else name
        return give(self._ports, SCATTER, values, root, pickle, stream, priority, name, timeout_s, call_site)
