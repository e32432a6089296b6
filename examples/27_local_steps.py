"""Local steps with an outer optimizer (DiLoCo): ranks train apart, and send how far they came once in a period.

Each rank makes ten steps on its own samples. Then the mean of all changes is the gradient of an outer step, by
Nesterov's momentum, from the weights that all ranks had in common. The mean travels under the first step of the next
period, whose progress is kept. Data parallel sends ten times as many bytes.

You will see the loss fall, and equal weights on all ranks at the end.

    python examples/27_local_steps.py
"""

import numpy as np

import overlap

STEPS, PERIOD, WIDTH, SAMPLES = 100, 10, 64, 128
INNER_RATE, OUTER_RATE, MOMENTUM = 0.3, 0.5, 0.5


def gradient(w: np.ndarray, x: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, float]:
    y = np.tanh(x @ w)
    return x.T @ ((y - target) * (1 - y * y)) / len(x), float(((y - target) ** 2).mean())


class Outer:
    """The weights that all ranks have in common, and Nesterov's momentum."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights, self._momentum = weights.copy(), np.zeros_like(weights)

    def step(self, change: np.ndarray) -> np.ndarray:
        """Make an outer step with the mean change of the ranks; return how far the common weights moved."""
        before = self.weights
        self._momentum = MOMENTUM * self._momentum + change
        self.weights = before + OUTER_RATE * (change + MOMENTUM * self._momentum)
        return self.weights - before


async def train(rank: overlap.Rank) -> tuple[list[float], np.ndarray]:
    shared, own = np.random.default_rng(0), np.random.default_rng(rank.rank + 1)
    truth = shared.standard_normal((WIDTH, WIDTH)) / 8
    w = shared.standard_normal((WIDTH, WIDTH)) / 8
    x = own.standard_normal((SAMPLES, WIDTH))
    target, outer, losses = np.tanh(x @ truth), Outer(w), []
    under_way: tuple[np.ndarray, overlap.Future[np.ndarray]] | None = None
    for step in range(STEPS):
        with rank.step(step):
            grad, loss = await rank.compute(gradient, w, x, target)
            w = w - INNER_RATE * grad
            losses.append(loss)
            if under_way is not None:  # sent a step ago
                change, mean = under_way
                w = w - change + outer.step(await mean)  # the common step in place of this rank's own
                under_way = None
            if (step + 1) % PERIOD == 0:
                change = w - outer.weights
                under_way = change, rank.all_reduce(change, op="mean", name="outer step")
    assert under_way is not None
    outer.step(await under_way[1])
    means = await rank.all_reduce(np.array([losses[0], losses[-1]]), op="mean")
    return means.tolist(), outer.weights


if __name__ == "__main__":
    results = overlap.run(train, ranks=4)
    first, last = results[0][0]
    equal = all(np.array_equal(weights, results[0][1]) for _, weights in results)
    print(f"loss {first:.3f} at first, {last:.5f} after {STEPS} steps; weights are {'equal' if equal else 'different'}")
