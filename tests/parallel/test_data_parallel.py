"""Data parallel against one rank that trains on the whole batch: any number of ranks, wrong uses."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import overlap
from overlap import RankFailedError, UsageError, parallel
from overlap.config import overriding_config
from overlap.parallel import DataParallel, Sharded
from overlap.parallel.buckets import averaged
from tests.errors import error_from, error_of

from ..runtime.worlds import TIMEOUT_S
from .programs import train, weights

# -- data parallel against one rank that trains on the whole batch, and what it says of wrong use ----------------------

SGD = parallel.SGD(0.1)


def run(main, ranks=2, *args, **options):
    return overlap.run(main, *args, ranks=ranks, timeout_s=TIMEOUT_S, **options)


def maker(params=weights, optimizer=SGD, **options):
    return lambda rank: parallel.DataParallel(rank, params(), optimizer=optimizer, **options)


def assert_same_bits(found, expected):
    assert list(found) == list(expected)
    assert {name: w.tobytes() for name, w in found.items()} == {name: w.tobytes() for name, w in expected.items()}


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


async def steps_of(rank, model, gradients, names):
    """Hand over the same gradients in every step, in the order of `names`; return the weights."""
    for _ in range(3):
        for name in names:
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


# -- wrong use -------------------------------------------------------------------------------------------------------


def test_gradients_handed_over_twice_or_never_are_named():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(1), "v": np.zeros(1)}, optimizer=SGD, bucket_bytes=8)
        messages = []

        def refuse(call, *args):
            messages.append(str(error_of(overlap.UsageError, call, *args)))

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
        "step: no gradient of 'v' in step 0; call model.reduce('v', gradient) before step(), or pass unused='zeros'",
        twice.format("v"),
    ]


def test_of_a_gradient_that_travels_alone_all_ranks_learn_the_same(clock):
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros((2, 3))}, optimizer=SGD)
        for step in range(3):
            bad = np.ones((2, 3))
            if rank.rank == 1 and step == 1:
                bad[0, 2], bad[1, 0] = -np.inf, np.nan
            model.reduce("w", bad)
            model.step()
        error = await error_from(overlap.NonFiniteError if clock == "real" else overlap.OverlapError, model.finish())
        return str(error)

    first, second, third = run(main, 3, clock=clock)
    sent, received = "was about to send", "no rank has received it"
    if clock == "real":  # it is found in the mean
        sent, received = "sent", "all ranks have received the mean with it"
    assert second.startswith(f"rank 1 {sent} -inf by the gradient of 'w' at ")
    assert second.endswith(f"; {received}: look for its cause in the computes of this rank")
    assert " in step 1: element [0, 2] of float64 (2, 3), the first of 2 that are not finite, is -inf; " in second
    assert clock == "virtual" or (first == third == second)


def test_a_rank_alone_that_writes_its_gradient_into_the_bucket_learns_it_too(clock):
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros((2, 3))}, optimizer=SGD)
        gradient = model.gradient("w")
        gradient[...] = 1.0
        gradient[1, 2] = np.inf
        model.reduce("w", gradient)
        model.step()
        return str(await error_from(overlap.NonFiniteError, model.finish()))

    [told] = run(main, 1, clock=clock)
    assert told.startswith("rank 0 was about to send inf by the gradient of 'w' at ")
    assert " in step 0: element [1, 2] of float64 (2, 3) is inf; no rank has received it: " in told


def test_gradients_whose_sum_is_too_large_are_nobodys_fault():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(2, np.float32)}, optimizer=SGD)
        model.reduce("w", np.full(2, 3e38, np.float32))
        model.step()
        return str(await error_from(overlap.UsageError, model.finish()))

    told = "reduce: the gradients of 'w' in step 0 are finite, but their sum over the ranks is not; scale the loss down"
    assert run(main) == [told] * 2


def test_numbers_whose_squares_are_too_large_are_finite():
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.zeros(1, np.float32)}, optimizer=parallel.SGD(1.0))
        model.reduce("w", np.full(1, 1e30, np.float32))
        model.step()
        return (await model.finish())["w"].tolist()

    assert run(main) == [[-float(np.float32(1e30))]] * 2


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
    with overriding_config(watcher=seen.append):
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


# -- batches that are constant per rank or over all ranks, when the number of ranks changes ----------------------------

SAMPLES = np.arange(1.0, 13.0)


async def one_step(rank, kind, batch, number, handed):
    model = kind(rank, {"w": np.zeros(3)}, optimizer=parallel.SGD(lr=1.0), batch=batch)
    part = model.share(number)
    gradient = np.full(3, SAMPLES[part].mean())
    model.reduce("w", gradient if handed == "array" else rank.compute(lambda w: gradient, model["w"], seconds=0.0))
    await model.step()
    return part, -float((await model.finish())["w"][0])


@pytest.mark.parametrize("handed", ["array", "future"])
@pytest.mark.parametrize("kind", [DataParallel, Sharded])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_a_global_batch_is_the_mean_of_its_samples(kind, ranks, handed):
    results = overlap.run(one_step, kind, "global", 12, handed, ranks=ranks, clock="virtual")
    assert np.concatenate([SAMPLES[part] for part, _ in results]).tolist() == SAMPLES.tolist()
    assert [mean for _, mean in results] == pytest.approx([SAMPLES.mean()] * ranks, rel=1e-15)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_batch_of_each_rank_stays(ranks):
    results = overlap.run(one_step, DataParallel, "rank", 4, "array", ranks=ranks, clock="virtual")
    assert [part for part, _ in results] == [slice(4 * rank, 4 * rank + 4) for rank in range(ranks)]
    assert {mean for _, mean in results} == {SAMPLES[: 4 * ranks].mean()}


@pytest.mark.parametrize(
    ("batch", "number", "message"),
    [
        ("all", 12, r"batch: expected 'rank' or 'global', got 'all'"),
        ("global", 2, r"batch: expected a whole number from 3, got 2"),
        ("rank", 0, r"batch: expected a whole number from 1, got 0"),
    ],
)
def test_batches_that_cannot_be_meant(batch, number, message):
    with pytest.raises(RankFailedError, match=message) as failed:
        overlap.run(one_step, DataParallel, batch, number, "array", ranks=3, clock="virtual")
    assert isinstance(failed.value.cause, UsageError)
