"""The experts of one rank at work on the rows that all ranks have sent them: plain functions for the compute stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from .layers import Pair
from .routing import places_by_expert

if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]


class OwnExperts:
    """One function for all experts of a rank, each with its own weights and rows.

    What came in is in the order [source][expert], and so is what goes out. `table` has the rows from every rank for
    every expert of this one. Experts without rows are not called.

    Args:
        forward: Of one expert.
        backward: Of one expert, or None where there are halves.
        backward_input: Its first half.
        backward_weights: Its second half.
        share: What gradients of weights are divided by.
    """

    def __init__(
        self,
        forward: Callable[..., Pair],
        backward: Callable[..., Pair] | None,
        backward_input: Callable[..., Pair] | None,
        backward_weights: Callable[..., object] | None,
        *,
        share: int,
    ) -> None:
        self._forward, self._backward, self._share = forward, backward, share
        self._input, self._weights = backward_input, backward_weights

    @property
    def splits(self) -> bool:
        """Whether there are halves of backward."""
        return self._input is not None

    def forward(self, table: Array, weights: Sequence[object], received: Array) -> Pair:
        """Return the outputs, and what each expert has kept."""
        out, saved = np.empty_like(received), list[object]()
        for w, places in zip(weights, places_by_expert(table), strict=True):
            saved.append(None)
            if len(places):
                out[places], saved[-1] = self._forward(w, received[places])
        return out, saved

    def backward(self, table: Array, weights: Sequence[object], saved: Sequence[object], d_out: Array) -> Pair:
        """Return the gradients of the rows, and those of each expert's weights."""
        assert self._backward is not None
        dx, gradients = np.empty_like(d_out), list[object]()
        for w, kept, places in zip(weights, saved, places_by_expert(table), strict=True):
            gradients.append(None)
            if len(places):
                dx[places], gradients[-1] = self._backward(w, kept, d_out[places])
        return dx, [self._mean(w, dw) for w, dw in zip(weights, gradients, strict=True)]

    def backward_input(self, table: Array, weights: Sequence[object], saved: Sequence[object], d_out: Array) -> Pair:
        """Return the gradients of the rows, and what each expert's other half needs."""
        assert self._input is not None
        dx, needed = np.empty_like(d_out), list[object]()
        for w, kept, places in zip(weights, saved, places_by_expert(table), strict=True):
            needed.append(None)
            if len(places):
                dx[places], needed[-1] = self._input(w, kept, d_out[places])
        return dx, needed

    def backward_weights(self, weights: Sequence[object], needed: Sequence[object]) -> list[object]:
        """Return the gradients of each expert's weights."""
        assert self._weights is not None
        return [
            self._mean(w, None if kept is None else self._weights(w, kept))
            for w, kept in zip(weights, needed, strict=True)
        ]

    def _mean(self, weights: object, gradients: object) -> object:
        """Return an expert's gradients over the size of the group; zeros where no row came."""
        if gradients is None:
            return _mapped(np.zeros_like, weights)
        return _mapped(lambda array: array / np.asarray(self._share, array.dtype), gradients)


def _mapped(function: Callable[[Array], Array], tree: object) -> object:
    if isinstance(tree, Mapping):
        return {key: _mapped(function, branch) for key, branch in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_mapped(function, branch) for branch in tree]
    return function(cast("Array", tree))
