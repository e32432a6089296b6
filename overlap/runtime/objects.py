"""The collectives of Python objects, as users call them. Each is one or two operations, issued at the call."""

from __future__ import annotations

from collections.abc import Sequence
from sys import _getframe
from types import FrameType
from typing import Any, cast

import numpy as np

from ..collectives.kinds import Collective
from ..collectives.reduce import Array
from ..errors import UsageError
from .derived import Derived
from .future import Future
from .issuing import Issuer
from .operation import CollectiveFuture
from .outstanding import CallSite
from .stream import Stream

_HEADER = np.dtype(np.int64).itemsize  # of each object: how many bytes follow


class Objects:
    """The ones of objects of `Calls`.

    Objects travel as msgpack: None, bool, numbers, texts, bytes, numpy arrays, and lists, tuples and dicts of these.
    With `pickle=True`, on all ranks, they are pickled: anything goes, and whoever is a rank can make every other rank
    do anything, so all must be trusted, which they are where only this job knows its secret.
    """

    _issuer: Issuer

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
            pickle: Whether to pickle it; see above.
        """
        how = _how(call_site, _getframe(1), priority, name, "all_gather_object", stream, timeout_s)
        return cast("Future[list[Any]]", self._gathered(Collective.ALL_GATHER, value, 0, pickle, *how))

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
            pickle: Whether to pickle it; see above.
        """
        how = _how(call_site, _getframe(1), priority, name, "gather_object", stream, timeout_s)
        return self._gathered(Collective.GATHER, value, root, pickle, *how)

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
            pickle: Whether to pickle it; see above.
        """
        how = _how(call_site, _getframe(1), priority, name, "broadcast_object", stream, timeout_s)
        mine = _rows([_packed(value, pickle)]) if self._issuer.is_rank(root) else None
        return self._one(Collective.BROADCAST, mine, root, pickle, *how)

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
            pickle: Whether to pickle them; see above.
        """
        how = _how(call_site, _getframe(1), priority, name, "scatter_object", stream, timeout_s)
        mine = None
        if self._issuer.is_rank(root):
            self._issuer.check_count("values", values)
            mine = _rows([_packed(value, pickle) for value in values or ()])
        return self._one(Collective.SCATTER, mine, root, pickle, *how)

    def _one(
        self,
        kind: Collective,
        mine: Array | None,
        root: int,
        pickled: bool,
        caller: CallSite,
        priority: int,
        name: str,
        stream: Stream | str | None,
        timeout_s: float | None,
    ) -> Future[Any]:
        """Send what only the root has: with it goes its size."""
        sent: CollectiveFuture[Array] = CollectiveFuture(kind, mine, None, caller, priority, name, None, root)
        found = Derived([sent], lambda got: _objects(got[0], 1, pickled)[0], self._issuer.thread)
        self._issuer.issue(sent, stream, timeout_s)
        return found

    def _gathered(
        self,
        kind: Collective,
        value: object,
        root: int,
        pickled: bool,
        caller: CallSite,
        priority: int,
        name: str,
        stream: Stream | str | None,
        timeout_s: float | None,
    ) -> Future[list[Any] | None]:
        """Agree on the size of the largest, then gather as much of each."""
        issuer, mine = self._issuer, _packed(value, pickled)
        longest: CollectiveFuture[Array] = CollectiveFuture(
            Collective.ALL_REDUCE, np.array([len(mine)]), None, caller, priority, f"{name}: size", "max"
        )
        padded = Derived([longest], lambda got: _rows([mine], int(got[0][0])), issuer.thread)
        sent: CollectiveFuture[Array] = CollectiveFuture(kind, padded, None, caller, priority, name, None, root)
        found = Derived([sent], lambda got: _objects(got[0], issuer.size, pickled), issuer.thread)
        issuer.check_rank("root", root)
        issuer.issue(longest, stream, timeout_s)
        issuer.issue(sent, stream, timeout_s)
        return found


def _how(
    call_site: CallSite | None,
    caller: FrameType,
    priority: int,
    name: str | None,
    otherwise: str,
    stream: Stream | str | None,
    timeout_s: float | None,
) -> tuple[CallSite, int, str, Stream | str | None, float | None]:
    """Return how the operations of a call are issued, as `_gathered` and `_one` take it."""
    return caller if call_site is None else call_site, priority, otherwise if name is None else name, stream, timeout_s


def _packed(value: object, pickled: bool) -> bytes:
    from .object_codec import pack  # few programs need it

    return pack(value, pickled=pickled)


def _rows(packed: Sequence[bytes], longest: int = 0) -> Array:
    """Return objects in rows of one length, each with its own length in front, one after the other."""
    longest = max(longest, *map(len, packed))
    rows = np.zeros((len(packed), _HEADER + longest), np.uint8)
    for row, data in zip(rows, packed, strict=True):
        row[:_HEADER] = np.array([len(data)], np.int64).view(np.uint8)
        row[_HEADER : _HEADER + len(data)] = np.frombuffer(data, np.uint8)
    return rows.reshape(-1)


def _objects(rows: Array | None, count: int, pickled: bool) -> Any:
    if rows is None:  # not the root
        return None
    if rows.strides == (0,) and rows.size > 1:
        raise UsageError("value: where arrays have no data, objects have none either")
    from .object_codec import unpack

    table = rows.reshape(count, -1)
    lengths = table[:, :_HEADER].copy().view(np.int64)[:, 0].tolist()
    return [
        unpack(row[_HEADER : _HEADER + length].tobytes(), pickled=pickled)
        for row, length in zip(table, lengths, strict=True)
    ]
