"""Layers without weights, such as activations, in stages of a pipeline."""

from typing import Any

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import schedules
from tests.runtime.worlds import failure_of, run


def product(w: Any, x: Any) -> tuple[Any, Any]:
    return x @ w, x


def product_back(w: Any, x: Any, dy: Any) -> tuple[Any, Any]:
    return dy @ w.T, x.T @ dy


def relu(w: Any, x: Any) -> tuple[Any, Any]:
    return np.maximum(x, 0), x


def relu_back(w: Any, x: Any, dy: Any) -> tuple[Any, None]:
    return dy * (x > 0), None


def square_loss(y: Any, target: Any) -> tuple[Any, float]:
    return 2 * (y - target) / y.size, float(((y - target) ** 2).mean())


def without(rank: overlap.Rank, halves: bool) -> parallel.Local:
    if not halves:
        return parallel.Local(rank, relu, relu_back)
    return parallel.Local(rank, relu, backward_input=relu_back, backward_weights=lambda w, kept: None)


async def train(rank: overlap.Rank, empty: Any, halves: bool, microbatches: int, alone: bool) -> dict[str, Any]:
    """Train two stages; of the second, the activation is a stage's only layer, or one of two."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 4)), rng.standard_normal((4, 4))
    schedule = schedules.make("1f1b", ranks=2, microbatches=microbatches)
    [stage] = schedule.stages_of(rank.rank)
    last = stage == 1
    layers: Any = parallel.Sequential(
        rank, {"product": parallel.Local(rank, product, product_back), "relu": without(rank, halves)}
    )
    params: Any = {"product": w} if empty == "left out" else {"product": w, "relu": empty}
    if last and alone:
        layers, params = without(rank, halves), {}
    pipeline = parallel.Pipeline(
        rank, schedule, {stage: layers}, {stage: params}, loss=square_loss, boundary=((8 // microbatches, 4), float)
    )
    passed = await pipeline.run(x, np.sin(x))
    found: Any = await rank.compute(lambda tree: tree, passed.gradients[stage])
    return {"loss": await passed.loss(), "gradients": found}


@pytest.mark.parametrize("empty", [None, {}, (), "left out"])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("alone", [False, True])
def test_backward_may_return_none_for_weights_that_are_not_there(
    empty: Any, halves: bool, microbatches: int, alone: bool
) -> None:
    found = run(train, 2, empty, halves, microbatches, alone)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 4)), rng.standard_normal((4, 4))
    hidden = np.maximum(x @ w, 0)
    y = np.maximum(hidden if alone else hidden @ w, 0)
    assert found[0]["loss"] == pytest.approx(((y - np.sin(x)) ** 2).mean(), abs=1e-12)
    assert found[0]["gradients"]["product"].shape == (4, 4)
    assert found[1]["gradients"] == {} if alone else found[1]["gradients"]["product"].shape == (4, 4)


def test_a_layer_with_weights_may_not() -> None:
    async def main(rank: overlap.Rank) -> None:
        schedule = schedules.make("1f1b", ranks=1, microbatches=2)
        layer = parallel.Local(rank, product, lambda w, x, dy: (dy, None))
        pipeline = parallel.Pipeline(
            rank, schedule, {0: layer}, {0: np.ones((4, 4))}, loss=square_loss, boundary=((4, 4), float)
        )
        await pipeline.run(np.ones((8, 4)), np.ones((8, 4)))

    failure = failure_of(run, main, 1)
    assert "backward: expected a gradient of the weights, got None; only a layer without weights may" in str(failure)
