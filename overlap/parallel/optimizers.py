"""Optimizers on flat arrays: state for each element, and updates in place.

Optimizers know nothing of names, layers and ranks. Every element is computed from its own values only, so whole
parameters, buckets and shards give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import numpy as np

from ..errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from .tree import Array

    Numbers: TypeAlias = NDArray[np.float64]  # to the type checker; any floating type

Rate: TypeAlias = float | Callable[[int], float]
"""Learning rate, or a function of the number of the update, which is 1 in the first step."""

_BLOCK = 1 << 14
"""Elements worked on at once: a dozen passes over 64 KiB stay in a core's second-level cache (512 KiB and more)."""

_WIDE_BLOCK = 1 << 16
"""Elements worked on at once by updates of two or three passes: smaller blocks cost more in calls of numpy.

For 32 MiB: 9.4 ms, and 10.8 ms with `_BLOCK`.
"""


class Optimizer(Protocol):
    """An optimizer as strategies need it. Any object with these two methods is one."""

    def fresh(self, size: int, dtype: DTypeLike) -> dict[str, Array]:
        """Return the state before the first step: by name, flat arrays with an element for each parameter.

        Args:
            size: Number of elements of the parameters.
            dtype: Dtype of the parameters.
        """

    def update(self, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
        """Make one step, in place.

        Args:
            param: (n,) Parameters; updated.
            grad: (n,) Gradient of the parameters; not changed.
            state: Arrays (n,) with the names and dtypes that `fresh` returns; updated.
            step: Number of the step, from 1.
        """


def check_optimizer(optimizer: object) -> None:
    """Refuse a value that is no optimizer.

    Raises:
        UsageError: With the value's class.
    """
    if isinstance(optimizer, type):
        raise UsageError(f"optimizer: {optimizer.__name__} is a class; make one, as in Adam(1e-3)")
    if not all(callable(getattr(optimizer, method, None)) for method in ("fresh", "update")):
        name = type(optimizer).__name__
        raise UsageError(f"optimizer: expected an optimizer, such as parallel.Adam(1e-3), got one of type {name}")


def _slice_blocks(*arrays: Array, size: int = _BLOCK) -> Iterator[tuple[Numbers, ...]]:
    """Yield the arrays in slices of `size` elements, which stay in a core's cache; the last ones may be shorter."""
    for start in range(0, arrays[0].size, size):
        yield tuple(cast("Numbers", array[start : start + size]) for array in arrays)


def _learning_rate(lr: Rate, step: int) -> float:
    """Return the learning rate of a step; steps count from 1."""
    return float(lr(step) if callable(lr) else lr)


def _check_rate(lr: object) -> None:
    """Refuse a learning rate that is neither a number from 0 nor a function."""
    if not callable(lr) and not (isinstance(lr, (int, float)) and lr >= 0):
        raise UsageError(f"lr: expected a number from 0, or a function of the step, got {lr!r}")


def _check_fraction(name: str, share: float) -> None:
    """Refuse a number that is not in 0 <= share < 1."""
    if not 0 <= share < 1:
        raise UsageError(f"{name}: expected at least 0 and less than 1, got {share!r}")


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent: v = momentum * v + g; p = p - lr * v.

    State: one array with momentum, none without.
    """

    lr: Rate  # Learning rate
    momentum: float = 0.0  # Share of the last velocity that stays; at least 0, less than 1

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_fraction("momentum", self.momentum)

    def fresh(self, size: int, dtype: DTypeLike) -> dict[str, Array]:
        """Return a velocity of zeros; without momentum, no state."""
        return {"velocity": np.zeros(size, dtype)} if self.momentum else {}

    def update(self, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
        """Make one step, in place. Cost: two passes; three with momentum. See `Optimizer.update`."""
        lr = _learning_rate(self.lr, step)
        for p, g, *velocity in _slice_blocks(param, grad, *state.values(), size=_WIDE_BLOCK):
            # With momentum there is one velocity array, without it none.
            for v in velocity:
                v *= self.momentum
                v += g
                g = v
            p -= lr * g


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam: a step is lr * mean / (sqrt(square) + eps), where mean and square are running means of g and g * g.

    The bias of the running means towards their start at zero is corrected.

    Kingma, Ba, "Adam: a method for stochastic optimization", arXiv 1412.6980, algorithm 1. State: two arrays.
    """

    lr: Rate  # Learning rate
    betas: tuple[float, float] = (0.9, 0.999)  # Shares of mean and square that stay at each step
    eps: float = 1e-8  # Added to the root of the square

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        for beta in self.betas:
            _check_fraction("betas", beta)

    def fresh(self, size: int, dtype: DTypeLike) -> dict[str, Array]:
        """Return two means of zeros.

        Raises:
            UsageError: If the parameters are complex numbers, whose squares are no measure of their size.
        """
        if np.dtype(dtype).kind == "c":
            raise UsageError(
                f"optimizer: {type(self).__name__} is for real numbers, and there are parameters of {np.dtype(dtype)}; "
                "pass their real and imaginary parts, or use SGD"
            )
        return {"mean": np.zeros(size, dtype), "square": np.zeros(size, dtype)}

    def update(self, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
        """Make one step, in place. Cost: a dozen passes within a core's cache. See `Optimizer.update`."""
        _make_adam_step(self, param, grad, state, step, decay=1.0)


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: p = p - lr * weight_decay * p, then Adam's step.

    Loshchilov, Hutter, "Decoupled weight decay regularization", arXiv 1711.05101. State: two arrays. All parameters of
    the model decay; put biases and gains into a separate model with `Adam`.
    """

    weight_decay: float = 0.01  # Times `lr`: the share of a weight that is subtracted at each step

    def update(self, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
        """Make one step, in place. Cost: a dozen passes within a core's cache. See `Optimizer.update`."""
        _make_adam_step(self, param, grad, state, step, decay=1.0 - _learning_rate(self.lr, step) * self.weight_decay)


def _make_adam_step(rule: Adam, param: Array, grad: Array, state: dict[str, Array], step: int, *, decay: float) -> None:
    """Make a step of Adam in place, block by block; first multiply the weights by `decay`. See `Optimizer.update`."""
    first, second = rule.betas
    # Both include the correction of the means' bias towards zero: m / (1 - first**step), v / (1 - second**step).
    rate, root = _learning_rate(rule.lr, step) / (1 - first**step), sqrt(1 - second**step)
    # m and v: running means of the gradient and of its square. From `np.sqrt` on, `square` holds the step.
    for p, g, m, v in _slice_blocks(param, grad, state["mean"], state["square"]):
        m *= first
        m += (1 - first) * g
        v *= second
        square = g * g
        square *= 1 - second
        v += square
        np.sqrt(v, out=square)
        square /= root
        square += rule.eps
        np.divide(m, square, out=square)
        square *= rate
        if decay != 1.0:
            p *= decay
        p -= square


@dataclass(frozen=True, slots=True)
class Nesterov(SGD):
    """Descent with Nesterov's momentum: v = momentum * v + g; p = p - lr * (g + momentum * v).

    The outer optimizer of DiLoCo, with its rate and momentum: Douillard et al., arXiv:2311.08105. State: one array.
    """

    lr: Rate = 0.7  # Learning rate
    momentum: float = 0.9  # Share of the last velocity that stays; at least 0, less than 1

    def fresh(self, size: int, dtype: DTypeLike) -> dict[str, Array]:
        """Return a velocity of zeros."""
        return {"velocity": np.zeros(size, dtype)}

    def update(self, param: Array, grad: Array, state: dict[str, Array], step: int) -> None:
        """Make one step, in place. Cost: four passes. See `Optimizer.update`."""
        velocity = state["velocity"]
        velocity *= self.momentum
        velocity += grad
        param -= _learning_rate(self.lr, step) * (grad + self.momentum * velocity)
