"""What strategies are tried with: a small perceptron, trained by the loop that all of them share."""

import numpy as np


def weights(layers=4, width=6, dtype=np.float64, seed=0):
    """Layers of a perceptron by name; the same for the same seed."""
    random = np.random.default_rng(seed)
    return {f"w{i}": random.standard_normal((width, width)).astype(dtype) / np.sqrt(width) for i in range(layers)}


def samples(step, ranks=4, width=6, dtype=np.float64):
    """Inputs and targets of a step: the global batch, two rows for each rank."""
    random = np.random.default_rng(1000 + step)
    return random.standard_normal((2, 2 * ranks, width)).astype(dtype)


def forward(w, x):
    return np.maximum(x, 0) @ w


def loss_gradient(x, y):
    return (x - y) / len(x)


def backward(w, x, grad):
    return (grad @ w.T) * (x > 0), np.maximum(x, 0).T @ grad


async def train(rank, make_model, steps=5, *, width=6, dtype=np.float64, seconds=0.001, bound=False):
    """The loop; `make_model(rank)` makes the line that differs. Returns the weights."""
    model = make_model(rank)
    names = list(weights())
    for step in range(steps):
        x, y = samples(step, rank.world_size, width, dtype)[:, rank.rank :: rank.world_size]
        acts = {}
        with rank.step(step):
            for name in names:
                acts[name], x = x, rank.compute(forward, model[name], x, seconds=seconds)
            grad = rank.compute(loss_gradient, x, y, seconds=seconds)
            for name in reversed(names):
                back = rank.compute(backward, model[name], acts[name], grad, seconds=seconds)
                grad = back[0]
                model.reduce(name, back[1])
            done = model.step()
        if bound:
            await done
    return await model.finish()


def alone(optimizer, steps=5, ranks=4, dtype=np.float64, layers=4):
    """The same training of the global batch by one rank, in plain numpy."""
    params = weights(dtype=dtype)
    flat = {name: w.reshape(-1) for name, w in params.items()}
    state = {name: optimizer.fresh(w.size, w.dtype) for name, w in flat.items()}
    for step in range(steps):
        x, y = samples(step, ranks, dtype=dtype)
        acts = []
        for w in params.values():
            acts.append(x)
            x = forward(w, x)
        grad = loss_gradient(x, y)
        for name, seen in zip(reversed(params), reversed(acts), strict=True):
            grad, dw = backward(params[name], seen, grad)
            optimizer.update(flat[name], dw.reshape(-1), state[name], step + 1)
    return params
