"""Layers put together: one after the other, in parts that hide each other's collectives, and with shared weights."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import trio

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .layers import Half, Layer, Pair, first_half, forward_of, second_half, splits
from .memory_work import MemoryWork
from .pending import add_up, filled, has_no_data, leaves, pick

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    Array = NDArray[Any]

T = TypeVar("T")


class Replicated:
    """A layer whose weights all ranks of a group have, and of whose rows each has some: weights' gradients are summed.

    Such are the gains of a norm between sequence-parallel layers.

    Args:
        layer: The layer.
        group: The ranks that share the rows.
    """

    def __init__(self, layer: Layer, group: Group) -> None:
        self.layer, self.group = layer, group

    def forward(self, w: object, x: object) -> Pair | Awaitable[Pair]:
        """Do what the layer does."""
        return self.layer.forward(w, x)

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Do what the layer does, and sum the gradients of the weights."""
        dx, dw = self.layer.backward(w, kept, dy)
        summed = {
            name: self.group.all_reduce(cast("Future[object]", pick(dw, path)), name=f"gradient of {name}")
            for name, path in leaves(w).items()
        }
        return dx, filled(w, summed)


class Sequential:
    """Layers one after the other, by name; the weights are a dict of theirs.

    With `parts`, the rows of what comes in are cut, and each layer issues all parts before the next layer issues any:
    so the collective of one part travels while the other is computed (Domino, arXiv 2409.15241). In backward, a layer's
    weights come after all of its inputs, so that their gradients are computed under what the others send.

    Args:
        rank: This rank.
        layers: By name, in order.
        parts: How many.
        axis: Of the array that comes in. Sequence-parallel layers share axis 0 among ranks; cut another there.

    Raises:
        UsageError: If there are no layers, or `parts` cannot be meant.
    """

    def __init__(self, rank: Rank, layers: Mapping[str, Layer], *, parts: int = 1, axis: int = 0) -> None:
        if not layers:
            raise UsageError("layers: there are none")
        if not isinstance(parts, int) or parts < 1:
            raise UsageError(f"parts: expected a whole number from 1, got {parts!r}")
        self.rank, self.layers, self.parts, self.axis = rank, dict(layers), parts, axis
        self._work = MemoryWork(rank)

    @property
    def splits(self) -> bool:
        """Whether backward comes in two halves, as it does if it does in one of the layers."""
        return any(map(splits, self.layers.values()))

    async def forward(self, w: object, x: object) -> Pair:
        """Issue layer after layer; waits only where a layer does."""
        await trio.lowlevel.checkpoint()
        xs, kept = self._cut(x), dict[str, list[object]]()
        for name, layer in self.layers.items():
            passed = [await forward_of(layer, pick(w, (name,)), part) for part in xs]
            xs, kept[name] = [y for y, _ in passed], [each for _, each in passed]
        return self._join(xs), kept

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue layer after layer, from the last."""
        dys, gradients = self._cut(dy), dict[str, object]()
        for name in reversed(self.layers):
            dys, halves = self._first_halves(name, w, kept, dys)
            gradients[name] = self._second_halves(name, w, halves)
        return self._join(dys), gradients

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue what the gradient of the input takes; of layers whose backward cannot be split, all of it."""
        dys, halves = self._cut(dy), dict[str, list[Half]]()
        for name in reversed(self.layers):
            dys, halves[name] = self._first_halves(name, w, kept, dys)
        return self._join(dys), halves

    def backward_weights(self, w: object, kept: object) -> object:
        """Issue the rest."""
        halves = cast("Mapping[str, list[Half]]", kept)
        return {name: self._second_halves(name, w, halves[name]) for name in reversed(self.layers)}

    def _first_halves(self, name: str, w: object, kept: object, dys: list[object]) -> tuple[list[object], list[Half]]:
        layer, mine = self.layers[name], pick(w, (name,))
        parts = cast("Sequence[object]", pick(kept, (name,)))
        each = [first_half(layer, mine, part, dy) for part, dy in zip(parts, dys, strict=True)]
        return [dx for dx, _ in each], [half for _, half in each]

    def _second_halves(self, name: str, w: object, halves: list[Half]) -> object:
        layer, mine = self.layers[name], pick(w, (name,))
        return add_up(self._work, mine, [second_half(layer, mine, half) for half in halves])

    def _cut(self, x: object) -> list[object]:
        if self.parts == 1:
            return [x]
        cut = self.rank.compute(np.array_split, x, self.parts, self.axis, name="cut", seconds=0.0)
        return [cut[i] for i in range(self.parts)]

    def _join(self, parts: list[object]) -> object:
        """Put parts side by side; a copy of activations, which costs little beside the products that made them."""
        if self.parts == 1:
            return parts[0]
        return self.rank.compute(_joined, parts, self.axis, name="join", seconds=0.0)


def _joined(parts: Sequence[Array], axis: int) -> Array:
    if not has_no_data(parts[0]):
        return np.concatenate(parts, axis)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return np.broadcast_to(parts[0].flat[0], shape)
