"""What losses and layers return by mistake: one error that names the function or the stage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import overlap
from overlap.parallel import Local, Pipeline, schedules

Array = np.ndarray


def forward(w: dict[str, Array], x: Array) -> tuple[Array, Array]:
    return x @ w["w"], x


def backward(w: dict[str, Array], x: Array, dy: Array) -> tuple[Array, dict[str, Array]]:
    return dy @ w["w"].T, {"w": x.T @ dy}


def square(y: Array, t: Array) -> tuple[Array, float]:
    return y - t, float(((y - t) ** 2).mean())


def only_gradient(y: Array, t: Array) -> Array:
    return y - t


def swapped(y: Array, t: Array) -> tuple[float, Array]:
    return square(y, t)[1], y - t


def swapped_scalar(y: Array, t: Array) -> tuple[np.float64, Array]:
    return np.float64(square(y, t)[1]), y - t


def of_a_column(y: Array, t: Array) -> tuple[Array, float]:
    return (y - t)[:, :1], 0.0


def line_of(function: Callable[..., object]) -> int:
    return function.__code__.co_firstlineno


def told(ranks: int = 2, *, microbatches: int = 2, schedule: str = "1f1b", **given: Callable[..., object]) -> str:
    """Run a pipeline of stages of width 3 over two rows in each microbatch; return the error that ends it."""
    functions = {"forward": forward, "backward": backward, "loss": square} | given

    async def main(rank: overlap.Rank) -> None:
        plan = schedules.make(schedule, ranks=ranks, microbatches=microbatches)
        mine = plan.stages_of(rank.rank)
        pipeline = Pipeline(
            rank,
            plan,
            {stage: Local(rank, functions["forward"], functions["backward"]) for stage in mine},  # type: ignore[arg-type]
            {stage: {"w": np.eye(3)} for stage in mine},
            loss=functions["loss"],  # type: ignore[arg-type]
            boundary=((2, 3), np.float64),
        )
        x = np.ones((2 * microbatches, 3))
        passed = await pipeline.run(x, x)
        for each in passed.gradients.values():
            await each  # type: ignore[misc]

    with pytest.raises(overlap.RankFailedError) as caught:
        overlap.run(main, ranks=ranks, timeout_s=60)
    assert isinstance(caught.value.cause, overlap.UsageError)
    return str(caught.value.cause)


# -- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "returned"),
    [
        (only_gradient, "float64 (2, 3)"),
        (swapped, "(float, float64 (2, 3))"),
        (swapped_scalar, "(float64 (), float64 (2, 3))"),
        (of_a_column, "(float64 (2, 1), float)"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_does_not_return_gradient_and_loss_is_named(loss: Callable[..., object], returned: str, ranks: int):
    assert told(ranks, loss=loss) == (
        f"loss: {loss.__name__} (test_returned.py:{line_of(loss)}) returned {returned}; expected (gradient, loss), "
        "in this order, with the gradient of the output float64 (2, 3)"
    )


# -- layers ----------------------------------------------------------------------------------------------------------


def forgets_kept(w: dict[str, Array], x: Array) -> Array:
    return x @ w["w"]


def forgets_weights(w: dict[str, Array], x: Array, dy: Array) -> Array:
    return dy @ w["w"].T


@pytest.mark.parametrize(
    ("argument", "function", "expected"),
    [
        ("forward", forgets_kept, "(output, values for backward)"),
        ("backward", forgets_weights, "(gradient of the input, gradients of the weights)"),
    ],
)
def test_a_layer_that_returns_an_array_of_two_rows_is_named(
    argument: str, function: Callable[..., object], expected: str
):
    assert told(**{argument: function}) == (
        f"{argument}: {function.__name__} (test_returned.py:{line_of(function)}) returned float64 (2, 3); "
        f"expected {expected}"
    )


def of_one_row(w: dict[str, Array], x: Array) -> tuple[Array, Array]:
    return x[0] @ w["w"], x


def swapped_backward(w: dict[str, Array], x: Array, dy: Array) -> tuple[dict[str, Array], Array]:
    return {"w": x.T @ dy}, dy @ w["w"].T


@pytest.mark.parametrize(
    ("argument", "function", "returned"),
    [
        ("forward", of_one_row, "stage 0's forward returned float64 (3,)"),
        (
            "backward",
            swapped_backward,
            "stage 1's backward returned {'w': float64 (3, 3)} as the gradient of its input",
        ),
    ],
)
def test_a_stage_that_returns_other_than_its_boundary_is_named(
    argument: str, function: Callable[..., object], returned: str
):
    assert told(**{argument: function}) == f"boundary: {returned}, boundary= says float64 (2, 3); correct one of them"
