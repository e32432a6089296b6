"""What `model[name]` may name: one parameter, or a part of the tree with all parameters in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from ..errors import UsageError
from ..runtime.future import Future


class Names:
    """The form of a tree of parameters, without the arrays.

    Args:
        params: The tree.
    """

    def __init__(self, params: object) -> None:
        self._parts: dict[str, object] = {}
        self._whole = self._read(params, "")

    def _read(self, node: object, name: str) -> object:
        if not isinstance(node, (Mapping, list, tuple)):
            part: object = name
        else:
            prefix = f"{name}." if name else ""
            items = node.items() if isinstance(node, Mapping) else enumerate(node)
            part = {key: self._read(value, f"{prefix}{key}") for key, value in items}
        if name:
            self._parts[name] = part
        return part

    def find(self, name: str, of_leaf: Callable[[str], object]) -> object:
        """Return `of_leaf(name)`; for a part of the tree, a dict of what it returns for each parameter in it.

        Raises:
            UsageError: If there is no such part.
        """
        return _mapped(self._part(name), of_leaf)

    def pairs(self, name: str, value: object) -> Iterator[tuple[str, object]]:
        """Yield the parameters of a part, and for each its item of `value`, a tree of that form or a future of one.

        Raises:
            UsageError: If there is no such part, or `value` has no such item.
        """
        yield from _pairs(self._part(name), value, name)

    def _part(self, name: str) -> object:
        if not isinstance(name, str):
            raise UsageError(f"name: expected a string, such as {next(iter(self._parts))!r}, got {name!r}")
        part = self._parts.get(name)
        if part is None:
            known = ", ".join(str(key) for key in cast("dict[object, object]", self._whole))
            raise UsageError(f"name: {name!r} is no parameter; known are {known}")
        return part


def _mapped(part: object, of_leaf: Callable[[str], object]) -> object:
    if isinstance(part, str):
        return of_leaf(part)
    return {key: _mapped(inner, of_leaf) for key, inner in cast("dict[object, object]", part).items()}


def _pairs(part: object, value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(part, str):
        yield part, value
        return
    for key, inner in cast("dict[object, object]", part).items():
        if not isinstance(value, Future):
            try:
                item = value[key]  # type: ignore[index]
            except (TypeError, LookupError) as error:
                raise UsageError(f"reduce: what was handed over for {name!r} has no item {key!r}") from error
        else:
            item = value[key]
        yield from _pairs(inner, item, f"{name}.{key}")
