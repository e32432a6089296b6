"""ZeRO in three stages: the same bits as data parallel, in a part of the memory, gathered under compute."""

import weakref
from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel.buckets.scattered import ScatteredBucket
from overlap.timeline import Timeline
from tests.errors import error_of

from .programs import backward, forward, loss_gradient, samples, train, weights

STAGES = (1, 2, 3)
BUCKET = 300  # bytes: two layers of 288 bytes each
SHARED = {"optimizer": parallel.Adam(1e-2), "bucket_bytes": BUCKET}


def data_parallel(rank, optimizer=SHARED["optimizer"], dtype=np.float64):
    return parallel.DataParallel(rank, weights(dtype=dtype), optimizer=optimizer, bucket_bytes=BUCKET)


def sharded(stage, dtype=np.float64, **options):
    return lambda rank: parallel.Sharded(rank, weights(dtype=dtype), stage=stage, **SHARED | options)


def nested(dtype=np.float64):
    """Layers that are trees, of which some ranks have nothing: three, one and five elements."""
    return {"first": {"w": np.full((3, 1), 0.5, dtype), "b": np.zeros(1, dtype)}, "rest": [np.ones((1, 5), dtype)]}


def step_of_a_tree(w, x):
    """The gradients of |prediction - x's mean|^2, in the form of the weights."""
    hidden = x @ w["first"]["w"] + w["first"]["b"]
    grad = hidden @ w["rest"][0] - x.mean(axis=1, keepdims=True)
    back = grad @ w["rest"][0].T
    return {"first": {"w": x.T @ back, "b": back.sum(axis=0)}, "rest": {0: hidden.T @ grad}}


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_a_part_of_the_tree_is_named_as_one(stage):
    optimizer = parallel.SGD(0.01)

    async def main(rank):
        make = partial(parallel.Sharded, stage=stage) if stage else parallel.DataParallel
        model = make(rank, nested(), optimizer=optimizer)
        for step in range(3):
            x = np.random.default_rng((step, rank.rank)).standard_normal((4, 3))
            whole = {"first": model["first"], "rest": model["rest"]}
            back = rank.compute(step_of_a_tree, whole, x)
            model.reduce("rest", back["rest"])
            model.reduce("first", back["first"])
            model.step()
        return await model.finish()

    expected = nested()
    for step in range(3):
        told = [
            step_of_a_tree(expected, np.random.default_rng((step, rank)).standard_normal((4, 3))) for rank in range(8)
        ]
        for key in ("w", "b"):
            expected["first"][key] -= 0.01 * sum(each["first"][key] for each in told) / 8
        expected["rest"][0] -= 0.01 * sum(each["rest"][0] for each in told) / 8
    for found in overlap.run(main, ranks=8, timeout_s=60):
        assert isinstance(found["rest"], list)
        for one, other in zip(found["first"].values(), expected["first"].values(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10)
        np.testing.assert_allclose(found["rest"][0], expected["rest"][0], rtol=1e-10)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_memory_is_that_of_the_formula(stage, ranks):
    async def main(rank):
        model = sharded(stage)(rank)
        await train(rank, lambda _: model, 2)
        return model.memory(), model.expected_memory()

    parameters = 4 * 6 * 6 * 8
    for measured, expected in overlap.run(main, ranks=ranks):
        assert measured == expected
        assert measured == parallel.ModelMemory(
            parameters=parameters / (ranks if stage == 3 else 1),
            gradients=parameters / (1 if stage == 1 else ranks),
            optimizer=2 * parameters / ranks,
        )


def test_memory_of_data_parallel_is_all_of_it():
    async def main(rank):
        return data_parallel(rank).memory()

    parameters = 4 * 6 * 6 * 8
    found = parallel.ModelMemory(parameters=parameters, gradients=parameters, optimizer=2 * parameters)
    assert overlap.run(main, ranks=2) == [found] * 2


def test_memory_is_told_beside_the_formula():
    measured = parallel.ModelMemory(parameters=1000, gradients=250, optimizer=500)
    expected = parallel.expected_memory(2, 4, parameters=1000, optimizer=1999)
    assert measured.beside(expected) == (
        "            measured  formula\n"
        "parameters   1,000 B  1,000 B\n"
        "gradients      250 B    250 B\n"
        "optimizer      500 B    500 B\n"
        "total        1,750 B  1,750 B"
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_gathered_weights_are_freed_after_use(depth, clock, monkeypatch):
    """However far the program runs ahead of its computes: it issues all steps at once."""
    layer, opened, alive, most = 6 * 6 * 8, ScatteredBucket._gathered_views, Counter(), Counter()

    class Whole(dict):
        """Gathered parameters, which count while a compute holds them."""

    def counted(bucket, whole):
        gathered, rank = Whole(opened(bucket, whole)), bucket._context.rank
        alive[rank] += whole.nbytes
        most[rank] = max(most[rank], alive[rank])
        weakref.finalize(gathered, alive.subtract, {rank: whole.nbytes})
        return gathered

    monkeypatch.setattr(ScatteredBucket, "_gathered_views", counted)

    async def main(rank):
        model = sharded(3, depth=depth, bucket_bytes=1)(rank)
        await issue_all(rank, model, 6)
        return most[rank], alive[rank]

    for peak, now in overlap.run(main, ranks=2, clock=clock):
        assert layer <= peak <= (depth + 1) * layer
        assert now == 0


async def issue_all(rank, model, steps, seconds=0.001):
    """Issue all steps at once, then wait for the last; the weights are not asked for."""
    for step in range(steps):
        x, y = samples(step, rank.world_size)[:, rank.rank :: rank.world_size]
        acts = {}
        for name in weights():
            acts[name], x = x, rank.compute(forward, model[name], x, seconds=seconds)
        grad = rank.compute(loss_gradient, x, y, seconds=seconds)
        for name in reversed(weights()):
            back = rank.compute(backward, model[name], acts[name], grad, seconds=seconds)
            grad = back[0]
            model.reduce(name, back[1])
        last = model.step()
    await back
    await last
    await rank.compute(int, seconds=0.0)  # by then, what the last compute had is dropped


# -- overlap ---------------------------------------------------------------------------------------------------------


FORWARD_NS, BACKWARD_NS = 50_000, 100_000


def second_step(stage, depth):
    """What rank 0 does in the second of three steps, as (begin, end) in ns of virtual time, by name, in order."""
    layers = {f"w{i}": (256, 256) for i in range(4)}

    async def main(rank):
        params = {name: rank.empty(shape) for name, shape in layers.items()}
        model = parallel.Sharded(
            rank, params, optimizer=parallel.SGD(0.1), stage=stage, depth=depth, bucket_bytes=1
        )  # fmt: skip
        x = rank.empty((256, 256))
        for step in range(3):
            with rank.step(step):
                for name in layers:
                    x = rank.compute(lambda _, x: x, model[name], x, name="forward", seconds=FORWARD_NS / 1e9)
                for name in reversed(layers):
                    x = rank.compute(lambda _, x: x, model[name], x, name="backward", seconds=BACKWARD_NS / 1e9)
                    model.reduce(name, x)
                model.step()
        await model.finish()
        return rank.recorder

    clock = overlap.Virtual(shapes_only=True)
    recorder = overlap.run(main, cluster="trn1.2xlarge", clock=clock)[0]
    spans = sorted(Timeline.collect([recorder], world_size=2).spans, key=lambda span: span.start_ns)
    begins = [span.start_ns for span in spans if span.name == "forward"][4::4]
    found = {}
    for span in spans:
        if begins[0] <= span.start_ns < begins[1] and span.end_ns > span.start_ns:
            name = span.name.split(" bucket")[0]
            found.setdefault(name, []).append((span.start_ns - begins[0], span.end_ns - begins[0]))
    return found, begins[1] - begins[0]


def test_weights_are_gathered_under_the_compute_before_them():
    found, step_ns = second_step(3, 1)
    gathers = found["gather"]
    for before, after in pairwise(found["forward"]):
        assert before[1] == after[0]  # nothing is waited for
    # Of layers 2 and 3 for forward; of 2, 1 and 0 for backward (3 is still there); of 1 and 0 for the next forward.
    under_what = [found["forward"][1], found["forward"][2], found["forward"][3], *found["backward"][1:3]]
    assert len(gathers) == 7
    for gathered, under in zip(gathers[:5], under_what, strict=True):
        assert gathered[0] == under[0]
        assert gathered[1] < under[1]
    for before, after in pairwise(found["backward"]):
        assert before[1] == after[0]

    late, late_step_ns = second_step(3, 0)
    for before, gathered, after in zip(late["forward"], late["gather"], late["forward"][1:], strict=False):
        assert (gathered[0], gathered[1]) == (before[1], after[0])
    assert late_step_ns - step_ns == sum(end - begin for begin, end in late["gather"][:6])  # all were waited for


def test_gradients_are_scattered_and_updated_under_backward():
    for stage in STAGES:
        found, _ = second_step(stage, 1)
        under = [*found["backward"][1:], None]
        passed = zip(found["backward"], found["scatter"], found["update"], under, strict=True)
        for handed, scattered, updated, computed in passed:
            assert (handed[1], scattered[1]) == (scattered[0], updated[0])
            if computed is not None:
                assert scattered[0] == computed[0]
                assert updated[1] < computed[1]


def test_what_is_hidden_is_the_same_in_all_stages():
    assert len({second_step(stage, 1)[1] for stage in STAGES}) == 1


# -- wrong use -------------------------------------------------------------------------------------------------------


def test_wrong_use_is_told_on_every_rank():
    async def main(rank):
        model = parallel.Sharded(rank, nested(), optimizer=parallel.SGD(0.1))
        told = []

        def refused(call, *args):
            told.append(str(error_of(overlap.UsageError, call, *args)))

        refused(model.__getitem__, "third")
        refused(model.reduce, "first", {"w": np.ones((3, 1))})
        model.reduce("first.w", np.ones((3, 1)))
        refused(model.reduce, "first.w", np.ones((3, 1)))
        refused(model.__getitem__, "first")
        refused(model.step)
        model.reduce("first.b", np.ones(1))
        model.reduce("rest", [np.ones((1, 5))])
        model.step()
        await model.finish()
        return told

    told = [
        "name: 'third' is no parameter; known are first, rest",
        "reduce: expected an item 'b' in what was handed over for 'first', got {'w': float64 (3, 1)}",
        "reduce: the gradient of 'first.w' has been handed over in step 0 already; of a weight that is used twice, add "
        "the gradients up and hand over the sum; or has model.step() been forgotten?",
        "name: the gradient of 'first.w' has been handed over in step 0, so its update may have begun; ask for the "
        "weight before that, or after step()",
        "step: no gradient of 'rest.0', 'first.b' in step 0; call model.reduce('rest.0', gradient) before step(), "
        "or pass unused='zeros'",
    ]
    assert overlap.run(main, ranks=2) == [told, told]
