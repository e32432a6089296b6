"""What `DataParallel` and `Sharded` have in common: hooks, unused parameters, fewer samples, order, a common norm."""

from contextlib import nullcontext

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import hooks

from ..core.companies import by_sockets, run_far
from .example_hooks import float8, power_sgd, top_k
from .programs import backward, forward, loss_gradient, samples, weights

STAGES = (1, 2, 3)
SGD = parallel.SGD(0.1)


def made(rank, params, stage, **options):
    if stage is None:
        return parallel.DataParallel(rank, params, **options)
    return parallel.Sharded(rank, params, stage=stage, **options)


def step(rank, model, number, names, dtype, *, micro=1):
    """A step of the loop that users write, of so many micro-batches, the last of which leaves."""
    for part in range(micro):
        x, y = samples(micro * number + part, rank.world_size, dtype=dtype)[:, rank.rank :: rank.world_size]
        acts = {}
        for name in names:
            acts[name], x = x, rank.compute(forward, model[name], x, seconds=0.001)
        grad = rank.compute(loss_gradient, x, y, seconds=0.001)
        with model.no_sync() if part < micro - 1 else nullcontext():
            for name in reversed(names):
                back = rank.compute(backward, model[name], acts[name], grad, seconds=0.001)
                grad = back[0]
                model.reduce(name, back[1])
    model.step()


def learnt(stage, *, steps=(4, 4, 4), micro=1, dtype=np.float32, **options):
    async def main(rank):
        params = weights(dtype=dtype)
        model = made(rank, params, stage, **{"optimizer": SGD, "bucket_bytes": 150} | options)
        for number in range(steps[rank.rank]):
            step(rank, model, number, list(params), dtype, micro=micro)
        return await model.finish()

    found = overlap.run(main, ranks=len(steps), timeout_s=60)
    assert all((one[name] == w).all() for one in found for name, w in found[0].items())
    return {name: w.tolist() for name, w in found[0].items()}


AS_NEAR = {True: {"rtol": 1e-10, "atol": 1e-14}, False: {"rtol": 1e-2, "atol": 1e-3}}
HOOKS = {
    "bfloat16": hooks.bfloat16,
    "float16": hooks.float16,
    "float8": float8,
    "top_k": lambda: top_k(0.3),
    "power_sgd": lambda: power_sgd(1, warm_up=1),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_makes_the_same_mean_of_what_ranks_share(name, stage):
    """On three ranks, whose shares of a bucket differ."""
    assert learnt(stage, hook=HOOKS[name]()) == learnt(None, hook=HOOKS[name]())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("name", [None, *HOOKS])
def test_over_efa_and_in_virtual_time_as_in_one_process(name, stage):
    """Two nodes of two ranks: another order of additions, so the last digits differ, and of float8 the last bits."""

    async def main(rank):
        params = weights(dtype=np.float64)
        hook = HOOKS[name]() if name else None
        model = made(rank, params, stage, optimizer=SGD, bucket_bytes=300, hook=hook)
        for number in range(4):
            step(rank, model, number, list(params), np.float64)
        return await model.finish()

    far = run_far(main, 2, 2, wires=by_sockets)
    near, virtual = (overlap.run(main, ranks=4, timeout_s=60, clock=clock) for clock in ("real", "virtual"))
    for found in (far[0], virtual[0]):
        for parameter, w in near[0].items():
            np.testing.assert_allclose(found[parameter], w, **AS_NEAR[name is None])
    assert all((one[k] == w).all() for one in far for k, w in far[0].items())


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


def test_a_hook_that_changes_the_shape_is_told():
    async def main(rank):
        async def wrong(bucket):
            return bucket.buffer[1:]

        model = parallel.Sharded(rank, {"w": np.zeros(4)}, optimizer=SGD, hook=wrong)
        model.reduce("w", np.ones(4))
        model.step()
        with pytest.raises(overlap.UsageError) as caught:
            await model.finish()
        return str(caught.value)

    told = "hook: bucket 0 is float64 (4,), the result of the hook is float64 (3,)"
    assert overlap.run(main, ranks=2) == [told] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_without_a_gradient_count_as_zeros_if_that_is_allowed(stage):
    async def main(rank):
        params = {"w": np.zeros(3), "v": np.ones(3)}
        model = parallel.Sharded(rank, params, optimizer=SGD, stage=stage, unused="zeros", bucket_bytes=1)
        with model.no_sync():
            if rank.rank == 1:
                model.reduce("v", np.full(3, 2.0))
        if rank.rank == 0:
            model.reduce("w", np.full(3, 4.0))
        model.step()
        model.reduce("v", np.full(3, 1.0))
        model.step()
        return {name: w.tolist() for name, w in (await model.finish()).items()}

    assert overlap.run(main, ranks=2, timeout_s=60) == [{"w": [-0.2] * 3, "v": [1 - 0.1 - 0.1] * 3}] * 2


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_fewer_samples_join_the_steps_of_the_others(stage, micro):
    uneven = {"steps": (1, 4, 2), "micro": micro, "uneven": True, "dtype": np.float64}
    found, expected = learnt(stage, **uneven), learnt(None, **uneven)
    for name, w in expected.items():  # micro-batches are added up in another order in stages 2 and 3
        np.testing.assert_allclose(found[name], w, rtol=1e-12 if micro > 1 and stage > 1 else 0)


def test_a_rank_without_a_step_cannot_join_where_weights_are_gathered():
    async def main(rank):
        model = parallel.Sharded(rank, {"w": np.zeros(2)}, optimizer=SGD, uneven=True)
        if rank.rank:
            model.reduce("w", np.ones(2))
            model.step()
        await model.finish()

    with pytest.raises(overlap.RankFailedError) as caught:
        overlap.run(main, ranks=2, timeout_s=60)
    assert "finish: with uneven=True, stage 3 needs at least one step of every rank" in str(caught.value)


@pytest.mark.parametrize("stage", STAGES)
def test_buckets_travel_in_the_order_of_the_first_step(stage):
    async def main(rank):
        params = {"a": np.zeros(4), "b": np.zeros(4)}
        model = parallel.Sharded(rank, params, optimizer=SGD, stage=stage, bucket_bytes=32, order="fifo")
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
        ({"clip_copies": {"w": 2}}, "clip_copies: it says whose gradients count in clip_norm, which is None"),
        ({"clip_norm": 1.0, "clip_copies": {"w": 0}}, "clip_copies['w']: expected a whole number from 1, got 0"),
        ({"clip_norm": 1.0, "clip_copies": {"v": 2}}, "name: 'v' is no parameter; known are w"),
    ],
)
@pytest.mark.parametrize("stage", [None, 3])
def test_a_norm_that_cannot_be_meant_is_told(stage, options, told):
    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            made(rank, {"w": np.zeros(1)}, stage, optimizer=SGD, **options)
        return str(caught.value)

    assert overlap.run(main, ranks=1) == [told]
