"""One process of ours between the hosts: `overlap run ... -m tests.benchmarks.two_hosts.training SAMPLING [STEPS]`.

It takes every measure in turn, so that whatever else the machine does meets all alike; the process of rank 0 prints
what all ranks measured, as a line of JSON.
"""

import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from time import perf_counter_ns
from typing import TypeAlias, cast

import numpy as np

from overlap import Future, Rank, run
from overlap.cli.bench.sampling import Sampling
from overlap.parallel import SGD, DataParallel

from .perceptron import LAYERS, RATE, Floats, Perceptron, batch

Data: TypeAlias = "tuple[Floats, Floats]"
Measure: TypeAlias = "Callable[[Rank, Perceptron, Data], Awaitable[None]]"


def _backward(rank: Rank, model: Perceptron, data: Data) -> Iterator[tuple[int, Future[Floats]]]:
    """Compute forward and backward; yield each layer with the gradient of its weights, which comes before the next."""
    yield from _backwards(rank, model, rank.compute(model.forward, *data))


def _backwards(rank: Rank, model: Perceptron, grad: Future[Floats]) -> Iterator[tuple[int, Future[Floats]]]:
    for layer in reversed(range(LAYERS)):
        yield layer, rank.compute(model.backward, layer, grad)
        if layer:  # nobody wants the gradient of data
            grad = rank.compute(model.propagate, layer)


def _reduced(rank: Rank, model: Perceptron, layer: int, gradient: Floats | Future[Floats]) -> Future[object]:
    return rank.all_reduce(gradient, "mean", model.means[layer])


async def _updated(rank: Rank, model: Perceptron, pending: Iterable[tuple[int, Floats | Future[object]]]) -> None:
    for layer, gradient in pending:
        update = rank.compute(model.update, layer, gradient)
    await update


async def head(rank: Rank, model: Perceptron, data: Data) -> None:
    """Compute forward, and backward through the last layer."""
    grad = rank.compute(model.forward, *data)
    rank.compute(model.backward, LAYERS - 1, grad)
    await rank.compute(model.propagate, LAYERS - 1)


async def compute(rank: Rank, model: Perceptron, data: Data) -> None:
    """Take a step alone."""
    await _updated(rank, model, list(_backward(rank, model, data)))


async def communicate(rank: Rank, model: Perceptron, data: Data) -> None:
    """Reduce all gradients."""
    for reduced in [_reduced(rank, model, layer, model.gradients[layer]) for layer in reversed(range(LAYERS))]:
        await reduced


async def one_after_the_other(rank: Rank, model: Perceptron, data: Data) -> None:
    """Take a step that communicates when the backward pass is over."""
    gradients = [(layer, await gradient) for layer, gradient in list(_backward(rank, model, data))]
    await _updated(rank, model, [(layer, _reduced(rank, model, layer, gradient)) for layer, gradient in gradients])


async def overlapped(rank: Rank, model: Perceptron, data: Data) -> None:
    """Take a step in which each gradient travels as soon as it exists."""
    gradients = _backward(rank, model, data)
    await _updated(rank, model, [(layer, _reduced(rank, model, layer, gradient)) for layer, gradient in gradients])


async def without_barrier(rank: Rank, model: Perceptron, data: Data, steps: int) -> list[int]:
    """Take steps in which every gradient is awaited just before the next forward through its layer; return their times.

    The gradients of the first layers come last and are wanted first: their priorities let them overtake.
    """
    ends_ns: list[int] = []
    wanted: Sequence[Future[object]] = []
    for _ in range(1 + steps):
        grad = _forward(rank, model, data, wanted)
        gradients = _backwards(rank, model, grad)
        wanted = [rank.all_reduce(gradient, "mean", priority=layer) for layer, gradient in gradients][::-1]
        await grad  # what has been issued goes on
        ends_ns.append(perf_counter_ns())
    await _updated(rank, model, enumerate(wanted))
    return [end - begun for begun, end in pairwise(ends_ns)]


async def with_layer(rank: Rank, net: Perceptron, model: DataParallel, data: Data, steps: int) -> list[int]:
    """Take the same steps with `DataParallel`; return their times."""
    ends_ns: list[int] = []
    for _ in range(1 + steps):
        rank.compute(net.enter, data[0])
        for layer in range(LAYERS):
            rank.compute(_through, net, layer, model[str(layer)])
        grad = differed = rank.compute(net.differ, data[1])
        for layer in reversed(range(LAYERS)):
            net.gradients[layer] = cast("Floats", model.gradient(str(layer)))
            model.reduce(str(layer), rank.compute(net.backward, layer, grad))
            if layer:
                grad = rank.compute(net.propagate, layer)
        model.step()
        await differed  # as above: what has been issued goes on
        ends_ns.append(perf_counter_ns())
    await model.finish()
    return [end - begun for begun, end in pairwise(ends_ns)]


def _through(net: Perceptron, layer: int, weight: Floats) -> None:
    net.weights[layer] = weight
    net.through(layer)


async def _freely(rank: Rank, model: Perceptron, data: Data, steps: int) -> dict[str, list[int]]:
    """Take so many steps without a barrier by futures alone, and as many with the layer, in turn."""
    net = Perceptron()
    weights = {str(layer): weight for layer, weight in enumerate(net.weights)}
    layer = DataParallel(rank, weights, optimizer=SGD(RATE))
    found: dict[str, list[int]] = {without_barrier.__name__: [], with_layer.__name__: []}
    while len(found[with_layer.__name__]) < steps:
        await rank.barrier()
        found[without_barrier.__name__] += await without_barrier(rank, model, data, _TURN)
        await rank.barrier()
        found[with_layer.__name__] += await with_layer(rank, net, layer, data, _TURN)
    return {name: samples[:steps] for name, samples in found.items()}


def _forward(rank: Rank, model: Perceptron, data: Data, wanted: Sequence[Future[object]]) -> Future[Floats]:
    """Update each layer as soon as its gradient is there, and compute it."""
    x, y = data
    rank.compute(model.enter, x)
    for layer in range(LAYERS):
        if wanted:
            rank.compute(model.update, layer, wanted[layer])
        rank.compute(model.through, layer)
    return rank.compute(model.differ, y)


MEASURES: dict[str, Measure] = {
    measure.__name__: measure for measure in (head, compute, communicate, one_after_the_other, overlapped)
}


_TURN = 5  # steps of each kind, after one that does not count

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
    samples |= await _freely(rank, model, data, sampling.warmup + sampling.iters)
    mine = np.array([one[sampling.warmup :] for one in samples.values()], np.int64)
    told = await rank.gather(mine[None])
    digests = await rank.gather(np.frombuffer(model.digest(), np.uint8)[None])
    if told is None or digests is None:
        return None
    by_name = {name: told[:, index].tolist() for index, name in enumerate(samples)}
    return {"samples_ns": by_name, "wrong": int((digests != digests[0]).any())}


async def train_freely(rank: Rank, steps: int) -> None:
    """Take steps without a barrier, and nothing else: what a trace is kept of, and what is simulated."""
    model, data = Perceptron(), batch(rank.rank)
    await rank.barrier()
    await without_barrier(rank, model, data, steps)


def main(text: str, steps: str = "") -> None:
    """Train and tell; or take so many steps without a barrier."""
    if steps:
        run(train_freely, int(steps))
        return
    told = run(train, Sampling(**json.loads(text)))[0]
    if told is not None:
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
