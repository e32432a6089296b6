"""What strategies are given by mistake: one sentence at the call that names the argument, and nothing happens."""

import re
from functools import partial

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import hooks


def params(dtype=np.float32):
    return {"w": np.ones((2, 2), dtype), "b": np.zeros(2, dtype)}


ADAM = parallel.Adam(1e-3)
MODELS = {
    "data parallel": parallel.DataParallel,
    "sharded": partial(parallel.Sharded, stage=2),
}


def refused(program, *, ranks=1):
    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            await program(rank)
        return str(caught.value)

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
    "is of type NoneType, not an array": None,
    "is of type list, not an array": [0.0, 0.0],
    "has shape (3,), the parameter (2,)": np.zeros(3, np.float32),
    "is complex64, the parameter float32": np.zeros(2, np.complex64),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("text", "gradient"), BAD.items())
def test_what_is_no_gradient_is_refused_at_the_call(make, text, gradient):
    async def program(rank):
        make(rank, params(), optimizer=ADAM).reduce("b", gradient)

    assert refused(program) == [f"reduce: the gradient of 'b' in step 0 {text}"]


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
    with pytest.raises(overlap.RankFailedError) as caught:
        overlap.run(program, ranks=1, timeout_s=60)
    told = "reduce: the gradient of 'b' in step 0 is of type NoneType, not an array; it was handed over at "
    assert re.fullmatch(rf"{re.escape(told)}[\w/]*test_misuse\.py:{line}", str(caught.value.cause))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_compute_of_more_than_the_gradients_is_told_with_the_line_that_hands_it_over(make):
    async def program(rank):
        model = make(rank, {"a": params()}, optimizer=ADAM)
        model.reduce("a", rank.compute(lambda: (np.ones(2, np.float32), params()), name="backward"))
        model.step()
        await model.finish()

    line = program.__code__.co_firstlineno + 2
    with pytest.raises(overlap.RankFailedError) as caught:
        overlap.run(program, ranks=1, timeout_s=60)
    told = (
        "reduce: what was handed over for 'a' has no item 'w': it is (float32 (2,), {'w': float32 (2, 2), 'b': float32 "
        "(2,)}); it was handed over at "
    )
    assert re.fullmatch(rf"{re.escape(told)}[\w/]*test_misuse\.py:{line}", str(caught.value.cause))


def test_a_part_that_lacks_an_item_is_told_without_the_error_inside():
    async def program(rank):
        model = parallel.DataParallel(rank, {"a": params()}, optimizer=ADAM)
        with pytest.raises(overlap.UsageError) as caught:
            model.reduce("a", (params()["w"], rank.compute(np.ones, 2)))
        assert caught.value.__suppress_context__
        assert caught.value.__cause__ is None
        raise caught.value

    assert refused(program) == [
        "reduce: what was handed over for 'a' has no item 'w': it is (float32 (2, 2), a future)"
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

    with pytest.raises(overlap.RankFailedError) as caught:
        overlap.run(main, ranks=1)
    assert " failed at test_misuse.py:" in str(caught.value)
