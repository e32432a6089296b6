"""What the layer of training strategies costs, and how much it hides: in real time, and on the virtual clock."""

from collections.abc import Iterator
from time import perf_counter_ns
from typing import cast

from overlap import Future, Rank, parallel, run
from overlap.cli.bench.sampling import Sampling, Times
from overlap.config import RunConfig, setting_environment
from overlap.units import format_ns
from tests.benchmarks.figures import over
from tests.parallel.deep import LAYERS as DEEP
from tests.parallel.deep import MB, RANKS, spans_of, steady

from .figures import Figure
from .two_hosts.perceptron import LAYERS, RATE, Floats, Perceptron, batch

FREE_AIM = 1 / 1.02  # a step with the layer takes at most 2 % more, where communication is free
IDEAL_AIM = 0.98

X, Y = batch(0)

REGIMES = {
    "compute takes 11 times as long": (0.010, 400 * MB),
    "compute takes 3 times as long": (0.0005, 32 * MB),
    "the wire takes longer": (0.0001, 400 * MB),
}
"""Seconds of a layer's forward, and bytes of its gradient."""


def figures(sampling: Sampling) -> Iterator[Figure | str]:
    """Measure one after the other; text is a remark."""
    yield f"a step of {LAYERS} layers on one rank: nothing travels, and everything else is as on many"
    yield _free(sampling)
    yield f"{DEEP} layers on {RANKS} ranks of a trn2.48xlarge, virtual time; ideal: as long as compute, or as the wire"
    for text, (seconds, nbytes) in REGIMES.items():
        yield _ideal(text, seconds, nbytes)


# -- where communication is free ---------------------------------------------------------------------------------------


def _free(sampling: Sampling) -> Figure:
    with setting_environment(RunConfig()):
        [samples] = run(_both, sampling.warmup + sampling.iters, ranks=1)
    without, layer = (Times.of_samples(each[sampling.warmup :]) for each in samples)
    text = f"  DataParallel: as fast as without ({without.median_ns / 1e6:.1f} ms)"
    return Figure(name="layer/free", text=text, value=over(without, layer), unit="ratio", aim=FREE_AIM, times=layer)


async def _both(rank: Rank, steps: int) -> tuple[list[int], list[int]]:
    """Take steps without the layer and with it, in turn."""
    plain, layered = Perceptron(), Perceptron()
    weights = {str(layer): weight for layer, weight in enumerate(layered.weights)}
    model = parallel.DataParallel(rank, weights, optimizer=parallel.SGD(RATE))
    found: tuple[list[int], list[int]] = [], []
    for _ in range(steps):
        for times, step in zip(found, (_plain(rank, plain), _layered(rank, layered, model)), strict=True):
            begun_ns = perf_counter_ns()
            await step
            times.append(perf_counter_ns() - begun_ns)
    return found


async def _plain(rank: Rank, net: Perceptron) -> None:
    grad = _forward(rank, net, list(range(LAYERS)))
    gradients = []
    for layer in reversed(range(LAYERS)):
        gradients.append((layer, rank.compute(net.backward, layer, grad)))
        grad = rank.compute(net.propagate, layer)
    for layer, gradient in gradients:
        done = rank.compute(net.update, layer, gradient)
    await done


async def _layered(rank: Rank, net: Perceptron, model: parallel.DataParallel) -> None:
    grad = _forward(rank, net, [model[str(layer)] for layer in range(LAYERS)])
    for layer in reversed(range(LAYERS)):
        net.gradients[layer] = model.gradient(str(layer))
        model.reduce(str(layer), rank.compute(net.backward, layer, grad))
        grad = rank.compute(net.propagate, layer)
    model.step()
    await model.finish()


def _forward(rank: Rank, net: Perceptron, needed: list[object]) -> Future[Floats]:
    """Compute each layer once what it needs is there; return the gradient of what comes out."""
    rank.compute(net.enter, X)
    for layer, each in enumerate(needed):
        rank.compute(_through, net, layer, each)
    return rank.compute(net.differ, Y)


def _through(net: Perceptron, layer: int, weight: object) -> None:
    if not isinstance(weight, int):
        net.weights[layer] = cast("Floats", weight)
    net.through(layer)


# -- in virtual time ---------------------------------------------------------------------------------------------------


def _ideal(text: str, seconds: float, nbytes: int) -> Figure:
    """Compare a step in the middle of others with the longer of its computes and its communication."""
    row = steady(spans_of(seconds, nbytes))
    ideal_ns = max(row.compute_ns, row.comm_ns)
    return Figure(
        name=f"layer/ideal/{nbytes // MB}/{seconds}",
        text=f"  {text}: of the ideal ({format_ns(ideal_ns)})",
        value=ideal_ns / row.wall_ns,
        unit="ratio",
        aim=IDEAL_AIM,
        times=Times.of_samples([row.wall_ns]),
    )
