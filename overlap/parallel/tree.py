"""Trees of parameters: nested dicts, lists and tuples of arrays; each array has a name such as "blocks.0.weight".

In trees of outputs and gradients any part may be a future: a leaf, a branch, or the whole tree.
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
from ..timeline.recording import format_call_site
from .memory_work import MemoryWork
from .returned import describe_value

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
"""The type of a model's parameters, as the program passes them: the weights are returned in that form."""

Site: TypeAlias = "tuple[CodeType, int]"
"""A line of a program: code object, and index of the instruction."""

Path: TypeAlias = "tuple[str | int, ...]"
"""Keys and indices from the root of a tree to a leaf or branch."""


def flatten(params: object) -> dict[str, Array]:
    """Return the arrays of a tree by name, in the tree's order; a name is the array's path, joined by ".".

    >>> list(flatten({"embed": np.zeros(2), "blocks": [{"w": np.zeros(3)}, {"w": np.zeros(3)}]}))
    ['embed', 'blocks.0.w', 'blocks.1.w']

    Raises:
        UsageError: A leaf is no array of floats or complex numbers, there is no array, or two arrays have one name.
    """
    if not isinstance(params, (Mapping, list, tuple)):
        raise UsageError(f"params: expected a dict, list or tuple of arrays, got {type(params).__name__}")
    arrays: dict[str, Array] = {}
    for path in _leaf_paths(params, ()):
        name, leaf = _join_path(path), item_at_path(params, path)
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
            raise UsageError(f"params: two arrays are called {name!r}, by their keys joined with '.'; rename a key")
        arrays[name] = leaf
    if not arrays:
        raise UsageError("params: there is no array in it; pass one or more")
    return arrays


def rebuild(like: object, leaves: Mapping[str, object]) -> object:
    """Return a tree of the form of `like` with new leaves.

    Args:
        like: The tree whose form is taken.
        leaves: The new leaves, by the names that `flatten` gives to the leaves of `like`.

    Raises:
        UsageError: A leaf is missing.
    """
    return _rebuild_branch(like, leaves, ())


def _rebuild_branch(like: object, leaves: Mapping[str, object], path: Path) -> object:
    """Return the branch of the result of `rebuild` at `path`; `leaves` have full names. Raises as `rebuild` does."""
    if not isinstance(like, (Mapping, list, tuple)):
        name = _join_path(path)
        if name not in leaves:
            raise UsageError(f"leaves: {name!r} is missing; expected one for each leaf of the tree")
        return leaves[name]
    parts = {key: _rebuild_branch(value, leaves, (*path, key)) for key, value in _branch_items(like)}
    return parts if isinstance(like, Mapping) else sequence_like(like, list(parts.values()))


def map_leaves(function: Callable[[Any], object], tree: object) -> object:
    """Return the tree with `function` applied to each leaf; tuples become lists.

    Everything that is no dict, list or tuple is a leaf.
    """
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, branch) for key, branch in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [map_leaves(function, branch) for branch in tree]
    return function(tree)


def paths_by_name(tree: object) -> dict[str, Path]:
    """Return the paths of the leaves of a tree, by name; names are those of `flatten`, and futures are leaves."""
    return {_join_path(path): path for path in _leaf_paths(tree, ())}


def item_at_path(tree: object, path: Path) -> object:
    """Return the leaf or branch at a path; if a branch on the way is a future, a future of the leaf or branch.

    Args:
        tree: The tree; with the empty path it is the result.
        path: Keys and indices, from the outside to the inside.

    Raises:
        TypeError, LookupError: There is no such item.
    """
    # An item of a future is a future of the item.
    for key in path:
        tree = cast("Mapping[str | int, object]", tree)[key]
    return tree


def last_future(tree: object) -> Future[object] | None:
    """Return the last future in a tree; None if there is none."""
    return next(reversed(list(futures_in(tree))), None)


def _leaf_paths(tree: object, above: Path) -> Iterator[Path]:
    """Yield the paths of all leaves of the branch `tree`, whose own path is `above`."""
    if isinstance(tree, (Mapping, list, tuple)):
        for key, branch in _branch_items(tree):
            yield from _leaf_paths(branch, (*above, key))
    else:
        yield above


def _branch_items(tree: object) -> Iterator[tuple[str | int, object]]:
    """Return the pairs (key or index, value) of a branch."""
    return iter(tree.items()) if isinstance(tree, Mapping) else enumerate(cast("Sequence[object]", tree))


def _join_path(path: Path) -> str:
    return ".".join(map(str, path))


# -- names -----------------------------------------------------------------------------------------------------------


class ParameterNames:
    """An index of a tree of parameters: what each name stands for, a parameter or a part of the tree.

    Args:
        params: The tree.

    Attributes:
        form: The tree with each array replaced by its name.
    """

    def __init__(self, params: object) -> None:
        self.form: object = rebuild(params, {name: name for name in flatten(params)})
        self._parts: dict[str, object] = {}  # by name: the parameter's name again, or a dict of dicts of such names
        self._top = [str(key) for key, _ in _branch_items(params)]
        self._index_part(self.form, ())

    def _index_part(self, node: object, path: Path) -> object:
        """Record the names of a branch and of all in it; return the branch as nested dicts of parameter names."""
        part = node
        if isinstance(node, (Mapping, list, tuple)):
            part = {key: self._index_part(value, (*path, key)) for key, value in _branch_items(node)}
        if path:
            self._parts[_join_path(path)] = part
        return part

    def map_parameters(self, name: str, of_leaf: Callable[[str], object]) -> object:
        """Return `of_leaf(name)` for a parameter; for a part of the tree, nested dicts of `of_leaf` of each parameter.

        Args:
            name: Name of a parameter, or of a part of the tree.
            of_leaf: Function of the full name of a parameter.

        Raises:
            UsageError: There is no parameter or part of that name.
        """
        return map_leaves(of_leaf, self._find_part(name))

    def parameters_of(self, name: str) -> Iterator[str]:
        """Yield the full names of the parameters in a part of the tree; `name` may also be that of a parameter.

        Raises:
            UsageError: There is no parameter or part of that name.
        """
        part = self._find_part(name)
        return (cast("str", item_at_path(part, path)) for path in _leaf_paths(part, ()))

    def values_by_parameter(self, name: str, value: object, site: Site) -> Iterator[tuple[str, object]]:
        """Yield (full name of a parameter, its value) for each parameter in a part of the tree.

        Args:
            name: Name of a parameter, or of a part of the tree.
            value: A value for the parameter; for a part, a tree of the part's form, or a future of one.
            site: The line that handed `value` over, for errors of a future.

        Raises:
            UsageError: There is no parameter or part of that name, or an item of `value` is missing. If `value` is a
                future, a missing item raises where the yielded value is used.
        """
        yield from _match_leaves(self._find_part(name), value, name, site)

    def _find_part(self, name: str) -> object:
        """Return a parameter's name, or the part of the tree called `name` as nested dicts of parameter names.

        Raises a `UsageError` if there is none of that name.
        """
        if not isinstance(name, str):
            raise UsageError(f"name: expected a string, such as {next(iter(self._parts))!r}, got {name!r}")
        part = self._parts.get(name)
        if part is None:
            raise UsageError(f"name: {name!r} is no parameter; known are {', '.join(self._top)}")
        return part


def _match_leaves(part: object, value: object, name: str, site: Site) -> Iterator[tuple[str, object]]:
    """Yield (full name of a parameter, its value) for each parameter in `part`, a name or nested dicts of names.

    The value is a tree of the part's form, or a future of one. `name` and `site` are for errors, `site` for a future's.
    """
    if isinstance(part, str):
        yield part, value
        return
    branches = cast("dict[str | int, object]", part)
    # The result of a future is checked later, when it is there. Only then the error must name the line.
    if isinstance(value, Future):
        value = Checked(value, partial(_check_items, branches, name, site))
    else:
        _check_items(branches, name, None, value)
    for key, inner in branches.items():
        yield from _match_leaves(inner, item_at_path(value, (key,)), f"{name}.{key}", site)


def _check_items(branches: Mapping[str | int, object], name: str, site: Site | None, value: object) -> None:
    """Refuse a value without an item for each branch; the `UsageError` names the part and the first missing item.

    `site` is the line that passed a future of the value; None: the caller is at that line.
    """
    for key in branches:
        try:
            item_at_path(value, (key,))
        except (TypeError, LookupError):
            its = f"reduce: expected an item {key!r} in what was handed over for {name!r}"
            where = f"; it was handed over at {format_call_site(*site)}" if site is not None else ""
            raise UsageError(f"{its}, got {describe_value(value)}{where}") from None


# -- sums of gradients -----------------------------------------------------------------------------------------------


class RunningSum:
    """The running sum of trees of one form, such as the gradients of successive microbatches.

    The trees are not changed. The sum of a single tree is the tree itself; the second one allocates new arrays, and
    later ones are added into these.

    Args:
        work: Issues the additions.
        like: A tree of that form; from its size follows the cost of an addition on the virtual clock.

    Attributes:
        count: Number of trees that have been added.
    """

    def __init__(self, work: MemoryWork, like: object) -> None:
        self.count: int = 0
        self._work, self._moved_bytes = work, 3 * _tree_bytes(like)
        self._form = _form_of_tree(like)
        self._first: object = None  # the first tree, until an addition takes it
        self._own: object = None  # the arrays of the sum, from the second tree on
        self._newest: object = None  # the sum of all trees so far, or a future of it

    def add(self, tree: object) -> object:
        """Issue the addition of a tree, or of a future of one; return the sum so far, or a future of it.

        The first call issues nothing, and returns `tree` itself.
        """
        self.count += 1
        if self.count == 1:
            self._first = self._newest = tree
        else:
            # Only the first addition refers to the first tree, so that its memory is freed after that.
            first, self._first = self._first, None
            self._newest = self._work.compute(
                self._add_tree, first, tree, name="add gradients", moved_bytes=self._moved_bytes, role="program"
            )
        return self._newest

    def _add_tree(self, first: object, tree: object) -> object:
        """Return the sum of all trees so far; the first addition makes new arrays, later ones write into them.

        `first` is the first tree in the first addition, and None in later ones.
        """
        # In the first addition `first` may also be None, for a layer without weights: then there are no own arrays yet.
        if first is not None or self._own is None:
            self._own = _sum_trees(first, tree, self._form)
        else:
            _add_tree_in_place(self._own, tree)
        return self._own


def _form_of_tree(like: object) -> object:
    """Return the form of a tree: dicts and lists, with True for each leaf, and None for each leaf that is None."""
    return map_leaves(lambda leaf: leaf if leaf is None else True, like)


def _sum_trees(first: Any, second: Any, form: object) -> object:
    """Return the sum of two trees of gradients, as new arrays; of arrays without data, the first.

    `first` and an empty `form` (from `_form_of_tree`) are None for a layer without weights. Raises a `UsageError` if a
    gradient of weights that exist is missing.
    """
    # None is right as the gradient of a layer without weights; otherwise a gradient is missing, which is refused below.
    if first is None and not form:
        return {}
    if isinstance(first, Mapping):
        parts = form if isinstance(form, Mapping) else {}
        return {key: _sum_trees(branch, second[key], parts.get(key)) for key, branch in first.items()}
    if isinstance(first, (list, tuple)):
        # If the gradient has another form than the weights, None counts as "no weights".
        forms: list[object] = [None] * len(first)
        if isinstance(form, list) and len(form) == len(first):
            forms = form
        return [_sum_trees(*branches) for branches in zip(first, second, forms, strict=True)]
    if first is None or second is None:
        raise UsageError("backward: expected a gradient of the weights, got None; only a layer without weights may")
    return first if has_no_data(first) else first + second


def _add_tree_in_place(own: object, tree: object) -> None:
    """Add a tree of arrays to another one of the same form, in place; arrays without data are not changed."""
    if isinstance(own, (Mapping, list)):
        for key, branch in _branch_items(own):
            _add_tree_in_place(branch, item_at_path(tree, (key,)))
    # In place, into the array that the tree holds.
    elif not has_no_data(cast("Array", own)):
        own += tree  # type: ignore[operator]


def has_no_data(array: Array) -> bool:
    """Whether all elements of an array share one place in memory, as in simulations of shapes alone."""
    return array.size > 1 and not any(array.strides)


def _tree_bytes(tree: object) -> int:
    """Return the number of bytes of all arrays in a tree; futures that are not done count as 0."""
    leaves = (item_at_path(tree, path) for path in _leaf_paths(tree, ()))
    there = (each.result() if isinstance(each, Future) and each.done else each for each in leaves)
    return sum(int(getattr(each, "nbytes", 0)) for each in there)
