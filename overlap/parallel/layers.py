"""Layers that issue their computes and collectives: the parts of pipeline stages and tensor-parallel models.

A layer remembers nothing. `forward(w, x)` issues the forward pass and returns the output and the values for backward;
`backward(w, kept, dy)` returns the gradients of `x` and of the weights, a tree like `w`. Outputs and gradients may
be futures, and so may all arguments. A layer whose forward must wait for something has an async one.

Layers that can compute the gradients of inputs and weights apart also have `backward_input(w, kept, dy)`, which
returns the gradient of `x` and the values for `backward_weights(w, kept)`. Zero-bubble schedules need the two halves,
and a collective can travel under the second one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
import trio

from ..errors import UsageError
from ..runtime.derived import Checked
from ..runtime.future import Future
from ..runtime.group import Group
from ..runtime.rank import Rank
from .memory_work import MemoryWork, users_frame
from .returned import check_pair
from .settings import check_count
from .tree import RunningSum, has_no_data, leaves, pick, rebuild

if TYPE_CHECKING:
    from .tree import Array

Cost: TypeAlias = Mapping[str, float]
"""The cost of a compute on the virtual clock: `seconds`, or `flops` and `bytes_moved`, as `rank.compute` takes them."""

Pair: TypeAlias = tuple[object, object]

Half: TypeAlias = tuple[bool, object]
"""True and the gradients of the weights; or False and the values from which `backward_weights` computes them."""


class Layer(Protocol):
    """A part of a model; write your own by having these two."""

    def forward(self, w: object, x: object) -> Pair | Awaitable[Pair]:
        """Issue the forward pass; return the output, and the values for backward."""

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the backward pass; return the gradients of `x` and of the weights."""


class Local:
    """Plain functions, run on the rank's compute stream.

    Args:
        rank: This rank.
        forward: From weights and input to output and the values for backward.
        backward: From weights, the values of forward, and the gradient of the output, to the gradients of the input and
            of the weights.
        backward_input: The first half of backward; returns the gradient of the input, and the values for the second
            half.
        backward_weights: The second half, from weights and that; with it, `backward` may be left out.
        costs: Costs of "forward", "backward", "backward_input" and "backward_weights", on the virtual clock.

    Raises:
        UsageError: If there is no backward, or half of one.
    """

    rank: Rank

    def __init__(
        self,
        rank: Rank,
        forward: Callable[..., Pair],
        backward: Callable[..., Pair] | None = None,
        *,
        backward_input: Callable[..., Pair] | None = None,
        backward_weights: Callable[..., object] | None = None,
        costs: Mapping[str, Cost] | None = None,
    ) -> None:
        check_backward(backward, backward_input, backward_weights)
        self.rank, self._costs = rank, dict(costs or {})
        self._functions = {
            "forward": forward,
            "backward": backward,
            "backward_input": backward_input,
            "backward_weights": backward_weights,
        }

    @property
    def splits(self) -> bool:
        """Whether backward comes in two halves."""
        return self._functions["backward_input"] is not None

    def forward(self, w: object, x: object) -> Pair:
        """Issue the forward function."""
        return self._issue_pair("forward", w, x)

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the backward function, or its halves."""
        if self._functions["backward"] is None:
            dx, kept = self.backward_input(w, kept, dy)
            return dx, self.backward_weights(w, kept)
        return self._issue_pair("backward", w, kept, dy)

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the first half of backward: the gradient of the input."""
        return self._issue_pair("backward_input", w, kept, dy)

    def backward_weights(self, w: object, kept: object) -> Future[object]:
        """Issue the second half of backward: the gradients of the weights."""
        return self._issue("backward_weights", w, kept)

    def _issue_pair(self, name: str, *args: object) -> Pair:
        """Issue a function of the layer, and return futures of its two results, which are checked."""
        function = cast("Callable[..., object]", self._functions[name])
        both = Checked(self._issue(name, *args), partial(check_pair, name, function, _EXPECTED[name]))
        return both[0], both[1]

    def _issue(self, name: str, *args: object) -> Future[object]:
        function = cast("Callable[..., object]", self._functions[name])
        return self.rank.compute(function, *args, call_site=users_frame(), **self._costs.get(name, {}))  # type: ignore[arg-type]


_EXPECTED = {
    "forward": "(output, values for backward)",
    "backward": "(gradient of the input, gradients of the weights)",
    "backward_input": "(gradient of the input, values for backward_weights)",
}


def check_backward(backward: object, backward_input: object, backward_weights: object) -> None:
    """Refuse a layer without a backward, or with half of one.

    Raises:
        UsageError: Naming the missing functions.
    """
    if (backward_input is None) != (backward_weights is None):
        raise UsageError("backward_input, backward_weights: one is the half of the other; give both, or none")
    if backward is None and backward_input is None:
        raise UsageError("backward: give it, or its halves backward_input and backward_weights")


def splits(layer: Layer) -> bool:
    """Whether a layer's backward comes in two halves."""
    return bool(getattr(layer, "splits", hasattr(layer, "backward_input")))


async def issue_forward(layer: Layer, w: object, x: object) -> Pair:
    """Issue a layer's forward, whether it is async or not."""
    passed = layer.forward(w, x)
    return passed if isinstance(passed, tuple) else await passed


def first_half(layer: Layer, w: object, kept: object, dy: object) -> tuple[object, Half]:
    """Issue the input gradient of a layer.

    A backward that is not divided is issued whole.

    Returns:
        The input gradient, and the argument of `second_half`, which issues the weight gradients.
    """
    if not splits(layer):
        dx, dw = layer.backward(w, kept, dy)
        return dx, (True, dw)
    dx, needed = cast("Any", layer).backward_input(w, kept, dy)
    return dx, (False, needed)


def second_half(layer: Layer, w: object, half: Half) -> object:
    """Issue the rest of a layer's backward after `first_half`; return the gradients of the weights."""
    is_there, value = half
    return value if is_there else cast("Any", layer).backward_weights(w, value)


class Replicated:
    """A layer whose weights all ranks of a group have, and of whose rows each has some: weights' gradients are summed.

    Such are the gains of a norm between sequence-parallel layers.

    Args:
        layer: The layer.
        group: The ranks that share the rows.
    """

    layer: Layer
    group: Group

    def __init__(self, layer: Layer, group: Group) -> None:
        self.layer, self.group = layer, group

    def forward(self, w: object, x: object) -> Pair | Awaitable[Pair]:
        """Issue the layer's forward."""
        return self.layer.forward(w, x)

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the layer's backward, and sum the gradients of the weights."""
        dx, dw = self.layer.backward(w, kept, dy)
        summed = {
            name: self.group.all_reduce(
                cast("Future[object]", pick(dw, path)), name=f"gradient of {name}", call_site=users_frame()
            )
            for name, path in leaves(w).items()
        }
        return dx, rebuild(w, summed)


class Sequential:
    """Layers one after the other, by name; the weights are a dict of the layers' weights.

    A layer without weights, such as an activation, has no entry there or an empty one; the gradient of its weights that
    its backward returns is not looked at, and may be None.

    With `parts`, the rows of the input are cut, and each layer issues all parts before the next layer issues any:
    so the collective of one part travels while the other is computed (Domino, arXiv 2409.15241). In backward, a layer's
    weights come after all of its inputs, so that their gradients hide the collectives.

    Args:
        rank: This rank.
        layers: By name, in order.
        parts: How many.
        axis: Axis of the input. Sequence-parallel layers share axis 0 among ranks; cut another there.

    Raises:
        UsageError: If there are no layers, or `parts` is invalid.
    """

    rank: Rank
    layers: dict[str, Layer]
    parts: int
    axis: int

    def __init__(self, rank: Rank, layers: Mapping[str, Layer], *, parts: int = 1, axis: int = 0) -> None:
        if not layers:
            raise UsageError("layers: there are none; pass one or more")
        check_count("parts", parts)
        self.rank, self.layers, self.parts, self.axis = rank, dict(layers), parts, axis
        self._work = MemoryWork(rank)

    @property
    def splits(self) -> bool:
        """Whether the backward of some layer comes in two halves."""
        return any(map(splits, self.layers.values()))

    async def forward(self, w: object, x: object) -> Pair:
        """Issue layer after layer; waits only where a layer does."""
        await trio.lowlevel.checkpoint()
        xs, kept = self._split_parts(x), dict[str, list[object]]()
        for name, layer in self.layers.items():
            passed = [await issue_forward(layer, _layer_weights(w, name), part) for part in xs]
            xs, kept[name] = [y for y, _ in passed], [each for _, each in passed]
        return self._join_parts(xs), kept

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue layer after layer, from the last."""
        dys, gradients = self._split_parts(dy), dict[str, object]()
        for name in reversed(self.layers):
            dys, halves = self._first_halves(name, w, kept, dys)
            gradients[name] = self._second_halves(name, w, halves)
        return self._join_parts(dys), gradients

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradient of the input; of layers whose backward cannot be split, all of backward."""
        dys, halves = self._split_parts(dy), dict[str, list[Half]]()
        for name in reversed(self.layers):
            dys, halves[name] = self._first_halves(name, w, kept, dys)
        return self._join_parts(dys), halves

    def backward_weights(self, w: object, kept: object) -> object:
        """Issue the weight gradients of all layers, from the last."""
        halves = cast("Mapping[str, list[Half]]", kept)
        return {name: self._second_halves(name, w, halves[name]) for name in reversed(self.layers)}

    def _first_halves(self, name: str, w: object, kept: object, dys: list[object]) -> tuple[list[object], list[Half]]:
        """Issue the input gradients of a layer for all parts.

        Returns:
            The input gradients, and for each part the argument of `second_half`, which issues the weight gradients.
        """
        layer, weights = self.layers[name], _layer_weights(w, name)
        parts = cast("Sequence[object]", pick(kept, (name,)))
        each = [first_half(layer, weights, part, dy) for part, dy in zip(parts, dys, strict=True)]
        return [dx for dx, _ in each], [half for _, half in each]

    def _second_halves(self, name: str, w: object, halves: list[Half]) -> object:
        """Issue a layer's weight gradients for all parts, and return their sum."""
        layer, weights = self.layers[name], _layer_weights(w, name)
        if len(halves) == 1:
            return second_half(layer, weights, halves[0])
        total = RunningSum(self._work, weights)
        return [total.add(second_half(layer, weights, half)) for half in halves][-1]

    def _split_parts(self, x: object) -> list[object]:
        """Issue the cut of an array into `parts` along `axis`; a single part is the array itself."""
        if self.parts == 1:
            return [x]
        cut = self._work.compute(np.array_split, x, self.parts, self.axis, name="cut", role="program")
        return [cut[i] for i in range(self.parts)]

    def _join_parts(self, parts: list[object]) -> object:
        """Put parts side by side; a copy of activations, which costs little beside the products that made them."""
        if self.parts == 1:
            return parts[0]
        return self._work.compute(_concatenate, parts, self.axis, name="join", role="program")


def _layer_weights(w: object, name: str) -> object:
    return {} if isinstance(w, Mapping) and name not in w else pick(w, (name,))


def _concatenate(parts: Sequence[Array], axis: int) -> Array:
    """Return parts side by side along an axis; of arrays without data, one without data."""
    if not has_no_data(parts[0]):
        return np.concatenate(parts, axis)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return np.broadcast_to(parts[0].flat[0], shape)
