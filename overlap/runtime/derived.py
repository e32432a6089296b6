"""Futures derived from the results of other futures, and values that hold futures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from ..errors import UsageError
from .future import Failure, Future, call_when_done, conclude, is_elsewhere, outcome, source_of

T_co = TypeVar("T_co", covariant=True)


class Derived(Future[T_co]):
    """The future of `make(results)` of some operations that have not been issued yet.

    Args:
        parts: The operations.
        make: Makes the result of theirs; called once, on the event loop's thread.
        thread: Of the event loop.
        label: Its name in messages; by default as the first of the parts.
    """

    __slots__ = ("_label", "_left", "_make", "_parts", "_thread")

    def __init__(
        self, parts: Sequence[Future[Any]], make: Callable[[list[Any]], T_co], thread: int, label: str = ""
    ) -> None:
        super().__init__()
        self._parts, self._make, self._thread, self._label = list(parts), make, thread, label
        self._left = len(self._parts)
        for part in self._parts:
            call_when_done(part, self._part_done)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self._label or self._parts[0].label

    def _loop_thread(self) -> int | None:
        return self._thread

    def _part_done(self) -> None:
        self._left -= 1
        if self._left:
            return
        failures = [failure for part in self._parts if (failure := outcome(part)[1]) is not None]
        value, failure = None, failures[0] if failures else None
        for other in failures[1:]:
            other.note_seen()  # this future has the first failure
        if failure is None:
            try:
                value = self._make([outcome(part)[0] for part in self._parts])
            except Exception as error:  # the failure of this future
                failure = Failure(error)
        conclude(self, value, failure)


class Resolved(Future[object]):
    """The future of a tree some of whose leaves are futures. It fails as soon as one of them does.

    Args:
        tree: The tree.
        leaves: The futures in it.
        thread: Of the event loop.
    """

    __slots__ = ("_leaves", "_left", "_thread", "_tree")

    def __init__(self, tree: object, leaves: Sequence[Future[object]], thread: int) -> None:
        super().__init__()
        self._tree, self._leaves, self._thread, self._left = tree, leaves, thread, len(leaves)

    def begin(self) -> None:
        """Wait for the leaves; the loop's thread only."""
        for leaf in self._leaves:
            call_when_done(leaf, partial(self._leaf_done, leaf))

    def _loop_thread(self) -> int | None:
        return self._thread

    def _leaf_done(self, leaf: Future[object]) -> None:
        self._left -= 1
        value, failure = None, outcome(leaf)[1]
        if failure is None:
            if self._left:
                return
            value, failure = resolve(self._tree)
        if conclude(self, value, failure):
            self._tree, self._leaves = None, ()


def check_here(x: Future[Any], thread: int) -> None:
    """Raise `UsageError` if a future belongs to a world on another event loop than that of a thread."""
    if is_elsewhere(x, thread):
        raise UsageError(f"x: {x.label} belongs to another world; pass its result")


def resolve(value: object) -> tuple[object, Failure | None]:
    """Return the outcome of `value`, looking into futures (settled) and into tuples, lists and dicts that hold some."""
    if isinstance(value, Future):
        return outcome(value)
    if not isinstance(value, (tuple, list, dict)) or not any(map(_holds_future, _items(value))):
        return value, None
    resolved = [resolve(item) for item in _items(value)]
    for _, failure in resolved:
        if failure is not None:
            return None, failure
    plain: list[Any] = [item for item, _ in resolved]
    if isinstance(value, dict):
        return dict(zip(value, plain, strict=True)), None
    rebuild = type(value)
    return (rebuild(*plain) if hasattr(value, "_fields") else rebuild(plain)), None  # named tuples take their fields


def sources(value: object) -> Iterator[Future[object]]:
    """Yield the futures of the operations whose results `value` holds, as `resolve` finds them."""
    if isinstance(value, Future):
        yield source_of(value)
        return
    for item in _items(value):
        yield from sources(item)


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) else []


def _holds_future(value: object) -> bool:
    return isinstance(value, Future) or any(map(_holds_future, _items(value)))
