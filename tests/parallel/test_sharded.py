"""ZeRO in three stages: the same bits as data parallel, in a part of the memory, gathered under compute."""

import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel.buckets.scattered import Scattered
from overlap.timeline import Timeline

from ..core.companies import by_sockets, run_far
from .programs import alone, backward, forward, loss_gradient, samples, train, weights

STAGES = (1, 2, 3)
OPTIMIZERS = (parallel.SGD(0.1), parallel.SGD(0.1, momentum=0.9), parallel.Adam(1e-2), parallel.AdamW(1e-2))
BUCKET = 300  # bytes: two layers of 288 bytes each
SHARED = {"optimizer": parallel.Adam(1e-2), "bucket_bytes": BUCKET}


def data_parallel(rank, optimizer=SHARED["optimizer"], dtype=np.float64):
    return parallel.DataParallel(rank, weights(dtype=dtype), optimizer=optimizer, bucket_bytes=BUCKET)


def sharded(stage, dtype=np.float64, **options):
    return lambda rank: parallel.Sharded(rank, weights(dtype=dtype), stage=stage, **SHARED | options)


def same(found, expected):
    return all(list(one) == list(expected) and all((one[k] == w).all() for k, w in expected.items()) for one in found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{type(o).__name__}-{getattr(o, 'momentum', '')}")
@pytest.mark.parametrize("stage", STAGES)
def test_all_stages_are_data_parallel_bit_by_bit(stage, optimizer):
    expected = overlap.run(train, lambda rank: data_parallel(rank, optimizer), ranks=4, timeout_s=60)[0]
    found = overlap.run(train, sharded(stage, optimizer=optimizer), ranks=4, timeout_s=60)
    assert same(found, expected)
    for name, w in alone(optimizer).items():
        np.testing.assert_allclose(found[0][name], w, rtol=1e-10, atol=1e-12)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("clock", ["real", "virtual"])
@pytest.mark.parametrize("stage", STAGES)
def test_no_setting_changes_a_bit(stage, clock):
    """Of float32 on three ranks, whose shares are uneven."""
    dtype = np.float32
    expected = overlap.run(
        train, lambda rank: data_parallel(rank, dtype=dtype), 6, ranks=3, timeout_s=60, clock=clock
    )  # fmt: skip
    settings = [{"depth": 0}, {"depth": 3, "order": "fifo"}, {"in_flight": 1}, {"bucket_bytes": 1}]
    for options in settings:
        made = sharded(stage, dtype, **options)
        assert same(overlap.run(train, made, 6, ranks=3, timeout_s=60, clock=clock), expected[0])


@pytest.mark.parametrize(("processes", "each"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", STAGES)
def test_over_sockets(stage, processes, each):
    found = run_far(train_and_copy, processes, each, sharded(stage), wires=by_sockets)
    for one in found:
        for name, w in alone(SHARED["optimizer"], ranks=processes * each).items():
            np.testing.assert_allclose(one[name], w, rtol=1e-10, atol=1e-12)
    if each == 1:  # two numbers have one sum, whoever adds first
        assert same(found, run_far(train_and_copy, processes, each, data_parallel, wires=by_sockets)[0])


async def train_and_copy(rank, make):
    return {name: w.copy() for name, w in (await train(rank, make)).items()}


@pytest.mark.parametrize("stage", [*(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2)), 3])
def test_exact_sums_are_the_same_over_any_wires(stage):
    """In one process, and over sockets, where a ring would add in another order for each bucket."""
    exact = SHARED | {"exact": True}

    def whole(rank):
        return parallel.DataParallel(rank, weights(), **exact)

    expected = overlap.run(train, whole, ranks=4)[0]
    for bucket_bytes in (1, 2000):
        found = run_far(train_and_copy, 2, 2, sharded(stage, exact=True, bucket_bytes=bucket_bytes), wires=by_sockets)
        assert same(found, expected)


def test_a_rank_alone_shares_with_nobody():
    for stage in STAGES:
        assert same(overlap.run(train, sharded(stage), ranks=1), overlap.run(train, data_parallel, ranks=1)[0])


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


def test_all_ranks_begin_with_the_weights_of_the_first():
    async def main(rank, stage):
        model = parallel.Sharded(rank, weights(seed=rank.rank), stage=stage, **SHARED)
        return await model.finish()

    for stage in STAGES:
        assert same(overlap.run(main, stage, ranks=3), weights(seed=0))


async def train_in_parts(rank, make):
    """Two micro-batches a step, and gradients of which some are large."""
    model = make(rank)
    for step in range(4):
        for turn in range(2):
            with model.no_sync() if turn == 0 else nullcontext():
                back = []
                for place, name in enumerate(weights()):
                    random = np.random.default_rng((step, turn, rank.rank, place))
                    back.append(rank.compute(lambda w, r: w * r.standard_normal(w.shape), model[name], random))
                for name in reversed(weights()):
                    model.reduce(name, back.pop())
        model.step()
    return await model.finish()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_gradients_of_micro_batches_are_added_up_and_limited(ranks, clip_norm):
    options = SHARED | {"clip_norm": clip_norm}
    expected = overlap.run(train_in_parts, lambda rank: parallel.DataParallel(rank, weights(), **options), ranks=ranks)
    for stage in STAGES:
        found = overlap.run(train_in_parts, sharded(stage, clip_norm=clip_norm), ranks=ranks)
        assert same(found[1:], found[0])
        for name, w in expected[0].items():
            np.testing.assert_allclose(found[0][name], w, rtol=1e-12)
        if stage == 1 and clip_norm is None:
            assert same(found, expected[0])


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


@pytest.mark.parametrize("clock", ["real", "virtual"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_gathered_weights_are_freed_after_use(depth, clock, monkeypatch):
    """However far the program runs ahead of its computes: it issues all steps at once."""
    layer, opened, alive, most = 6 * 6 * 8, Scattered._open, Counter(), Counter()

    class Whole(dict):
        """Gathered parameters, which count while a compute holds them."""

    def counted(bucket, whole):
        gathered, rank = Whole(opened(bucket, whole)), bucket._context.rank
        alive[rank] += whole.nbytes
        most[rank] = max(most[rank], alive[rank])
        weakref.finalize(gathered, alive.subtract, {rank: whole.nbytes})
        return gathered

    monkeypatch.setattr(Scattered, "_open", counted)

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


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"stage": 4}, "stage: expected 1, 2 or 3, got 4"),
        ({"stage": "3"}, "stage: expected 1, 2 or 3, got '3'"),
        ({"depth": -1}, "depth: expected a whole number from 0, got -1"),
        ({"in_flight": 0}, "in_flight: expected a whole number from 1, got 0"),
        ({"ahead": 1.5}, "ahead: expected a whole number from 0, got 1.5"),
        ({"bucket_bytes": 0}, "bucket_bytes: expected a whole number from 1, got 0"),
        ({"clip_norm": 0.0}, "clip_norm: expected a number above 0, got 0.0"),
        ({"order": "lifo"}, "order: expected 'forward' or 'fifo', got 'lifo'"),
    ],
)
def test_what_cannot_be_meant_is_told(wrong, told):
    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            parallel.Sharded(rank, weights(), **{"optimizer": parallel.SGD(0.1)} | wrong)
        return str(caught.value)

    assert overlap.run(main, ranks=1) == [told]


def test_wrong_use_is_told_on_every_rank():
    async def main(rank):
        model = parallel.Sharded(rank, nested(), optimizer=parallel.SGD(0.1))
        told = []

        def refused(call, *args):
            with pytest.raises(overlap.UsageError) as caught:
                call(*args)
            told.append(str(caught.value))

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
        "reduce: what was handed over for 'first' has no item 'b': it is {'w': float64 (3, 1)}",
        "reduce: the gradient of 'first.w' has been handed over in step 0 already; of a weight that is used twice, add "
        "the gradients up and hand over the sum; or has model.step() been forgotten?",
        "name: the gradient of 'first.w' has been handed over in step 0, so its update may have begun; ask for the "
        "weight before that, or after step()",
        "step: no gradient of 'rest.0', 'first.b' in step 0; hand it over, or pass unused='zeros'",
    ]
    assert overlap.run(main, ranks=2) == [told, told]


def test_a_gradient_of_another_shape_is_told():
    async def main(rank):
        model = sharded(2)(rank)
        for name in weights():
            model.reduce(name, rank.compute(np.ones, (6, 6 - (name == "w2" and rank.rank == 1))))
        model.step()
        await model.finish()

    with pytest.raises(overlap.RankFailedError) as caught:
        overlap.run(main, ranks=2)
    told = "reduce: the gradient of 'w2' in step 0 has shape (6, 5), the parameter (6, 6)"
    assert told in str(caught.value)


def test_parameters_that_differ_between_ranks_are_named_on_every_rank():
    async def main(rank):
        params = {"a": np.zeros(2), "b": np.zeros(6 + (rank.rank == 2))}
        model = parallel.Sharded(rank, params, optimizer=parallel.SGD(0.1))
        with pytest.raises(overlap.UsageError) as caught:
            await model["a"]
        return str(caught.value)

    first = "params differ between rank {} and rank {}: 'b', float64 ({},), here is something else there"
    assert overlap.run(main, ranks=3) == [first.format(0, 2, 6), first.format(1, 2, 6), first.format(2, 0, 7)]


def test_a_gradient_that_is_not_finite_is_told():
    async def main(rank):
        model = sharded(3)(rank)
        for step in range(3):
            for name in reversed(weights()):
                gradient = np.ones((6, 6))
                gradient[4, 5] = np.nan if (step, rank.rank, name) == (1, 2, "w2") else 1.0
                model.reduce(name, gradient)
            model.step()
        await model.finish()

    with pytest.raises(overlap.RankFailedError) as caught:
        overlap.run(main, ranks=3)
    error = caught.value.__cause__
    assert isinstance(error, overlap.NonFiniteError)
    assert (error.rank, error.operation, error.step, error.index) == (2, "the gradient of 'w2'", 1, (4, 5))
    assert "test_sharded.py" in error.call_site
