"""`DataParallel` and `Sharded` alike: hooks, order, a common norm, and what they refuse."""

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import hooks
from tests.errors import error_from, error_of

from ..runtime.worlds import failure_of
from .test_matrix import STRATEGIES

STAGES = (1, 2, 3)
SGD = parallel.SGD(0.1)


def made(rank, params, stage, **options):
    if stage is None:
        return parallel.DataParallel(rank, params, **options)
    return parallel.Sharded(rank, params, stage=stage, **options)


def test_a_hook_may_return_what_the_rank_needs_and_no_more():
    async def main(rank):
        async def scattered(bucket):
            seen.append((bucket.counts, bucket.buffer.size))
            return bucket.group.reduce_scatter(bucket.buffer, op="mean", counts=bucket.counts)

        seen = []
        model = parallel.Sharded(rank, {"w": np.zeros(4)}, optimizer=SGD, hook=scattered)
        model.reduce("w", np.full(4, 3.0 + rank.rank))
        model.step()
        return (await model.finish())["w"].tolist(), seen

    assert overlap.run(main, ranks=3) == [([-0.4] * 4, [((2, 1, 1), 4)])] * 3


def test_what_bfloat16_sends_is_half_of_a_scatter():
    async def main(rank, hook):
        model = parallel.Sharded(rank, {"w": np.zeros(64, np.float32)}, optimizer=SGD, hook=hook)
        model.reduce("w", np.ones(64, np.float32))
        model.step()
        await model.finish()
        return sum(s.info.nbytes for s in rank.recorder.spans() if s.info and s.info.op == "reduce_scatter")

    assert overlap.run(main, hooks.bfloat16(), ranks=2) == [128, 128]
    assert overlap.run(main, None, ranks=2) == [256, 256]


def test_a_rank_without_a_step_cannot_join_where_weights_are_gathered():
    async def main(rank):
        model = parallel.Sharded(rank, {"w": np.zeros(2)}, optimizer=SGD, uneven=True)
        if rank.rank:
            model.reduce("w", np.ones(2))
            model.step()
        await model.finish()

    error = failure_of(overlap.run, main, ranks=2, timeout_s=60)
    assert "finish: this rank has made no step; with uneven=True, stage 3 needs at least one" in str(error)


@pytest.mark.parametrize("stage", STAGES)
def test_buckets_travel_in_the_order_of_the_first_step(stage):
    async def main(rank):
        params = {"a": np.zeros(4), "b": np.zeros(4)}
        model = parallel.Sharded(rank, params, optimizer=SGD, stage=stage, bucket_bytes=32)
        for number in range(2):
            with rank.step(number):
                for name in ("a", "b"):  # not the reverse of forward
                    model.reduce(name, np.full(4, 1.0 + number))
                model.step()
        found = await model.finish()
        spans = [s for s in rank.recorder.spans() if s.name.startswith("scatter")]
        spans.sort(key=lambda s: s.info.seq)
        sent = [[s.name[-1] for s in spans if s.step == number] for number in (0, 1)]
        return sent, {name: w.tolist() for name, w in found.items()}

    lr = [(-0.1 * 1.0) - 0.1 * 2.0] * 4
    expected = [["0", "1"], ["1", "0"]], {"a": lr, "b": lr}  # bucket 0 has b, which comes first where forward ends
    assert overlap.run(main, ranks=2, timeout_s=60) == [expected] * 2


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_the_norm_is_that_of_all_parts_of_a_model(stage):
    async def main(rank):
        mesh = rank.mesh(pp=2, dp=2, tp=2)
        params = {"cut": np.zeros(2), "gain": np.zeros(1)}
        model = made(
            rank, params, stage, optimizer=parallel.SGD(1.0), group=mesh["dp"],
            clip_norm=1.0, clip_group=mesh["pp", "tp"], clip_copies={"gain": 2},
        )  # fmt: skip
        place = mesh.coordinates
        model.reduce("gain", np.full(1, 4.0 * place["pp"]))  # the same on both ranks of tp
        model.reduce("cut", np.array([2.0 * place["dp"], 3.0 * place["tp"]]))  # a mean of 1, and 0 or 3
        model.step()
        return {name: w.tolist() for name, w in (await model.finish()).items()}

    factor = 1 / (np.sqrt(4**2 + 4 * 1**2 + 2 * 3**2) + 1e-6)
    found = overlap.run(main, ranks=8, timeout_s=60)
    for rank, weights_ in enumerate(found):
        pp, tp = rank // 4, rank % 2
        assert weights_ == {"cut": [-factor, -3 * factor * tp], "gain": [-4 * factor * pp]}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"clip_copies": {"w": 2}},
            "clip_copies: it says whose gradients count in clip_norm, which is None; give that too",
        ),
        ({"clip_norm": 1.0, "clip_copies": {"w": 0}}, "clip_copies['w']: expected a whole number from 1, got 0"),
        ({"clip_norm": 1.0, "clip_copies": {"v": 2}}, "name: 'v' is no parameter; known are w"),
    ],
)
@pytest.mark.parametrize("stage", [None, 3])
def test_a_norm_that_cannot_be_meant_is_told(stage, options, told):
    async def main(rank):
        return str(error_of(overlap.UsageError, made, rank, {"w": np.zeros(1)}, stage, optimizer=SGD, **options))

    assert overlap.run(main, ranks=1) == [told]


# -- wrong use: the same sentence from each strategy -----------------------------------------------------------------

WRONG = [
    ({"params": np.zeros(1)}, "params: expected a dict, list or tuple of arrays, got ndarray"),
    ({"params": {}}, "params: there is no array in it; pass one or more"),
    ({"params": {"a": [1.5]}}, "params: 'a.0' is of type float; every leaf must be a numpy array"),
    (
        {"params": {"a.b": np.zeros(1), "a": {"b": np.zeros(1)}}},
        "params: two arrays are called 'a.b', by their keys joined with '.'; rename a key",
    ),
    ({"unused": "skip"}, "unused: expected 'error' or 'zeros', got 'skip'"),
    ({"bucket_bytes": 0}, "bucket_bytes: expected a whole number from 1, got 0"),
    ({"in_flight": 0}, "in_flight: expected a whole number from 1, got 0"),
    ({"ahead": -1}, "ahead: expected a whole number from 0, got -1"),
    ({"ahead": 1.5}, "ahead: expected a whole number from 0, got 1.5"),
    ({"clip_norm": 0.0}, "clip_norm: expected a number above 0, got 0.0"),
    ({"exact": True, "hook": print}, "exact: a hook makes the mean in a way of its own; leave out one of the two"),
]
OF_STAGES = [
    ({"stage": 4}, "stage: expected 1, 2 or 3, got 4"),
    ({"stage": "3"}, "stage: expected 1, 2 or 3, got '3'"),
    ({"depth": -1}, "depth: expected a whole number from 0, got -1"),
]


@pytest.mark.parametrize("strategy", [parallel.DataParallel, parallel.Sharded])
def test_arguments_that_are_refused(strategy):
    async def main(rank, options):
        with pytest.raises(overlap.UsageError) as caught:
            strategy(rank, **{"params": {"w": np.zeros(1)}, "optimizer": SGD} | options)
        return str(caught.value)

    for options, message in WRONG + (OF_STAGES if strategy is parallel.Sharded else []):
        assert overlap.run(main, options, ranks=1) == [message]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_of_another_shape(strategy):
    async def main(rank, at_once):
        model = STRATEGIES[strategy](rank, {"w": np.zeros((2, 3))}, optimizer=SGD)
        shape = (3, 2) if rank.rank == 1 else (2, 3)
        model.reduce("w", np.zeros(shape) if at_once else rank.compute(np.zeros, shape))
        model.step()
        await model.finish()

    for at_once in (True, False):
        failure = failure_of(overlap.run, main, at_once, ranks=3)
        told = "reduce: gradient of 'w' in step 0: expected shape (2, 3), got (3, 2)"
        assert failure.rank == 1
        assert str(failure.__cause__).partition(";")[0] == told


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_differ_between_ranks(strategy):
    async def main(rank):
        params = {"a": np.zeros(2), "b": np.zeros((2, 3) if rank.rank == 2 else (3, 2))}
        return str(await error_from(overlap.UsageError, STRATEGIES[strategy](rank, params, optimizer=SGD)["a"]))

    first = (
        "params must be the same on all ranks: they differ between rank {} and rank {}: 'b', float64 {}, here is "
        "something else there"
    )
    assert overlap.run(main, ranks=3) == [
        first.format(0, 2, (3, 2)),
        first.format(1, 2, (3, 2)),
        first.format(2, 0, (2, 3)),
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_not_finite(strategy, dtype):
    async def main(rank):
        params = {"w": np.zeros((2, 3), dtype), "v": np.zeros(1, dtype)}
        model = STRATEGIES[strategy](rank, params, optimizer=SGD)
        for step in range(4):
            gradient = np.full((2, 3), 1e4, dtype)
            if rank.rank == 2 and step == 2:
                gradient[1, 0] = np.nan
            model.reduce("v", np.zeros(1, dtype))
            model.reduce("w", gradient)
            model.step()
        await model.finish()

    failure = failure_of(overlap.run, main, ranks=3)
    error = failure.__cause__
    assert (failure.rank, type(error)) == (2, overlap.NonFiniteError)
    assert (error.rank, error.operation, error.step, error.index) == (2, "the gradient of 'w'", 2, (1, 0))
    assert str(error).startswith("rank 2 was about to send nan by the gradient of 'w' at tests/parallel/test_alike.py:")
    assert str(error).endswith(
        f" in step 2: element [1, 0] of {dtype} (2, 3) is nan; no rank has received it: look for its cause "
        "in the computes of this rank"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hook_that_changes_the_shape(strategy):
    async def shortened(bucket):
        return bucket.buffer[1:]

    async def main(rank):
        model = STRATEGIES[strategy](rank, {"w": np.zeros(4)}, optimizer=SGD, hook=shortened)
        model.reduce("w", np.ones(4))
        model.step()
        return str(await error_from(overlap.UsageError, model.finish()))

    told = "hook: bucket 0 is float64 (4,), the result of the hook is float64 (3,); return one like the bucket"
    assert overlap.run(main, ranks=2) == [told] * 2
