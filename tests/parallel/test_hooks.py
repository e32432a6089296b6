"""Hooks: what travels, what comes back to the last bit, and what is refused."""

import ml_dtypes
import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel.buckets.plan import GradientBucket
from overlap.parallel.hooks import bfloat16, float16
from overlap.parallel.hooks.half import round_randomly
from overlap.parallel.hooks.operations import power_of_two_scale
from tests.errors import error_of

BFLOAT16 = ml_dtypes.bfloat16
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)


def bucket_of(rank, buffer, *, step=1, state=None, shapes=None):
    return GradientBucket(
        rank=rank, group=rank.world, index=3, step=step, names=("w",), shapes=shapes or (buffer.shape,),
        buffer=buffer, state={} if state is None else state, rng=np.random.default_rng((step, 3, rank.rank)),
    )  # fmt: skip


def means(hook, gradients, *, steps=1, shapes=None):
    """What the hook returns on each rank in each step, of gradients that stay."""

    async def main(rank):
        state = {}
        found = [
            await hook(bucket_of(rank, gradients[rank.rank].copy(), step=step, state=state, shapes=shapes))
            for step in range(1, steps + 1)
        ]
        return found, state

    return overlap.run(main, ranks=len(gradients), timeout_s=60)


def gradients(ranks, size, dtype=np.float32):
    random = np.random.default_rng(7)
    return [(random.standard_normal(size) * 10.0 ** random.integers(-6, 2, size)).astype(dtype) for _ in range(ranks)]


def mean(values):
    total = values[0].astype(np.float32)
    for each in values[1:]:
        total = total + each.astype(np.float32)
    return total / np.float32(len(values))


# -- bfloat16 --------------------------------------------------------------------------------------------------------


def rounded(x):
    """To nearest, ties to even, on the bits."""
    u = x.view(np.uint32)
    return (((u + np.uint32(0x7FFF) + ((u >> 16) & 1)) >> 16) << 16).view(np.float32)


@pytest.mark.parametrize("ranks", [1, 3])
def test_bfloat16_rounds_once_before_and_once_after(ranks):
    given = gradients(ranks, 1001)
    expected = rounded(mean([rounded(x) for x in given]))
    for (found,), _ in means(bfloat16(), given):
        assert found.dtype == np.float32
        assert found.tobytes() == expected.tobytes()


@np.errstate(invalid="ignore")
def test_stochastic_rounding_keeps_what_bfloat16_can_hold():
    values = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
    found = round_randomly(values.astype(np.float32), np.random.default_rng(0))
    same = np.isnan(values) | (found.view(np.uint16) == values.view(np.uint16))
    assert same.all()
    assert np.isnan(found[np.isnan(values)]).all()


def test_stochastic_rounding_goes_to_a_neighbour_alike_for_both_signs():
    x = np.abs(np.random.default_rng(1).standard_normal(10_000)).astype(np.float32)
    up = round_randomly(x, np.random.default_rng(2)).view(np.uint16).astype(int)
    down = round_randomly(-x, np.random.default_rng(2)).view(np.uint16).astype(int)
    assert set(np.unique(up - (x.view(np.uint32) >> 16))) == {0, 1}
    assert (down - up == 0x8000).all()


def test_stochastic_rounding_makes_nothing_infinite():
    largest = np.full(100, np.finfo(np.float32).max)
    assert np.isfinite(round_randomly(largest, np.random.default_rng(0)).astype(np.float32)).all()


def test_stochastic_rounding_is_right_on_average():
    """Five standard errors of 200,000 draws; to nearest, all of them would be 0.3 of a step too low."""
    step, draws, share = 2.0**-7, 200_000, 0.3
    x = np.full(draws, 1 + share * step, np.float32)
    found = (round_randomly(x, np.random.default_rng(3)).astype(np.float64).mean() - 1) / step
    assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / draws)


def test_the_stochastic_mean_over_ranks_is_right_on_average_too():
    """Rounding it to nearest would favour even numbers: 0.09 of a step for 0.3."""
    step, size, share = 2.0**-7, 50_000, 0.3
    given = [np.full(size, 1 + share * step, np.float32)] * 2
    ((first,), _), ((second,), _) = means(bfloat16("stochastic"), given)
    assert first.tobytes() == second.tobytes()
    assert abs((first.astype(np.float64).mean() - 1) / step - share) < 5 * np.sqrt(share * (1 - share) / size)
    assert set(np.unique((first - 1) / step)) == {0.0, 1.0}


def test_stochastic_rounding_draws_anew_in_each_step_and_the_same_in_each_run():
    given = [np.full(1000, 1 + 2.0**-9, np.float32)] * 2
    (once, _), _ = means(bfloat16("stochastic"), given, steps=2)
    (again, _), _ = means(bfloat16("stochastic"), given, steps=2)
    assert once[0].tobytes() != once[1].tobytes()
    assert [each.tobytes() for each in once] == [each.tobytes() for each in again]


# -- scaled formats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [448.0, 57344.0, 65504.0])
def test_a_scale_is_the_largest_power_of_two_that_fits(top):
    random = np.random.default_rng(0)
    for value in [top, np.nextafter(top, 0), np.nextafter(top, np.inf), *10 ** random.uniform(-30, 30, 200)]:
        scale = power_of_two_scale(np.array([value]), top)
        assert np.frexp(scale)[0] == 0.5
        assert top / 2 < value * scale <= top
    assert [power_of_two_scale(np.array([value]), top) for value in (0.0, np.inf, np.nan)] == [1.0] * 3


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e30])
def test_float16_is_scaled_by_the_largest_of_all_ranks(size):
    given = [x * np.float32(size) for x in gradients(3, 501)]
    scale = np.float32(power_of_two_scale(np.array([max(np.abs(x).max() for x in given)]), 65504))
    sent = [(x * scale).astype(np.float16) for x in given]
    expected = mean(sent).astype(np.float16).astype(np.float32) / scale
    for (found,), _ in means(float16(), given):
        assert found.tobytes() == expected.tobytes()
        np.testing.assert_allclose(found, mean(given), rtol=0, atol=2.0**-10 * np.abs(mean(given)).max())


@pytest.mark.parametrize("hook", [float16(), bfloat16(), bfloat16("stochastic")])
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(hook):
    """A loop that looks for NaN must find it; scales do not follow it."""
    found = means(hook, [np.concatenate([SPECIAL, [1, 2]]).astype(np.float32)] * 2)[0][0][0]
    assert np.isnan(found[4])
    assert not np.isfinite(found[2:4]).any()
    assert found[[0, 1, 5, 6]].tolist() == [0, 0, 1, 2]


# -- in a model ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_half_the_bytes_travel_while_the_layer_below_computes():
    """In virtual time: the cast runs beside backward, and what is sent takes half as long."""

    def spans(hook):
        big = {f"w{i}": np.zeros((256, 256), np.float32) for i in range(4)}

        async def main(rank):
            model = parallel.DataParallel(rank, big, optimizer=parallel.SGD(0.1), bucket_bytes=1, hook=hook)
            with rank.step(0):
                for name in reversed(big):
                    model.reduce(name, rank.compute(np.ones_like, big[name], seconds=0.01, name="backward"))
                model.step()
            await model.finish()
            return rank.recorder.spans()

        return overlap.run(main, ranks=8, cluster="trn1.32xlarge", clock="virtual")[0]

    def sent(found):
        return [each for each in found if each.kind == "comm" and each.info.nbytes in (1 << 17, 1 << 18)]

    whole, half = spans(None), spans(bfloat16())
    last = max(each.end_ns for each in half if each.name == "backward")
    casts = [each for each in half if each.name == "to bfloat16"]
    assert {each.lane for each in casts} == {"hooks"}
    assert [each.end_ns < last for each in casts] == [True, True, True, False]
    assert [each.end_ns < last for each in sent(half)] == [True, True, True, False]
    assert [each.info.nbytes for each in sent(half)] == [1 << 17] * 4
    assert max(each.duration_ns for each in sent(half)) < min(
        each.duration_ns for each in sent(whole) if each.info.op == "all_reduce"
    )


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "told"), [(lambda: bfloat16("up"), "rounding: expected 'nearest' or 'stochastic', got 'up'")]
)
def test_arguments_that_cannot_be_meant(make, told):
    assert str(error_of(overlap.UsageError, make)) == told


@pytest.mark.parametrize(("name", "hook"), [("bfloat16", bfloat16()), ("float16", float16())])
def test_gradients_of_integers_are_refused(name, hook):
    error = error_of(overlap.RankFailedError, means, hook, [np.ones(4, np.int64)])
    refusal = f"hook: {name} expected gradients of floats, got int64 in bucket 3 (w); leave out the hook"
    assert str(error.cause) == refusal
