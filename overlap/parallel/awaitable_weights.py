"""Arrays that can be awaited: weights that need no wait look to a program like futures of weights."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from trio.lowlevel import checkpoint, current_task

from ..runtime.future import Future

if TYPE_CHECKING:
    from .tree import Array


class Weight(np.ndarray):
    """A read-only array that `await` returns as a plain array; results of arithmetic are plain arrays as well."""

    __slots__ = ()

    def __await__(self) -> Generator[object, object, Array]:
        try:
            current_task()
        except RuntimeError:  # not in Trio, but in asyncio: give way once
            yield None
        else:
            yield from checkpoint().__await__()  # noqa: ASYNC105 (driven by hand)
        return self.view(np.ndarray)

    def __array_wrap__(self, array: Array, context: object = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else array


class Weights(dict[str | int, object]):
    """The weights of a part of the tree, arrays or futures, as a dict; `await` returns a dict of plain arrays."""

    __slots__ = ()

    def __await__(self) -> Generator[object, object, dict[str | int, object]]:
        arrays: dict[str | int, object] = {}
        for key, value in self.items():
            arrays[key] = (yield from value.__await__()) if isinstance(value, Weight | Weights | Future) else value
        return arrays


def make_awaitable(value: object) -> Any:
    """Return a weight such that it can be awaited: an array as a `Weight`, a dict as `Weights`, others unchanged."""
    if isinstance(value, dict):
        return Weights({key: make_awaitable(leaf) for key, leaf in value.items()})
    return value.view(Weight) if type(value) is np.ndarray else value
