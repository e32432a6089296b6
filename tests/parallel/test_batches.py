"""Batches that are constant per rank or over all ranks, when the number of ranks changes."""

import numpy as np
import pytest

import overlap
from overlap import RankFailedError, UsageError
from overlap.parallel import SGD, DataParallel, Sharded

SAMPLES = np.arange(1.0, 13.0)


async def one_step(rank, kind, batch, number, handed):
    model = kind(rank, {"w": np.zeros(3)}, optimizer=SGD(lr=1.0), batch=batch)
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
