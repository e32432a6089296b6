"""Trees of arrays of which any part may still be a future: a leaf, a branch, or the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from ..runtime.future import Future
from ..runtime.rank import Rank

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    Path: TypeAlias = tuple[str | int, ...]

__all__ = ["add_up", "filled", "has_no_data", "leaves", "pick", "total"]


def leaves(tree: object) -> dict[str, Path]:
    """Return where the leaves of a tree are, by name; names are those of `flatten`, and futures are leaves."""
    return {".".join(map(str, path)): path for path in _paths(tree, ())}


def pick(tree: object, path: Path) -> object:
    """Return what is at a place of a tree; a future of it, if a future is on the way."""
    for key in path:
        tree = cast("Mapping[str | int, object]", tree)[key]
    return tree


def add_up(rank: Rank, like: object, trees: Sequence[object], *, name: str = "add gradients") -> object:
    """Return the sum of trees of one form, in their order; of one tree, the tree itself.

    Args:
        rank: Whose compute stream does it.
        like: A tree of that form, for its size: what the virtual clock has it take.
        trees: At least one.
        name: For the timeline.
    """
    if len(trees) == 1:
        return trees[0]
    moved = (len(trees) + 1) * _nbytes(like)
    return rank.compute(total, list(trees), name=name, bytes_moved=moved)


def total(trees: Sequence[object]) -> object:
    """Return the sum of trees of arrays, in their order, as new arrays; arrays without data stay so."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: total([pick(tree, (key,)) for tree in trees]) for key in first}
    if isinstance(first, (list, tuple)):
        return [total([pick(tree, (index,)) for tree in trees]) for index in range(len(first))]
    return _added(cast("Sequence[Array]", trees))


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
