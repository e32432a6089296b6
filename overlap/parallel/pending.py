"""Trees of arrays of which any part may still be a future: a leaf, a branch, or the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from ..runtime.future import Future
from .memory_work import MemoryWork

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    Path: TypeAlias = tuple[str | int, ...]


def leaves(tree: object) -> dict[str, Path]:
    """Return where the leaves of a tree are, by name; names are those of `flatten`, and futures are leaves."""
    return {".".join(map(str, path)): path for path in _paths(tree, ())}


def pick(tree: object, path: Path) -> object:
    """Return what is at a place of a tree; a future of it, if a future is on the way."""
    for key in path:
        tree = cast("Mapping[str | int, object]", tree)[key]
    return tree


def last_future(tree: object) -> Future[object] | None:
    """Return the last future in a tree; None if there is none."""
    futures = [leaf for path in _paths(tree, ()) if isinstance(leaf := pick(tree, path), Future)]
    return futures[-1] if futures else None


def add_up(work: MemoryWork, like: object, trees: Sequence[object]) -> object:
    """Return the sum of trees of one form, in their order; of one tree, the tree itself.

    Args:
        work: Who issues it.
        like: A tree of that form, for its size: what the virtual clock has it take.
        trees: At least one.
    """
    if len(trees) == 1:
        return trees[0]
    moved_bytes = (len(trees) + 1) * _nbytes(like)
    return work.compute(total, list(trees), name="add gradients", moved_bytes=moved_bytes)


def total(trees: Sequence[object]) -> object:
    """Return the sum of trees of arrays, in their order, as new arrays; arrays without data stay so."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: total([pick(tree, (key,)) for tree in trees]) for key in first}
    if isinstance(first, (list, tuple)):
        return [total([pick(tree, (index,)) for tree in trees]) for index in range(len(first))]
    return _added(cast("Sequence[Array]", trees))


class RunningSum:
    """The sum of trees of one form that come one after the other, such as gradients of microbatches.

    What was given is left as it is; from the third on, nothing new is allocated.

    Args:
        work: Who issues the additions.
        like: A tree of that form, for its size: what the virtual clock has an addition take.
    """

    def __init__(self, work: MemoryWork, like: object) -> None:
        self._work, self._moved_bytes = work, 3 * _nbytes(like)
        self._first: object = None
        self._own: object = None
        self._newest: object = None

    def add(self, tree: object) -> object:
        """Issue the addition of a tree, or of a future of one; return the sum so far, or a future of it."""
        if self._newest is None:
            self._first = self._newest = tree
        else:
            first, self._first = self._first, None
            self._newest = self._work.compute(
                self._add, first, tree, name="add gradients", moved_bytes=self._moved_bytes
            )
        return self._newest

    def _add(self, first: object, tree: object) -> object:
        if first is not None:
            self._own = total([first, tree])
        else:
            _add_into(self._own, tree)
        return self._own


def _add_into(own: object, tree: object) -> None:
    if isinstance(own, (Mapping, list)):
        for key in own if isinstance(own, Mapping) else range(len(own)):
            _add_into(own[key], pick(tree, (key,)))
    elif not has_no_data(cast("Array", own)):
        own += tree  # type: ignore[operator]


def filled(like: object, values: Mapping[str, object]) -> object:
    """Return a tree of the form of `like` with other leaves, by the names that `leaves` gives them."""
    return _filled(like, values, ())


def _filled(like: object, values: Mapping[str, object], above: Path) -> object:
    if isinstance(like, Mapping):
        return {key: _filled(branch, values, (*above, key)) for key, branch in like.items()}
    if isinstance(like, (list, tuple)):
        return [_filled(branch, values, (*above, index)) for index, branch in enumerate(like)]
    return values[".".join(map(str, above))]


def _added(arrays: Sequence[Array]) -> Array:
    if has_no_data(arrays[0]):
        return arrays[0]
    out = arrays[0] + arrays[1]
    for each in arrays[2:]:
        out += each
    return out


def has_no_data(array: Array) -> bool:
    """Whether an array has one element for all its places, as those of simulations without data."""
    return array.size > 1 and not any(array.strides)


def _paths(tree: object, above: Path) -> Iterator[Path]:
    if isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from _paths(branch, (*above, key))
    elif isinstance(tree, (list, tuple)):
        for index, branch in enumerate(tree):
            yield from _paths(branch, (*above, index))
    else:
        yield above


def _nbytes(tree: object) -> int:
    """Count the bytes of the arrays of a tree that are there."""
    found = (pick(tree, path) for path in _paths(tree, ()))
    there = (each.result() if isinstance(each, Future) and each.done else each for each in found)
    return sum(int(getattr(each, "nbytes", 0)) for each in there)
