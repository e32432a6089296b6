"""A perceptron in float64, whole and in pieces, and one rank that learns alone, with which all are compared."""

from typing import Any

import numpy as np

from overlap.parallel import SGD, Local, Optimizer

Array = np.ndarray

WIDTH, HIDDEN, ROWS = 6, 8, 16
LR = 0.3


def draw(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def block(seed: int, *, width: int = WIDTH) -> dict[str, dict[str, Array]]:
    """Weights of one block: up, tanh, down."""
    return {
        "up": {"weight": draw(seed, width, HIDDEN) * 0.4, "bias": draw(seed + 1, HIDDEN) * 0.1},
        "act": {},
        "down": {"weight": draw(seed + 2, HIDDEN, width) * 0.4, "bias": draw(seed + 3, width) * 0.1},
    }


def batch(step: int) -> tuple[Array, Array]:
    return draw(100 + step, ROWS, WIDTH), draw(200 + step, ROWS, WIDTH)


def linear(w: dict[str, Array], x: Array) -> tuple[Array, Array]:
    return x @ w["weight"] + w["bias"], x


def linear_input(w: dict[str, Array], x: Array, dy: Array) -> tuple[Array, tuple[Array, Array]]:
    return dy @ w["weight"].T, (x, dy)


def linear_weights(w: dict[str, Array], kept: tuple[Array, Array]) -> dict[str, Array]:
    x, dy = kept
    flat = dy.reshape(-1, dy.shape[-1])
    return {"weight": x.reshape(-1, x.shape[-1]).T @ flat, "bias": flat.sum(0)}


def tanh(w: object, x: Array) -> tuple[Array, Array]:
    y = np.tanh(x)
    return y, y


def tanh_backward(w: object, y: Array, dy: Array) -> tuple[Array, object]:
    return dy * (1 - y * y), {}


def block_forward(w: dict[str, dict[str, Array]], x: Array) -> tuple[Array, tuple[Array, Array]]:
    h = np.tanh(linear(w["up"], x)[0])
    return linear(w["down"], h)[0], (x, h)


def block_input(w: dict[str, dict[str, Array]], kept: tuple[Array, Array], dy: Array) -> tuple[Array, object]:
    x, h = kept
    dh = dy @ w["down"]["weight"].T * (1 - h * h)
    return dh @ w["up"]["weight"].T, (x, h, dh, dy)


def block_weights(w: object, kept: tuple[Array, Array, Array, Array]) -> dict[str, dict[str, Array]]:
    x, h, dh, dy = kept
    return {"up": linear_weights({}, (x, dh)), "act": {}, "down": linear_weights({}, (h, dy))}


def block_backward(w: dict[str, dict[str, Array]], kept: tuple[Array, Array], dy: Array) -> tuple[Array, object]:
    dx, needed = block_input(w, kept, dy)
    return dx, block_weights(w, needed)


def square_loss(y: Array, target: Array) -> tuple[Array, float]:
    """Return the gradient, and the mean of the squares."""
    return 2 * (y - target) / y.size, float(((y - target) ** 2).mean())


def descend(w: dict[str, dict[str, Array]], dw: dict[str, dict[str, Array]]) -> dict[str, dict[str, Array]]:
    return {layer: {name: each - LR * dw[layer][name] for name, each in whole.items()} for layer, whole in w.items()}


def one_rank(blocks: int, steps: int, optimizer: Optimizer | None = None) -> tuple[list[Any], list[float]]:
    """Train on one rank, without anything of ours but the optimizer; return all weights and the loss of every step."""
    weights = [block(10 * i) for i in range(blocks)]
    update = Updates(optimizer or SGD(LR))
    losses = []
    for step in range(steps):
        x, target = batch(step)
        kept = []
        for w in weights:
            x, each = block_forward(w, x)
            kept.append(each)
        dy, loss = square_loss(x, target)
        losses.append(loss)
        for i in reversed(range(blocks)):
            dy, dw = block_backward(weights[i], kept[i], dy)
            update(i, weights[i], dw, step + 1)
    return weights, losses


class Updates:
    """An optimizer's steps, parameter by parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.states = optimizer, dict[tuple[int, str, str], dict[str, Array]]()

    def __call__(self, index: int, w: Any, dw: Any, step: int) -> None:
        for layer, whole in w.items():
            for name, each in whole.items():
                if (index, layer, name) not in self.states:
                    self.states[index, layer, name] = self.optimizer.fresh(each.size, each.dtype)
                grad = np.ascontiguousarray(dw[layer][name]).reshape(-1)
                self.optimizer.update(each.reshape(-1), grad, self.states[index, layer, name], step)


def close(got: object, want: object, within: float = 1e-10) -> bool:
    """Whether two trees have the same form and values."""
    if isinstance(want, dict):
        return isinstance(got, dict) and got.keys() == want.keys() and all(close(got[k], want[k], within) for k in want)
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(map(close, got, want))
    return bool(np.allclose(np.asarray(got), np.asarray(want), rtol=0, atol=within))


def act(rank, seconds: float = 0.0) -> Local:
    """The layer between the two matrices."""
    return Local(rank, tanh, tanh_backward, costs={"forward": {"seconds": seconds}, "backward": {"seconds": seconds}})
