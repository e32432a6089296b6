"""What strategies, losses and layers get or return by mistake: one error that names the argument or function."""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import Local, Pipeline, hooks, schedules
from tests.errors import error_from, error_of

# -- what strategies are given by mistake: one sentence at the call that names the argument, and nothing happens -------


def params(dtype=np.float32):
    return {"w": np.ones((2, 2), dtype), "b": np.zeros(2, dtype)}


ADAM = parallel.Adam(1e-3)
MODELS = {"data parallel": parallel.DataParallel, "sharded": partial(parallel.Sharded, stage=2)}


def refused(program, *, ranks=1):
    async def main(rank):
        return str(await error_from(overlap.UsageError, program(rank)))

    return overlap.run(main, ranks=ranks, timeout_s=60)


# What is made with it, and what is said.
REFUSED = {
    "no optimizer": (
        lambda make, rank: make(rank, params(), optimizer=None),
        "optimizer: expected an optimizer, such as parallel.Adam(1e-3), got one of type NoneType",
    ),
    "a class of optimizers": (
        lambda make, rank: make(rank, params(), optimizer=parallel.Adam),
        "optimizer: Adam is a class; make one, as in Adam(1e-3)",
    ),
    "no group": (
        lambda make, rank: make(rank, params(), optimizer=ADAM, group=[0]),
        "group: expected one, such as rank.group([0, 1]) or mesh['dp'], got [0]",
    ),
    "no rank": (
        lambda make, rank: make(rank.world, params(), optimizer=ADAM),
        "rank: expected the rank that main() is given, got one of type Group",
    ),
    "parameters that have no mean": (
        lambda make, rank: make(rank, params() | {"count": np.zeros(1, np.int64)}, optimizer=ADAM),
        "params: 'count' is int64; a gradient is a mean, so parameters are floats or complex numbers: keep what is not "
        "trained out of params",
    ),
    "Adam of complex numbers": (
        lambda make, rank: make(rank, params(np.complex64), optimizer=ADAM),
        "optimizer: Adam is for real numbers, and there are parameters of complex64; pass their real and imaginary "
        "parts, or use SGD",
    ),
    "a name that is no string": (
        lambda make, rank: make(rank, {1: np.ones(2, np.float32)}, optimizer=ADAM)[1],
        "name: expected a string, such as '1', got 1",
    ),
    "checkpoints of a model": (  # they are of a rank; `save` and `restore` take the model
        lambda make, rank: parallel.Checkpoints(make(rank, params(), optimizer=ADAM), "checkpoints"),
        "rank: expected the rank that main() is given, got one of type {make}",
    ),
    "checkpoints in what is no folder": (
        lambda make, rank: parallel.Checkpoints(rank, 3),
        "folder: expected a path, got 3",
    ),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("build", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused(make, build, text):
    async def program(rank):
        build(make, rank)

    name = "DataParallel" if make is parallel.DataParallel else "Sharded"
    assert refused(program) == [text.replace("{make}", name)]


BAD = {
    "an array, got NoneType": None,
    "an array, got list": [0.0, 0.0],
    "shape (2,), got (3,)": np.zeros(3, np.float32),
    "real numbers, as the parameter's, got complex64": np.zeros(2, np.complex64),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("text", "gradient"), BAD.items())
def test_what_is_no_gradient_is_refused_at_the_call(make, text, gradient):
    async def program(rank):
        make(rank, params(), optimizer=ADAM).reduce("b", gradient)

    assert refused(program) == [f"reduce: gradient of 'b' in step 0: expected {text}"]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("names", [("b",), ("w", "b")])
def test_a_compute_that_has_forgotten_to_return_its_gradient_is_no_gradient_of_zeros(make, names):
    async def program(rank):
        model = make(rank, {name: params()[name] for name in names}, optimizer=ADAM)
        for name in names[:-1]:
            model.reduce(name, params()[name])
        model.reduce("b", rank.compute(lambda: None, name="backward"))
        model.step()
        await model.finish()

    line = program.__code__.co_firstlineno + 4
    error = error_of(overlap.RankFailedError, overlap.run, program, ranks=1, timeout_s=60)
    told = "reduce: gradient of 'b' in step 0: expected an array, got NoneType; it was handed over at "
    assert re.fullmatch(rf"{re.escape(told)}[\w/]*test_misuse\.py:{line}", str(error.cause))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_compute_of_more_than_the_gradients_is_told_with_the_line_that_hands_it_over(make):
    async def program(rank):
        model = make(rank, {"a": params()}, optimizer=ADAM)
        model.reduce("a", rank.compute(lambda: (np.ones(2, np.float32), params()), name="backward"))
        model.step()
        await model.finish()

    line = program.__code__.co_firstlineno + 2
    error = error_of(overlap.RankFailedError, overlap.run, program, ranks=1, timeout_s=60)
    told = (
        "reduce: expected an item 'w' in what was handed over for 'a', got (float32 (2,), {'w': float32 (2, 2), "
        "'b': float32 (2,)}); it was handed over at "
    )
    assert re.fullmatch(rf"{re.escape(told)}[\w/]*test_misuse\.py:{line}", str(error.cause))


def test_a_part_that_lacks_an_item_is_told_without_the_error_inside():
    async def program(rank):
        model = parallel.DataParallel(rank, {"a": params()}, optimizer=ADAM)
        error = error_of(overlap.UsageError, model.reduce, "a", (params()["w"], rank.compute(np.ones, 2)))
        assert error.__suppress_context__
        assert error.__cause__ is None
        raise error

    assert refused(program) == [
        "reduce: expected an item 'w' in what was handed over for 'a', got (float32 (2, 2), a future)"
    ]


async def nothing(bucket):
    return None


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("bfloat16", "hook: expected an async function of a bucket, got str"),
        (hooks.bfloat16, "hook: bfloat16 makes a hook, and is none; write hook=bfloat16()"),
        (lambda bucket: bucket.buffer, "hook: expected an async function; of bucket 0 it returned ndarray"),
        (nothing, "hook: its result for bucket 0 is of type NoneType, not an array; return one"),
    ],
)
def test_what_is_no_hook(hook, text):
    async def program(rank):
        model = parallel.DataParallel(rank, params(), optimizer=ADAM, hook=hook)
        for name, array in params().items():
            model.reduce(name, array)
        model.step()
        await model.finish()

    assert refused(program) == [text]


@pytest.mark.parametrize("call", ["save", "restore"])
def test_checkpoints_of_what_is_no_model(call, tmp_path):
    async def program(rank):
        await getattr(parallel.Checkpoints(rank, tmp_path), call)(params())

    assert refused(program) == [
        "model: expected one of overlap.parallel, such as DataParallel, got dict; arrays of your own are kept by "
        "rank.state.save"
    ]


def test_what_is_being_written_is_there_for_other_checkpoints_of_the_same_ranks(tmp_path):
    async def main(rank):
        model = parallel.DataParallel(rank, params(), optimizer=ADAM)
        for name, array in params().items():
            model.reduce(name, array)
        model.step()
        await parallel.Checkpoints(rank, tmp_path).save(model)
        again = parallel.DataParallel(rank, params(), optimizer=ADAM)
        restored = await parallel.Checkpoints(rank, tmp_path).restore(again)
        return restored.step

    assert overlap.run(main, ranks=2, timeout_s=60) == [1, 1]


def test_the_place_of_a_bad_argument_is_the_programs_line():
    async def main(rank):
        parallel.DataParallel(rank, params(), optimizer=ADAM, bucket_bytes="25MiB")

    assert " failed at test_misuse.py:" in str(error_of(overlap.RankFailedError, overlap.run, main, ranks=1))


# -- what losses and layers return by mistake: one error that names the function or the stage --------------------------

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

    error = error_of(overlap.RankFailedError, overlap.run, main, ranks=ranks, timeout_s=60)
    assert isinstance(error.cause, overlap.UsageError)
    return str(error.cause)


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
        f"loss: {loss.__name__} (test_misuse.py:{line_of(loss)}) returned {returned}; expected (gradient, loss), "
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
        f"{argument}: {function.__name__} (test_misuse.py:{line_of(function)}) returned float64 (2, 3); "
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
