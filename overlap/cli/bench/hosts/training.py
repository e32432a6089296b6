"""One process of ours between the hosts: `overlap run ... -m overlap.cli.bench.hosts.training SAMPLING`.

It takes every measure in turn, so that whatever else the machine does meets all alike; the process of rank 0 prints
what all ranks measured, as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from typing import TypeAlias

import numpy as np

from .... import Future, Rank, run
from ..sampling import Sampling
from .perceptron import LAYERS, Floats, Perceptron, batch

__all__ = ["MEASURES", "main"]

Data: TypeAlias = "tuple[Floats, Floats]"
Measure: TypeAlias = "Callable[[Rank, Perceptron, Data], Awaitable[None]]"


def _reduced(rank: Rank, model: Perceptron, layer: int, gradient: Floats | Future[object]) -> Future[object]:
    return rank.all_reduce(gradient, "mean", model.means[layer])


async def head(rank: Rank, model: Perceptron, data: Data) -> None:
    """Compute until the first gradient exists: forward, and backward through the last layer."""
    await rank.compute(model.backward, LAYERS - 1, rank.compute(model.forward, *data))


async def compute(rank: Rank, model: Perceptron, data: Data) -> None:
    """Compute all gradients, and update with what is there."""
    grad: Future[object] = rank.compute(model.forward, *data)
    for layer in reversed(range(LAYERS)):
        grad = rank.compute(model.backward, layer, grad)[0]
    for layer in reversed(range(LAYERS)):
        update = rank.compute(model.update, layer, model.gradients[layer])
    await update


async def communicate(rank: Rank, model: Perceptron, data: Data) -> None:
    """Reduce all gradients."""
    for reduced in [_reduced(rank, model, layer, model.gradients[layer]) for layer in reversed(range(LAYERS))]:
        await reduced


async def one_after_the_other(rank: Rank, model: Perceptron, data: Data) -> None:
    """Take a step that communicates when the backward pass is over."""
    grad: Future[object] = rank.compute(model.forward, *data)
    for layer in reversed(range(LAYERS)):
        grad = rank.compute(model.backward, layer, grad)[0]
    await grad
    pending = [(layer, _reduced(rank, model, layer, model.gradients[layer])) for layer in reversed(range(LAYERS))]
    for layer, reduced in pending:
        update = rank.compute(model.update, layer, reduced)
    await update


async def overlapped(rank: Rank, model: Perceptron, data: Data) -> None:
    """Take a step in which each gradient travels as soon as it exists."""
    grad: Future[object] = rank.compute(model.forward, *data)
    pending = []
    for layer in reversed(range(LAYERS)):
        back = rank.compute(model.backward, layer, grad)
        grad = back[0]
        pending.append((layer, _reduced(rank, model, layer, back[1])))
    for layer, reduced in pending:
        update = rank.compute(model.update, layer, reduced)
    await update


MEASURES: dict[str, Measure] = {
    measure.__name__: measure for measure in (head, compute, communicate, one_after_the_other, overlapped)
}


_ALONE = ("head", "compute")
"""These train a model of their own: what no other rank hears of must not be in the one that all have."""


async def train(rank: Rank, sampling: Sampling) -> dict[str, object] | None:
    """Take samples of every measure; tell rank 0."""
    model, own, data = Perceptron(), Perceptron(), batch(rank.rank)
    samples: dict[str, list[int]] = {name: [] for name in MEASURES}
    for _ in range(sampling.warmup + sampling.iters):
        for name, measure in MEASURES.items():
            await rank.barrier()
            begun_ns = perf_counter_ns()
            await measure(rank, own if name in _ALONE else model, data)
            samples[name].append(perf_counter_ns() - begun_ns)
    mine = np.array([samples[name][sampling.warmup :] for name in MEASURES], np.int64)
    told = await rank.gather(mine[None])
    digests = await rank.gather(np.frombuffer(model.digest(), np.uint8)[None])
    if told is None or digests is None:
        return None
    by_name = {name: told[:, index].tolist() for index, name in enumerate(MEASURES)}
    return {"samples_ns": by_name, "wrong": int((digests != digests[0]).any())}


def main(text: str) -> None:
    """Train and tell."""
    told = run(train, Sampling(**json.loads(text)))[0]
    if told is not None:
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
