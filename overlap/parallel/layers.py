"""Layers that issue: what a pipeline's stages and tensor-parallel models are put together from.

A layer remembers nothing. `forward(w, x)` issues what it takes and returns the output and what backward will need;
`backward(w, kept, dy)` returns the gradient of `x` and those of the weights, a tree like `w`. Outputs and gradients may
be futures, and so may be all that comes in. A layer whose forward must wait for something has an async one.

Layers that can compute the gradients of inputs and weights apart also have `backward_input(w, kept, dy)`, which
returns the gradient of `x` and what is needed next, and `backward_weights(w, kept)`: what a zero-bubble schedule takes,
and what lets a collective travel under the second half.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias, cast

from ..errors import UsageError
from ..runtime.future import Future
from ..runtime.rank import Rank

Cost: TypeAlias = Mapping[str, float]
"""What a compute costs on the virtual clock: `seconds`, or `flops` and `bytes_moved`, as `rank.compute` takes them."""

Pair: TypeAlias = tuple[object, object]

Half: TypeAlias = tuple[bool, object]
"""Whether the gradients of the weights are there, and they, or what they are computed from."""


class Layer(Protocol):
    """What a stage is made of; write your own by having these two."""

    def forward(self, w: object, x: object) -> Pair | Awaitable[Pair]:
        """Issue the forward pass; return the output, and what backward will need."""

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the backward pass; return the gradient of `x`, and those of the weights."""


class Local:
    """Plain functions, run on the rank's compute stream.

    Args:
        rank: This rank.
        forward: From weights and input to output and what backward needs.
        backward: From weights, what forward has kept, and the gradient of the output, to that of the input and those of
            the weights.
        backward_input: The first half of backward; returns the gradient of the input, and what is needed next.
        backward_weights: The second half, from weights and that; with it, `backward` may be left out.
        costs: Of "forward", "backward", "backward_input" and "backward_weights", on the virtual clock.

    Raises:
        UsageError: If there is no backward, or half of one.
    """

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
        """Issue the forward function."""
        both = self._issue("forward", w, x)
        return both[0], both[1]

    def backward(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the backward function, or its halves."""
        if self._functions["backward"] is None:
            dx, kept = self.backward_input(w, kept, dy)
            return dx, self.backward_weights(w, kept)
        both = self._issue("backward", w, kept, dy)
        return both[0], both[1]

    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the first half."""
        both = self._issue("backward_input", w, kept, dy)
        return both[0], both[1]

    def backward_weights(self, w: object, kept: object) -> Future[object]:
        """Issue the second half."""
        return self._issue("backward_weights", w, kept)

    def _issue(self, what: str, *args: object) -> Future[object]:
        function = cast("Callable[..., object]", self._functions[what])
        return self.rank.compute(function, *args, **self._costs.get(what, {}))  # type: ignore[arg-type]


def splits(layer: Layer) -> bool:
    """Whether a layer's backward comes in two halves."""
    return bool(getattr(layer, "splits", hasattr(layer, "backward_input")))


async def forward_of(layer: Layer, w: object, x: object) -> Pair:
    """Issue a layer's forward, whether it is async or not."""
    passed = layer.forward(w, x)
    return passed if isinstance(passed, tuple) else await passed


def first_half(layer: Layer, w: object, kept: object, dy: object) -> tuple[object, Half]:
    """Issue what the gradient of the input takes; all of backward, where that cannot be split."""
    if not splits(layer):
        dx, dw = layer.backward(w, kept, dy)
        return dx, (True, dw)
    dx, needed = cast("_Split", layer).backward_input(w, kept, dy)
    return dx, (False, needed)


def second_half(layer: Layer, w: object, half: Half) -> object:
    """Issue what is left; return the gradients of the weights."""
    is_there, value = half
    return value if is_there else cast("_Split", layer).backward_weights(w, value)


class _Split(Protocol):
    def backward_input(self, w: object, kept: object, dy: object) -> Pair:
        """Issue the first half."""

    def backward_weights(self, w: object, kept: object) -> object:
        """Issue the second half."""
