"""Futures whose results are made from those of other futures, and values with futures inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UsageError
from .callbacks import call_when_done
from .failure import Failure
from .future import Future, Item, belongs_to_other_world, take_outcome
from .settling import settle_and_deliver

if TYPE_CHECKING:
    from .context import RankContext

T_co = TypeVar("T_co", covariant=True)


class Derived(Future[T_co]):
    """Future of `make(results)`, with the results of other futures. It fails as soon as one of them does.

    Args:
        parts: The other futures.
        make: Called once with the list of the parts' results, on the event loop's thread; an error becomes the failure.
        label: Name in messages; by default the name of the first part.
        context: Context of the rank.
    """

    context: RankContext
    _parts: Sequence[Future[Any]]
    _make: Callable[[list[Any]], T_co]
    _label: str
    _remaining: int
    __slots__ = tuple(__annotations__)

    def __init__(
        self, parts: Sequence[Future[Any]], make: Callable[[list[Any]], T_co], context: RankContext, label: str = ""
    ) -> None:
        super().__init__()
        self._parts, self._make, self.context, self._label = parts, make, context, label
        self._remaining = len(parts)

    def watch_parts(self) -> Derived[T_co]:
        """Register a callback on each part, and return this future, which nothing else may know yet.

        If several parts have been issued already, only the loop's thread may call this.
        """
        for part in self._parts:
            call_when_done(part, partial(self._on_part_done, part))
        return self

    @property
    def label(self) -> str:
        """Name of the future in messages."""
        return self._label or self._parts[0].label

    def _on_part_done(self, part: Future[Any]) -> None:
        """End this future at once if the part has failed; after the last part, make its result."""
        self._remaining -= 1
        value, failure = None, take_outcome(part)[1]
        if failure is None:
            if self._remaining or self.done:
                return
            try:
                value = self._make([take_outcome(part)[0] for part in self._parts])
            except Exception as error:  # the failure of this future
                failure = Failure(error)
        if settle_and_deliver(self, value, failure):
            self._label, self._parts = self.label, ()
            del self._make


class Checked(Item):
    """Future of another future's result, which fails if `check(result)` raises.

    Args:
        whole: The other future.
        check: Called at each look at the outcome, in any thread, with the result; what it returns does not matter.
    """

    __slots__ = ("_check",)

    def __init__(self, whole: Future[object], check: Callable[[Any], object]) -> None:
        super().__init__(whole, None)
        self._check = check

    @property
    def label(self) -> str:
        """Name of the other future."""
        return self._whole.label

    def _outcome(self) -> tuple[object, Failure | None]:
        """Return the outcome of the other future, or None and the failure of the check."""
        value, failure = self._whole._outcome()
        if failure is None:
            try:
                self._check(value)
            except Exception as error:
                return None, Failure(error)
        return value, failure


def check_same_world(x: Future[Any], thread: int) -> None:
    """Raise `UsageError` if a future belongs to a world on another thread's event loop."""
    if belongs_to_other_world(x, thread):
        advice = "call `await trio.to_thread.run_sync(future.result)`, and pass the value"
        raise UsageError(f"x: {x.label} belongs to another world; {advice}")


def replace_futures(value: object) -> tuple[object, Failure | None]:
    """Replace the futures in a value, at any depth of tuples, lists and dicts, by their results.

    All futures must have ended. Their results count as used by the program from now on.

    Returns:
        The new value and None; if a future has failed, None and the first failure.
    """
    if isinstance(value, Future):
        return take_outcome(value)
    if not isinstance(value, (tuple, list, dict)) or next(futures_in(value), None) is None:
        return value, None
    resolved = [replace_futures(item) for item in _items(value)]
    for _, failure in resolved:
        if failure is not None:
            return None, failure
    plain: list[Any] = [item for item, _ in resolved]
    if isinstance(value, dict):
        return dict(zip(value, plain, strict=True)), None
    rebuild = type(value)
    return (rebuild(*plain) if hasattr(value, "_fields") else rebuild(plain)), None  # named tuples take their fields


def futures_in(value: object) -> Iterator[Future[Any]]:
    """Yield the futures in a value, at any depth of tuples, lists and dicts."""
    if isinstance(value, Future):
        yield value
        return
    for item in _items(value):
        yield from futures_in(item)


def _items(value: object) -> list[object]:
    """Return the items of a list or tuple, or the values of a dict; [] for anything else."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) else []
