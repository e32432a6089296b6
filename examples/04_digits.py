"""Train on real handwritten digits, data-parallel, with every layer's all-reduce under the next layer's compute.

You will see the loss fall, and the share of right answers on images that training has not seen: above 95 %.
To look at a step: overlap run --trace digits.trace.json examples/04_digits.py; overlap timeline digits.trace.json
"""

import numpy as np

import overlap
from overlap.data import Digits, digits

LAYERS = ((64, 128), (128, 64), (64, 10))  # inputs and outputs of each


def forward(weights: list[np.ndarray], x: np.ndarray) -> list[np.ndarray]:
    seen = []  # the input of each layer: rectified (pixels are not negative anyway), and a constant 1 for the bias
    for w in weights:
        seen.append(np.pad(np.maximum(x, 0), ((0, 0), (0, 1)), constant_values=1))
        x = seen[-1] @ w
    return [*seen, x]


def compare(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    right = np.eye(10, dtype=np.float32)[labels]
    return (p - right) / np.float32(len(labels)), -np.log((p * right).sum(axis=1)).mean()


def backward(dy: np.ndarray, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ((dy @ w.T) * (x > 0))[:, :-1], x.T @ dy


async def train(rank: overlap.Rank, data: Digits) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    weights = [random.standard_normal((i + 1, o), np.float32) * np.float32((2 / i) ** 0.5) for i, o in LAYERS]
    images, labels = data.images[rank.rank :: rank.world_size], data.labels[rank.rank :: rank.world_size]
    for step in range(100):
        with rank.step(step):
            seen = rank.compute(forward, weights, images)
            loss = rank.compute(compare, seen[-1], labels)
            grad, pending = loss[0], []
            for layer in reversed(range(len(weights))):
                back = rank.compute(backward, grad, seen[layer], weights[layer])
                grad = back[0]
                pending.append((layer, rank.all_reduce(back[1], op="mean")))  # starts when the gradient exists
            for layer, reduced in pending:
                weights[layer] -= np.float32(0.2) * await reduced  # the only waits
        if rank.rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {await loss[1]:.3f}")
    return weights


if __name__ == "__main__":
    train_part, test_part = digits().split()
    weights = overlap.run(train, train_part, ranks=4)[0]
    right = forward(weights, test_part.images)[-1].argmax(axis=1) == test_part.labels
    print(f"accuracy {right.mean():.1%} of {len(right)} test images")
