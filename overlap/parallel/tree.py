"""Trees of parameters: nested dicts, lists and tuples of arrays, each with a name such as "blocks.0.weight".

In trees of outputs and gradients any part may still be a future: a leaf, a branch, or the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from ..errors import UsageError
from ..runtime.derived import Checked, futures_in
from ..runtime.future import Future
from ..runtime.trees import sequence_like
from ..timeline.recording import call_site
from .memory_work import MemoryWork
from .returned import describe

if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

    from numpy.typing import NDArray
    from typing_extensions import TypeVar  # only here: a type checker brings it along
else:
    from typing import TypeVar

Array: TypeAlias = "NDArray[Any]"
Tree: TypeAlias = "Mapping[str, Tree] | Mapping[str, Array] | list[Tree] | list[Array] | tuple[Tree, ...] | Array"
if TYPE_CHECKING:
    Params = TypeVar("Params", bound=Tree, covariant=True, default=Tree)
else:  # Python 3.11 knows no defaults
    Params = TypeVar("Params", covariant=True)
"""The parameters of a model, as given: its weights come back in that form."""

Site: TypeAlias = "tuple[CodeType, int]"
"""A line of a program."""

Path: TypeAlias = "tuple[str | int, ...]"
"""Keys and indices on the way from a tree to a leaf."""


def flatten(params: object) -> dict[str, Array]:
    """Return the arrays of a tree by name, in its order: keys and indices on the way to an array, joined by ".".

    >>> list(flatten({"embed": np.zeros(2), "blocks": [{"w": np.zeros(3)}, {"w": np.zeros(3)}]}))
    ['embed', 'blocks.0.w', 'blocks.1.w']

    Raises:
        UsageError: If it is no tree of arrays of floats or complex numbers, is empty, or gives two arrays one name.
    """
    if not isinstance(params, (Mapping, list, tuple)):
        raise UsageError(f"params: expected a dict, list or tuple of arrays, got {type(params).__name__}")
    arrays: dict[str, Array] = {}
    for path in _leaf_paths(params, ()):
        name, leaf = _join_path(path), pick(params, path)
        if not isinstance(leaf, np.ndarray):
            raise UsageError(
                f"params: {name!r} is of type {type(leaf).__name__}; every leaf must be a numpy array"
                f"{'; leave out what has no weights' if leaf is None else ''}"
            )
        if leaf.dtype.kind in "biuOSUMm":
            raise UsageError(
                f"params: {name!r} is {leaf.dtype}; a gradient is a mean, so parameters are floats or complex numbers: "
                "keep what is not trained out of params"
            )
        if name in arrays:
            raise UsageError(f"params: two arrays are called {name!r}; keys may not contain what makes names equal")
        arrays[name] = leaf
    if not arrays:
        raise UsageError("params: there is no array in it; pass one or more")
    return arrays


def rebuild(like: object, leaves: Mapping[str, object]) -> object:
    """Return a tree of the form of `like` with the values of `leaves`, which are named as `flatten` names arrays.

    Raises:
        UsageError: If a name is missing.
    """
    return _rebuild_branch(like, leaves, ())


def _rebuild_branch(like: object, leaves: Mapping[str, object], path: Path) -> object:
    """Return the branch at `path` of the form of `like`, with leaves by their full names."""
    if not isinstance(like, (Mapping, list, tuple)):
        name = _join_path(path)
        if name not in leaves:
            raise UsageError(f"leaves: {name!r} is missing; expected one for each leaf of the tree")
        return leaves[name]
    parts = {key: _rebuild_branch(value, leaves, (*path, key)) for key, value in _branch_items(like)}
    return parts if isinstance(like, Mapping) else sequence_like(like, list(parts.values()))


def map_leaves(function: Callable[[Any], object], tree: object) -> object:
    """Return the tree with `function` applied to each leaf; sequences become lists."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, branch) for key, branch in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [map_leaves(function, branch) for branch in tree]
    return function(tree)


def leaves(tree: object) -> dict[str, Path]:
    """Return the paths of the leaves of a tree, by name; names are those of `flatten`, and futures are leaves."""
    return {_join_path(path): path for path in _leaf_paths(tree, ())}


def pick(tree: object, path: Path) -> object:
    """Return the leaf or branch at the end of a path; a future of it, if a future is on the way."""
    for key in path:
        tree = cast("Mapping[str | int, object]", tree)[key]
    return tree


def last_future(tree: object) -> Future[object] | None:
    """Return the last future in a tree; None if there is none."""
    return next(reversed(list(futures_in(tree))), None)


def _leaf_paths(tree: object, above: Path) -> Iterator[Path]:
    """Yield the paths of all leaves below a branch, whose own path is `above`."""
    if isinstance(tree, (Mapping, list, tuple)):
        for key, branch in _branch_items(tree):
            yield from _leaf_paths(branch, (*above, key))
    else:
        yield above


def _branch_items(tree: object) -> Iterator[tuple[str | int, object]]:
    """Return keys or indices of a branch, with their values."""
    return iter(tree.items()) if isinstance(tree, Mapping) else enumerate(cast("Sequence[object]", tree))


def _join_path(path: Path) -> str:
    return ".".join(map(str, path))


# -- names -----------------------------------------------------------------------------------------------------------


class Names:
    """The names of parameters and of parts of the tree with all parameters in them.

    Args:
        params: The tree.

    Attributes:
        form: The tree, with the name of each array in its place.
    """

    def __init__(self, params: object) -> None:
        self.form: object = rebuild(params, {name: name for name in flatten(params)})
        self._parts: dict[str, object] = {}
        self._top = [str(key) for key, _ in _branch_items(params)]
        self._index_part(self.form, ())

    def _index_part(self, node: object, path: Path) -> object:
        """Note the names of a branch and of the branches in it; return it as dicts of parameter names."""
        part = node
        if isinstance(node, (Mapping, list, tuple)):
            part = {key: self._index_part(value, (*path, key)) for key, value in _branch_items(node)}
        if path:
            self._parts[_join_path(path)] = part
        return part

    def find(self, name: str, of_leaf: Callable[[str], object]) -> object:
        """Return `of_leaf(name)`; for a part of the tree, a dict of its results for each parameter in the part.

        Raises:
            UsageError: If there is no such part.
        """
        return map_leaves(of_leaf, self._find_part(name))

    def pairs(self, name: str, value: object, site: Site) -> Iterator[tuple[str, object]]:
        """Yield each parameter of a part with its item of `value`, a tree of that form or a future of one.

        Args:
            name: Name of the part.
            value: The tree.
            site: The line that handed it over, for the error of a future.

        Raises:
            UsageError: If there is no such part, or `value` has no such item; where it is used, if it is a future.
        """
        yield from _match_leaves(self._find_part(name), value, name, site)

    def _find_part(self, name: str) -> object:
        """Return the part of the tree of that name: a parameter's name, or dicts of names."""
        if not isinstance(name, str):
            raise UsageError(f"name: expected a string, such as {next(iter(self._parts))!r}, got {name!r}")
        part = self._parts.get(name)
        if part is None:
            raise UsageError(f"name: {name!r} is no parameter; known are {', '.join(self._top)}")
        return part


def _match_leaves(part: object, value: object, name: str, site: Site) -> Iterator[tuple[str, object]]:
    """Yield each parameter of a part with its item of `value`, a tree of the same form or a future of one."""
    if isinstance(part, str):
        yield part, value
        return
    branches = cast("dict[str | int, object]", part)
    if isinstance(value, Future):
        value = Checked(value, partial(_check_items, branches, name, site))
    else:
        _check_items(branches, name, None, value)
    for key, inner in branches.items():
        yield from _match_leaves(inner, pick(value, (key,)), f"{name}.{key}", site)


def _check_items(branches: Mapping[str | int, object], name: str, site: Site | None, value: object) -> None:
    """Refuse a value without an item for each branch; `site` is the program line that passed a future of it."""
    for key in branches:
        try:
            pick(value, (key,))
        except (TypeError, LookupError):
            its = f"reduce: what was handed over for {name!r}"
            where = f"; it was handed over at {call_site(*site)}" if site is not None else ""
            raise UsageError(f"{its} has no item {key!r}: it is {describe(value)}{where}") from None


# -- sums of gradients -----------------------------------------------------------------------------------------------


class RunningSum:
    """The sum of trees of one form that come one after the other, such as gradients of microbatches or of parts.

    It does not change the trees; from the third on, it allocates nothing. Of one tree it is the tree itself.

    Args:
        work: Issues the additions.
        like: A tree of that form: its size is the cost of an addition on the virtual clock.

    Attributes:
        count: Trees that have been added.
    """

    def __init__(self, work: MemoryWork, like: object) -> None:
        self.count: int = 0
        self._work, self._moved_bytes = work, 3 * _tree_bytes(like)
        self._strip_arrays = _strip_arrays(like)
        self._first: object = None
        self._own: object = None
        self._newest: object = None

    def add(self, tree: object) -> object:
        """Issue the addition of a tree, or of a future of one; return the sum so far, or a future of it."""
        self.count += 1
        if self.count == 1:
            self._first = self._newest = tree
        else:
            first, self._first = self._first, None
            self._newest = self._work.compute(
                self._add_tree, first, tree, name="add gradients", moved_bytes=self._moved_bytes, role="program"
            )
        return self._newest

    def _add_tree(self, first: object, tree: object) -> object:
        """Return the sum of all trees so far; the first addition makes new arrays, later ones write into them."""
        if first is not None or self._own is None:
            self._own = _sum_trees(first, tree, self._strip_arrays)
        else:
            _add_into(self._own, tree)
        return self._own


def _strip_arrays(like: object) -> object:
    """Return the form of a tree, with True for each array and None for each missing one."""
    return map_leaves(lambda leaf: leaf if leaf is None else True, like)


def _sum_trees(first: Any, second: Any, form: object) -> object:
    """Return the sum of two trees of arrays as new arrays; arrays without data stay so."""
    if first is None and not form:
        return {}
    if isinstance(first, Mapping):
        parts = form if isinstance(form, Mapping) else {}
        return {key: _sum_trees(branch, second[key], parts.get(key)) for key, branch in first.items()}
    if isinstance(first, (list, tuple)):
        form = form if isinstance(form, list) and len(form) == len(first) else [None] * len(first)
        return [_sum_trees(*branches) for branches in zip(first, second, form, strict=True)]
    if first is None or second is None:
        raise UsageError("backward: returned None for the gradient of weights; only a layer without weights may")
    return first if has_no_data(first) else first + second


def _add_into(own: object, tree: object) -> None:
    """Add a tree to another one in place; arrays without data stay."""
    if isinstance(own, (Mapping, list)):
        for key, branch in _branch_items(own):
            _add_into(branch, pick(tree, (key,)))
    elif not has_no_data(cast("Array", own)):
        own += tree  # type: ignore[operator]


def has_no_data(array: Array) -> bool:
    """Whether all elements of an array share one place in memory, as in simulations of shapes alone."""
    return array.size > 1 and not any(array.strides)


def _tree_bytes(tree: object) -> int:
    """Return the bytes of all arrays in a tree; futures that are not done count 0."""
    leaves = (pick(tree, path) for path in _leaf_paths(tree, ()))
    there = (each.result() if isinstance(each, Future) and each.done else each for each in leaves)
    return sum(int(getattr(each, "nbytes", 0)) for each in there)
