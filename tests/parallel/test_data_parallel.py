"""Data parallel against one rank that trains on the whole batch, and what it says of wrong use."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.config import overriding
from overlap.parallel.buckets import averaged

from ..core.companies import by_sockets, run_far
from ..core.worlds import TIMEOUT_S, failing
from .programs import alone, backward, forward, loss_gradient, samples, train, weights

OPTIMIZERS = (parallel.SGD(0.1), parallel.SGD(0.1, momentum=0.9), parallel.Adam(1e-2), parallel.AdamW(1e-2))
SGD = parallel.SGD(0.1)


def run(main, ranks=2, *args, **options):
    return overlap.run(main, *args, ranks=ranks, timeout_s=TIMEOUT_S, **options)


def maker(params=weights, optimizer=SGD, **options):
    return lambda rank: parallel.DataParallel(rank, params(), optimizer=optimizer, **options)


def assert_same_bits(found, expected):
    assert list(found) == list(expected)
    assert {name: w.tobytes() for name, w in found.items()} == {name: w.tobytes() for name, w in expected.items()}


def assert_close(found, expected):
    assert list(found) == list(expected)
    for name, w in expected.items():
        np.testing.assert_allclose(found[name], w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["SGD", "momentum", "Adam", "AdamW"])
@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_ranks_together_learn_what_one_learns_alone(optimizer, clock):
    for found in run(train, 4, maker(optimizer=optimizer), clock=clock):
        assert_close(found, alone(optimizer))


def test_over_efa_they_learn_what_one_learns_alone():
    adam = parallel.Adam(1e-2)
    for found in run_far(train, 2, 2, maker(optimizer=adam, bucket_bytes=300), wires=by_sockets):
        assert_close(found, alone(adam))


def test_the_first_weights_are_those_of_the_first_rank():
    def make(rank):
        return parallel.DataParallel(rank, weights(seed=rank.rank), optimizer=SGD)

    for found in run(train, 2, make):
        assert_close(found, alone(SGD, ranks=2))


@pytest.mark.parametrize("options", [{"order": "fifo"}, {"in_flight": 1}, {"rebuild_buckets": False}, {"ahead": 0}])
def test_order_and_bounds_change_when_things_happen_and_nothing_else(options):
    plain = run(train, 3, maker(bucket_bytes=300))[0]
    for found in run(train, 3, maker(bucket_bytes=300, **options), 5):
        assert_same_bits(found, plain)


async def train_and_wait(rank, make):
    """The same training where nothing overlaps."""
    model = make(rank)
    for step in range(5):
        x, y = samples(step, rank.world_size)[:, rank.rank :: rank.world_size]
        acts = {}
        for name in weights():
            acts[name] = x
            x = await rank.compute(forward, model[name], x)
        grad = loss_gradient(x, y)
        for name in reversed(weights()):
            grad, dw = await rank.compute(backward, model[name], acts[name], grad)
            model.reduce(name, dw)
        model.step()
        await model.finish()
    return await model.finish()


def test_overlap_changes_no_bit():
    assert_same_bits(run(train, 3, maker())[0], run(train_and_wait, 3, maker())[0])


def test_a_program_that_awaits_its_steps_learns_the_same():
    async def bounded(rank):
        return await train(rank, maker(), bound=True)

    assert_same_bits(run(bounded)[0], run(train, 2, maker())[0])


def test_a_hook_takes_the_place_of_all_reduce():
    seen = []

    async def hook(bucket):
        seen.append((bucket.rank.rank, bucket.index, bucket.step, bucket.names))
        first = await bucket.group.all_reduce(bucket.buffer, op="sum")
        return bucket.group.all_reduce(first / bucket.group.size, op="max")

    with_hook = run(train, 2, maker(bucket_bytes=300, hook=hook))
    assert_same_bits(with_hook[0], run(train, 2, maker(bucket_bytes=300))[0])
    assert set(seen) == {
        (rank, index, step, names)
        for rank in range(2)
        for index, names in enumerate([("w3", "w2"), ("w1", "w0")])
        for step in range(1, 6)
    }


# -- what is handed over, and when -----------------------------------------------------------------------------------


async def steps_of(rank, model, gradients, names=None):
    """Hand over the same gradients in every step, in the order of `names`; return the weights."""
    for _ in range(3):
        for name in names or gradients:
            model.reduce(name, gradients[name])
        model.step()
    return await model.finish()


def test_buckets_are_made_anew_in_the_order_of_the_first_step():
    gradients = {name: np.ones(4) for name in "abcd"}

    async def main(rank):
        model = parallel.DataParallel(rank, {n: np.zeros(4) for n in "abcd"}, optimizer=SGD, bucket_bytes=64)
        names = [bucket.names for bucket in model.plans]
        found = await steps_of(rank, model, gradients, "bdac")
        return names, [bucket.names for bucket in model.plans], found["a"].tolist()

    for before, after, a in run(main):
        assert before == [("d", "c"), ("b", "a")]
        assert after == [("b", "d"), ("a", "c")]
        assert a == (np.zeros(4) - 0.1 - 0.1 - 0.1).tolist()


def test_gradients_may_be_written_where_they_are_packed():
    def fill(place, value, _weight):
        place[...] = value
        return place

    async def main(rank):
        places, inside = [], []

        async def mean(bucket):
            inside.append(all(np.shares_memory(bucket.buffer, place) for place in places[-2:]))
            return bucket.group.all_reduce(bucket.buffer, op="mean")

        model = parallel.DataParallel(rank, {"w": np.zeros(3), "v": np.zeros(2)}, optimizer=SGD, hook=mean)
        for step in range(3):
            for name in ("w", "v"):
                places.append(model.gradient(name))
                model.reduce(name, rank.compute(partial(fill, places[-1], step + rank.rank), model[name]))
            model.step()
            found = await model.finish()
        return found["w"].tolist(), inside

    expected = np.zeros(3)
    for step in range(3):
        expected -= 0.1 * (step + 0.5)
    assert run(main) == [(expected.tolist(), [True] * 3)] * 2


def test_gradients_of_micro_batches_are_added_up_before_they_travel():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(2), "v": np.zeros(2)}, optimizer=SGD)
        for _ in range(2):
            with model.no_sync():
                for _ in range(2):
                    model.reduce("w", np.array([1.0, 2.0]))
            model.reduce("v", np.ones(2))
            model.reduce("w", np.array([10.0, 20.0 + rank.rank]))
            model.step()
        sent = [span.name for span in rank.recorder.spans() if span.name.startswith("bucket")]
        return (await model.finish())["w"].tolist(), len(sent) <= 2

    expected = np.zeros(2)
    for _ in range(2):
        expected -= 0.1 * np.array([12.0, 24.5])
    assert run(main) == [(expected.tolist(), True)] * 2


def test_parameters_without_a_gradient_count_as_zeros_if_that_is_allowed():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(2), "v": np.ones(2)}, optimizer=SGD, unused="zeros")
        if rank.rank == 0:
            model.reduce("w", np.full(2, 4.0))
        model.step()
        model.reduce("v", np.full(2, 1.0))
        model.step()
        return {name: w.tolist() for name, w in (await model.finish()).items()}

    assert run(main) == [{"w": [-0.2, -0.2], "v": [0.9, 0.9]}] * 2


def test_ranks_with_fewer_samples_join_the_steps_of_the_others():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(2)}, optimizer=SGD, uneven=True)
        for step in range(1 + rank.rank):
            model.reduce("w", np.full(2, 1.0 + rank.rank + step))
            model.step()
        return (await model.finish())["w"].tolist(), model.steps

    # step 1: ranks 0, 1, 2 have 1, 2, 3; step 2: ranks 1, 2 have 3, 4; step 3: rank 2 has 5
    expected = np.zeros(2)
    for total, active in ((6, 3), (7, 2), (5, 1)):
        expected -= 0.1 * ((total / 3) * (3 / active))
    assert run(main, 3) == [(expected.tolist(), 3)] * 3


def test_a_large_gradient_that_comes_last_is_updated_in_parts(monkeypatch):
    monkeypatch.setattr(averaged, "BUCKET_BYTES", 24)  # so one of 10 numbers has three parts, of 3, 3 and 4

    async def main(rank, clip_norm):
        params = {"v": np.zeros(10), "w": np.zeros(10)}
        model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(1.0), clip_norm=clip_norm, bucket_bytes=1)
        for step in range(2):
            with rank.step(step):
                model.reduce("w", rank.compute(lambda: np.arange(10.0) + rank.rank))
                model.reduce("v", np.zeros(10))
                model.step()
        found = await model.finish()
        spans = rank.recorder.spans()
        sent = [s.info.nbytes for s in spans if s.name.startswith("bucket") and s.step == 1]
        return found["w"].tolist(), sorted(sent)

    mean = np.arange(10.0) + 0.5
    assert run(main, 2, None) == [((-mean - mean).tolist(), [24, 24, 32, 80])] * 2
    factor = 1 / (np.sqrt((mean**2).sum()) + 1e-6)
    for w, _ in run(main, 2, 1.0):
        np.testing.assert_allclose(w, -2 * mean * factor, rtol=1e-12)


def test_the_norm_of_all_gradients_is_limited():
    async def main(rank):
        params = {"w": np.zeros(2), "v": np.zeros(1)}
        model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(1.0), clip_norm=1.0, bucket_bytes=8)
        model.reduce("v", np.full(1, 4.0 + 4.0 * rank.rank))  # the mean is 6
        model.reduce("w", np.array([0.0, 8.0]))  # so the norm is 10
        model.step()
        clipped = await model.finish()
        before = {name: w.copy() for name, w in clipped.items()}
        model.reduce("v", np.full(1, 0.5))
        model.reduce("w", np.zeros(2))
        model.step()
        await model.finish()
        return before["w"].tolist(), before["v"].tolist(), float(model["v"][0] - before["v"][0])

    factor = 1.0 / (10.0 + 1e-6)
    for w, v, further in run(main):
        assert (w, v) == ([0.0, -8.0 * factor], [-6.0 * factor])
        assert further == (-6.0 * factor - 0.5) - (-6.0 * factor)


# -- wrong use -------------------------------------------------------------------------------------------------------


def refused(**options):
    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            parallel.DataParallel(rank, **({"params": {"w": np.zeros(1)}, "optimizer": SGD} | options))
        return str(caught.value)

    return run(main, 1)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": np.zeros(1)}, "params: expected a dict, list or tuple of arrays, got ndarray"),
        ({"params": {}}, "params: there is no array in it"),
        ({"params": {"a": [1.5]}}, "params: 'a.0' is of type float; every leaf must be a numpy array"),
        (
            {"params": {"a.b": np.zeros(1), "a": {"b": np.zeros(1)}}},
            "params: two arrays are called 'a.b'; keys may not contain what makes names equal",
        ),
        ({"order": "lifo"}, "order: expected 'forward' or 'fifo', got 'lifo'"),
        ({"unused": "skip"}, "unused: expected 'error' or 'zeros', got 'skip'"),
        ({"bucket_bytes": 0}, "bucket_bytes: expected a whole number from 1, got 0"),
        ({"in_flight": 0}, "in_flight: expected a whole number from 1, got 0"),
        ({"ahead": -1}, "ahead: expected a whole number from 0, got -1"),
        ({"clip_norm": 0.0}, "clip_norm: expected a number above 0, got 0.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, message):
    assert refused(**options) == message


def test_gradients_handed_over_twice_or_never_are_named():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(1), "v": np.zeros(1)}, optimizer=SGD, bucket_bytes=8)
        messages = []

        def refuse(call, *args):
            with pytest.raises(overlap.UsageError) as caught:
                call(*args)
            messages.append(str(caught.value))

        refuse(model.__getitem__, "x")
        refuse(model.reduce, "x", np.zeros(1))
        model.reduce("w", np.ones(1))
        refuse(model.reduce, "w", np.ones(1))
        refuse(model.step)
        model.reduce("v", np.ones(1))
        refuse(model.reduce, "v", np.ones(1))
        model.step()
        await model.finish()
        return messages

    twice = (
        "reduce: the gradient of {!r} has been handed over in step 0 already; of a weight that is used twice, add the "
        "gradients up and hand over the sum; or has model.step() been forgotten?"
    )
    assert run(main, 1)[0] == [
        "name: 'x' is no parameter; known are w, v",
        "name: 'x' is no parameter; known are w, v",
        twice.format("w"),
        "step: no gradient of 'v' in step 0; hand it over, or pass unused='zeros'",
        twice.format("v"),
    ]


def failure_of(main, ranks=3):
    with failing() as seen:
        run(main, ranks)
    return seen[0].rank, seen[0].__cause__


def test_a_gradient_of_another_shape_is_named():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros((2, 3))}, optimizer=SGD)
        model.reduce("w", np.zeros((3, 2)) if rank.rank == 1 else np.zeros((2, 3)))
        model.step()
        await model.finish()

    rank, error = failure_of(main)
    assert rank == 1
    assert str(error) == "reduce: the gradient of 'w' in step 0 has shape (3, 2), the parameter (2, 3)"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_gradient_that_is_not_finite_names_rank_parameter_and_step(dtype):
    async def main(rank):
        params = {"w": np.zeros((2, 3), dtype), "v": np.zeros(1, dtype)}
        model = parallel.DataParallel(rank, params, optimizer=SGD)
        for step in range(4):
            bad = np.full((2, 3), 1e4, dtype)
            if rank.rank == 2 and step == 2:
                bad[1, 0] = np.nan
            model.reduce("v", np.zeros(1, dtype))
            model.reduce("w", bad)
            model.step()
        await model.finish()

    rank, error = failure_of(main)
    assert (rank, type(error)) == (2, overlap.NonFiniteError)
    assert (error.rank, error.operation, error.step, error.index) == (2, "the gradient of 'w'", 2, (1, 0))
    assert str(error).startswith("rank 2 was about to send nan by the gradient of 'w' at ")
    assert str(error).endswith(
        f" in step 2: element [1, 0] of {dtype} (2, 3) is nan; no rank has received it: look for its cause in the "
        "computes of this rank"
    )


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_of_a_gradient_that_travels_alone_all_ranks_learn_the_same(clock):
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros((2, 3))}, optimizer=SGD)
        for step in range(3):
            bad = np.ones((2, 3))
            if rank.rank == 1 and step == 1:
                bad[0, 2], bad[1, 0] = -np.inf, np.nan
            model.reduce("w", bad)
            model.step()
        with pytest.raises(overlap.NonFiniteError if clock == "real" else overlap.OverlapError) as caught:
            await model.finish()
        return str(caught.value)

    first, second, third = run(main, 3, clock=clock)
    assert second.startswith("rank 1 was about to send -inf by the gradient of 'w' at ")
    assert " in step 1: element [0, 2] of float64 (2, 3), the first of 2 that are not finite, is -inf; " in second
    assert clock == "virtual" or (first == third == second)


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_a_rank_alone_that_writes_its_gradient_into_the_bucket_learns_it_too(clock):
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros((2, 3))}, optimizer=SGD)
        gradient = model.gradient("w")
        gradient[...] = 1.0
        gradient[1, 2] = np.inf
        model.reduce("w", gradient)
        model.step()
        with pytest.raises(overlap.NonFiniteError) as caught:
            await model.finish()
        return str(caught.value)

    [told] = run(main, 1, clock=clock)
    assert told.startswith("rank 0 was about to send inf by the gradient of 'w' at ")
    assert " in step 0: element [1, 2] of float64 (2, 3) is inf; " in told


def test_gradients_whose_sum_is_too_large_are_nobodys_fault():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(2, np.float32)}, optimizer=SGD)
        model.reduce("w", np.full(2, 3e38, np.float32))
        model.step()
        with pytest.raises(overlap.UsageError) as caught:
            await model.finish()
        return str(caught.value)

    told = "reduce: the gradients of 'w' in step 0 are finite, but their sum over the ranks is not; scale the loss down"
    assert run(main) == [told] * 2


def test_numbers_whose_squares_are_too_large_are_finite():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(1, np.float32)}, optimizer=parallel.SGD(1.0))
        model.reduce("w", np.full(1, 1e30, np.float32))
        model.step()
        return (await model.finish())["w"].tolist()

    assert run(main) == [[-float(np.float32(1e30))]] * 2


def test_parameters_that_differ_between_ranks_are_named_on_every_rank():
    async def main(rank):
        params = {"a": np.zeros(2), "b": np.zeros((2, 3) if rank.rank == 2 else (3, 2))}
        model = parallel.DataParallel(rank, params, optimizer=SGD)
        with pytest.raises(overlap.UsageError) as caught:
            await model["a"]
        return str(caught.value)

    first = "params differ between rank {} and rank {}: 'b', float64 {}, here is something else there"
    assert run(main, 3) == [
        first.format(0, 2, (3, 2)),
        first.format(1, 2, (3, 2)),
        first.format(2, 0, (2, 3)),
    ]


def test_gradients_in_another_order_on_another_rank_are_named():
    async def main(rank):
        model = parallel.DataParallel(rank, {n: np.zeros(1) for n in "abc"}, optimizer=SGD)
        with pytest.raises(overlap.UsageError) as caught:
            await steps_of(rank, model, {n: np.ones(1) for n in "abc"}, "cba" if rank.rank else "cab")
        return str(caught.value)

    first = (
        "the order in which gradients are handed over must be the same on all ranks, or rebuild_buckets=False: they "
        "differ between rank {} and rank {}: {!r} here is something else there"
    )
    assert run(main) == [first.format(0, 1, "a"), first.format(1, 0, "b")]


def test_a_hook_that_changes_the_shape_is_named():
    async def hook(bucket):
        return bucket.buffer[:-1]

    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(4, np.float32)}, optimizer=SGD, hook=hook)
        model.reduce("w", np.ones(4, np.float32))
        model.step()
        with pytest.raises(overlap.UsageError) as caught:
            await model.finish()
        return str(caught.value)

    assert run(main) == ["hook: bucket 0 is float32 (4,), the result of the hook is float32 (3,)"] * 2


def test_a_gradient_written_where_it_is_packed_travels_alone_as_well():
    def fill(place, value, _weight):
        place[...] = value
        return place

    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(3)}, optimizer=SGD)
        for step in range(3):
            model.reduce("w", rank.compute(partial(fill, model.gradient("w"), step + rank.rank), model["w"]))
            model.step()
        return (await model.finish())["w"].tolist()

    expected = np.zeros(3)
    for step in range(3):
        expected -= 0.1 * (step + 0.5)
    assert run(main) == [expected.tolist()] * 2


@pytest.mark.parametrize("strategy", [parallel.DataParallel, parallel.Sharded])
def test_what_a_bucket_sends_stands_at_the_line_that_handed_its_last_gradient_over(strategy):
    seen = []
    with overriding(watcher=seen.append):
        run(train, 2, lambda rank: strategy(rank, weights(), optimizer=SGD))
    sent = [span.info.call_site for span in seen[0].spans if span.name.startswith(("bucket", "scatter")) and span.info]
    lines = Path(train.__code__.co_filename).read_text(encoding="utf-8").splitlines()
    assert {lines[int(site.rpartition(":")[2]) - 1].strip() for site in sent} == {"model.reduce(name, back[1])"}


def test_a_weight_can_be_awaited_whether_or_not_it_is_there():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.ones(3), "b": {"c": np.ones(2)}}, optimizer=parallel.SGD(lr=1.0))
        before = await model["w"], await model["b"]
        assert type(before[0]) is type(model["w"] + 1) is np.ndarray
        assert float(model["w"].sum()) == 3.0
        found = [before[0].tolist(), before[1]["c"].tolist()]
        model.reduce("w", np.ones(3))
        model.reduce("b.c", np.ones(2))
        model.step()
        return [*found, (await model["w"]).tolist(), (await model["b"])["c"].tolist()]

    assert overlap.run(main, ranks=2) == [[[1.0] * 3, [1.0] * 2, [0.0] * 3, [0.0] * 2]] * 2
