"""Layers that issue their computes and collectives: the parts of pipeline stages and tensor-parallel models.

A layer has no state. `forward(w, x)` issues the forward pass and returns the output and the values for backward
(`kept`); `backward(w, kept, dy)` returns the gradients of `x` and of the weights, a tree like `w`. Outputs and
gradients may be futures, and so may all arguments. A layer that must wait for something in forward has an async one.

Layers that can compute the gradients of inputs and weights separately also have `backward_input(w, kept, dy)`, which
returns the gradient of `x` and the values for `backward_weights(w, kept)`. Zero-bubble schedules need these two halves,
and a collective of the first half can travel while the second one computes.
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
from .tree import RunningSum, has_no_data, item_at_path, paths_by_name, rebuild

if TYPE_CHECKING:
    from .tree import Array

Cost: TypeAlias = Mapping[str, float]
"""The cost of a compute on the virtual clock: `seconds`, or `flops` and `bytes_moved`, as `rank.compute` takes them."""

Pair: TypeAlias = tuple[object, object]

Half: TypeAlias = Callable[[object], object]
"""The second half of a layer's backward: a function that takes the weights, and issues and returns their gradients."""


class Layer(Protocol):
    """A part of a model. Any object with these two methods is a layer. Arguments and results may be futures."""

    def forward(self, w: object, x: object) -> Pair | Awaitable[Pair]:
        """Issue the forward pass; return the output, and the values that backward needs.

        Args:
            w: The weights, in any form.
            x: The input.
        """

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the backward pass; return the gradients of `x` and of the weights.

        Args:
            w: The weights that `forward` had.
            kept: The values for backward that `forward` returned.
            dy: Gradient of the output.
        """


class Local:
    """A layer made of plain functions, which run on the rank's compute stream.

    Args:
        rank: This rank.
        forward: `forward(weights, input)` returns the output and the values for backward.
        backward: `backward(weights, values, output gradient)` returns the gradients of the input and of the weights.
        backward_input: First half of backward, with the same arguments. It returns the gradient of the input, and the
            values for the second half.
        backward_weights: Second half: `backward_weights(weights, values)` returns the gradients of the weights. With
            the two halves, `backward` may be left out.
        costs: Costs of "forward", "backward", "backward_input" and "backward_weights" on the virtual clock.

    Raises:
        UsageError: There is no backward, or only half of one.
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
        if (backward_input is None) != (backward_weights is None):
            raise UsageError("backward_input, backward_weights: one is the half of the other; give both, or none")
        if backward is None and backward_input is None:
            raise UsageError("backward: give it, or its halves backward_input and backward_weights")
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
        """Issue the forward function; the futures fail if it does not return two values. See `Layer.forward`."""
        return self._issue_checked_pair("forward", w, x)

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the backward function, or, if there is none, its two halves. See `Layer.backward`."""
        if self._functions["backward"] is None:
            dx, kept = self.backward_input(w, kept, dy)
            return dx, self.backward_weights(w, kept)
        return self._issue_checked_pair("backward", w, kept, dy)

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the first half of backward: the gradient of the input, and the values for `backward_weights`.

        Arguments: see `Layer.backward`.
        """
        return self._issue_checked_pair("backward_input", w, kept, dy)

    def backward_weights(self, w: object, kept: object) -> Future[object]:
        """Issue the second half of backward: the gradients of the weights. `kept` comes from `backward_input`."""
        return self._issue_function("backward_weights", w, kept)

    def _issue_checked_pair(self, name: str, *args: object) -> Pair:
        """Issue a function of the layer; return a future of each of its two results.

        The futures fail with a `UsageError` if the function does not return two values.
        """
        function = cast("Callable[..., object]", self._functions[name])
        # `both` is one future of two results; its items are futures of each.
        both = Checked(self._issue_function(name, *args), partial(check_pair, name, function, _EXPECTED[name]))
        return both[0], both[1]

    def _issue_function(self, name: str, *args: object) -> Future[object]:
        function = cast("Callable[..., object]", self._functions[name])
        return self.rank.compute(function, *args, call_site=users_frame(), **self._costs.get(name, {}))  # type: ignore[arg-type]


_EXPECTED = {
    "forward": "(output, values for backward)",
    "backward": "(gradient of the input, gradients of the weights)",
    "backward_input": "(gradient of the input, values for backward_weights)",
}


def has_split_backward(layer: Layer) -> bool:
    """Whether a layer's backward comes in two halves."""
    return bool(getattr(layer, "splits", hasattr(layer, "backward_input")))


async def issue_forward(layer: Layer, w: object, x: object) -> Pair:
    """Issue a layer's forward, which may be async; return the output and the values for backward."""
    passed = layer.forward(w, x)
    return passed if isinstance(passed, tuple) else await passed


def issue_first_half(layer: Layer, w: object, kept: object, dy: object) -> tuple[object, Half]:
    """Issue the first half of a layer's backward; return the input gradient, and the second half as a function.

    A backward that does not come in halves is issued whole; the function then only returns the weight gradients.
    Arguments: see `Layer.backward`.
    """
    if not has_split_backward(layer):
        dx, dw = layer.backward(w, kept, dy)
        # The weight gradients have been issued: the weights are not needed again.
        return dx, lambda _: dw
    halves = cast("Any", layer)
    dx, needed = halves.backward_input(w, kept, dy)
    return dx, lambda w: halves.backward_weights(w, needed)


class Replicated:
    """A layer for which all ranks of a group have the same weights, and each rank has some of the input rows.

    Backward sums the gradients of the weights over the group. Example: a norm between sequence-parallel layers.

    Args:
        layer: The layer, as one rank runs it on its rows.
        group: The ranks that share the rows.
    """

    layer: Layer
    group: Group

    def __init__(self, layer: Layer, group: Group) -> None:
        self.layer, self.group = layer, group

    def forward(self, w: object, x: object) -> Pair | Awaitable[Pair]:
        """Issue the layer's forward. See `Layer.forward`."""
        return self.layer.forward(w, x)

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the layer's backward, and sum the gradients of the weights over the group. See `Layer.backward`."""
        dx, dw = self.layer.backward(w, kept, dy)
        summed = {
            name: self.group.all_reduce(
                cast("Future[object]", item_at_path(dw, path)), name=f"gradient of {name}", call_site=users_frame()
            )
            for name, path in paths_by_name(w).items()
        }
        return dx, rebuild(w, summed)


class Sequential:
    """Layers one after the other; the weights are a dict of the layers' weights, by the layers' names.

    A layer without weights, such as an activation, has no entry in that dict, or an empty one; its backward may return
    None as the gradient of the weights.

    With `parts`, the input is cut along `axis`, and each layer issues all parts before the next layer issues any: the
    collective of one part travels while the next part is computed (Domino, arXiv 2409.15241). In backward, a layer
    issues the input gradients of all parts before the weight gradients, whose computes hide the collectives.

    Args:
        rank: This rank.
        layers: The layers by name, in order.
        parts: Number of parts.
        axis: Axis along which the input is cut. Sequence-parallel layers divide axis 0 among ranks: choose another.

    Raises:
        UsageError: There are no layers, or `parts` is invalid.
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
        return any(map(has_split_backward, self.layers.values()))

    async def forward(self, w: object, x: object) -> Pair:
        """Issue the forward of all layers in order; wait only where a layer does. See `Layer.forward`.

        The values for backward are a dict: for each layer a list with the values of each part.
        """
        # This always gives way once to other tasks, whether a layer waits or not.
        await trio.lowlevel.checkpoint()
        xs, kept = self._split_into_parts(x), dict[str, list[object]]()
        for name, layer in self.layers.items():
            passed = [await issue_forward(layer, _layer_weights(w, name), part) for part in xs]
            xs, kept[name] = [y for y, _ in passed], [each for _, each in passed]
        return self._join_parts(xs), kept

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the backward of all layers, from the last to the first. See `Layer.backward`."""
        dys, gradients = self._split_into_parts(dy), dict[str, object]()
        for name in reversed(self.layers):
            dys, halves = self._issue_first_halves(name, w, kept, dys)
            gradients[name] = self._issue_second_halves(name, w, halves)
        return self._join_parts(dys), gradients

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the gradient of the input; return it, and the values for `backward_weights`.

        Layers whose backward does not come in halves issue all of it here. Arguments: see `Layer.backward`.
        """
        dys, halves = self._split_into_parts(dy), dict[str, list[Half]]()
        for name in reversed(self.layers):
            dys, halves[name] = self._issue_first_halves(name, w, kept, dys)
        return self._join_parts(dys), halves

    def backward_weights(self, w: object, kept: object) -> object:
        """Issue the weight gradients of all layers, from the last to the first; return them by layer.

        Args:
            w: The weights of all layers.
            kept: The second result of `backward_input`.
        """
        halves = cast("Mapping[str, list[Half]]", kept)
        return {name: self._issue_second_halves(name, w, halves[name]) for name in reversed(self.layers)}

    def _issue_first_halves(
        self, name: str, w: object, kept: object, dys: list[object]
    ) -> tuple[list[object], list[Half]]:
        """Issue the input gradients of one layer for all parts; return these, and the second half of each backward.

        `w` and `kept` are the weights and the values for backward of all layers. `dys` has the gradient of the layer's
        output for each part.
        """
        layer, weights = self.layers[name], _layer_weights(w, name)
        parts = cast("Sequence[object]", item_at_path(kept, (name,)))
        each = [issue_first_half(layer, weights, part, dy) for part, dy in zip(parts, dys, strict=True)]
        return [dx for dx, _ in each], [half for _, half in each]

    def _issue_second_halves(self, name: str, w: object, halves: list[Half]) -> object:
        """Issue a layer's weight gradients for all parts; return a future of their sum. `w` has all layers' weights."""
        weights = _layer_weights(w, name)
        if len(halves) == 1:
            return halves[0](weights)
        total = RunningSum(self._work, weights)
        # Each `add` issues an addition; the result of the last is the sum of all.
        return [total.add(half(weights)) for half in halves][-1]

    def _split_into_parts(self, x: object) -> list[object]:
        """Issue the cut of an array into `parts` along `axis`; a single part is the array itself."""
        if self.parts == 1:
            return [x]
        cut = self._work.compute(np.array_split, x, self.parts, self.axis, name="cut", role="program")
        return [cut[i] for i in range(self.parts)]

    def _join_parts(self, parts: list[object]) -> object:
        """Issue the joining of parts along `axis`; a single part is returned as it is."""
        if self.parts == 1:
            return parts[0]
        return self._work.compute(_concatenate_parts, parts, self.axis, name="join", role="program")


def _layer_weights(w: object, name: str) -> object:
    """Return the weights of a layer out of those of all layers, or {} if the layer has no entry."""
    return {} if isinstance(w, Mapping) and name not in w else item_at_path(w, (name,))


def _concatenate_parts(parts: Sequence[Array], axis: int) -> Array:
    """Return parts joined along an axis; if they have no data, an array without data of the joined shape."""
    if not has_no_data(parts[0]):
        return np.concatenate(parts, axis)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return np.broadcast_to(parts[0].flat[0], shape)
