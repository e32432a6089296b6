"""The loss of scores that are cut by words: the numbers of one rank, whatever their size, and what cannot be meant."""

from __future__ import annotations

import numpy as np
import pytest

import overlap
from overlap import parallel
from overlap.parallel import schedules
from tests.runtime.companies import by_sockets, run_far
from tests.runtime.worlds import run
from tests.simulation.worlds import simulate

WORDS = 12
NUMBERS = np.random.default_rng(5)
TARGET = NUMBERS.integers(0, WORDS, (3, 4))
SCORES = NUMBERS.standard_normal((3, 4, WORDS)) + NUMBERS.choice([0.0, 1000.0, -1000.0], (3, 4, 1))


def alone() -> tuple[np.ndarray, float]:
    """The gradient of all scores, and the loss, by one rank."""
    p = np.exp(SCORES - SCORES.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    came = (*np.indices(TARGET.shape), TARGET)
    loss = -float(np.log(p[came]).mean())
    p[came] -= 1
    return p / TARGET.size, loss


async def cut(rank: overlap.Rank) -> tuple[np.ndarray, float]:
    loss = parallel.VocabularyLoss(rank, rank.world, WORDS)
    mine = np.split(SCORES, rank.world_size, -1)[rank.rank]
    both = loss.issue(rank.compute(mine.copy, seconds=0.0), TARGET)
    return await both[0], await both[1]  # type: ignore[return-value]


def check(found: list[tuple[np.ndarray, float]]) -> None:
    gradient, loss = alone()
    np.testing.assert_allclose(np.concatenate([each for each, _ in found], -1), gradient, rtol=1e-10, atol=1e-15)
    assert len({each for _, each in found}) == 1
    assert found[0][1] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_that_of_one_rank(ranks: int) -> None:
    check(run(cut, ranks))


def test_in_virtual_time() -> None:
    check(simulate(cut, 4)[0])


@pytest.mark.slow
def test_over_efa() -> None:
    check(run_far(cut, 2, 2, wires=by_sockets))


def test_a_pipeline_takes_it() -> None:
    """Two microbatches: the gradient is that of the whole batch."""

    async def main(rank: overlap.Rank) -> tuple[np.ndarray, float]:
        words = rank.group([0, 1])
        head = parallel.ColumnLinear(rank, words, WORDS, WORDS)
        weights = {"weight": np.split(np.eye(WORDS), 2, -1)[rank.rank]}
        schedule = schedules.make("gpipe", ranks=1, microbatches=3)
        loss = parallel.VocabularyLoss(rank, words, WORDS)
        pipeline = parallel.Pipeline(
            rank, schedule, {0: head}, {0: weights}, loss=loss, boundary=((1,), np.float64),
            group=rank.group([rank.rank]),
        )  # fmt: skip
        passed = await pipeline.run(SCORES, TARGET)
        return (await passed.gradients[0])["weight"], await passed.loss()  # type: ignore[misc]

    found = run(main, 2)
    gradient, loss = alone()
    expected = np.einsum("abi,abj->ij", SCORES, gradient)
    np.testing.assert_allclose(np.concatenate([each for each, _ in found], -1), expected, rtol=1e-10, atol=1e-10)
    assert [each for _, each in found] == [pytest.approx(loss, rel=1e-12)] * 2


def test_without_data_nothing_is_computed() -> None:
    async def main(rank: overlap.Rank) -> tuple[int, ...]:
        loss = parallel.VocabularyLoss(rank, rank.world, 1 << 20, tokens=1 << 20)
        both = loss.issue(rank.empty((1 << 20, 1 << 19)), rank.empty(1 << 20, np.int64))
        return (await both[0]).shape  # type: ignore[attr-defined, no-any-return]

    assert overlap.run(main, ranks=2, clock=overlap.Virtual(shapes_only=True)) == [(1 << 20, 1 << 19)] * 2


def test_words_that_do_not_divide_are_told_on_every_rank() -> None:
    async def main(rank: overlap.Rank) -> str:
        with pytest.raises(overlap.UsageError) as caught:
            parallel.VocabularyLoss(rank, rank.world, 7)
        return str(caught.value)

    assert run(main, 2) == ["words: 7 do not divide by the 2 ranks of group 'world'; choose a multiple of 2"] * 2


@pytest.mark.parametrize(
    ("shape", "target", "told"),
    [
        ((2, 6), np.array([0, 12]), "target: expected 0 to 11, got 12"),
        ((2, 6), np.array([-1, 0]), "target: expected 0 to 11, got -1"),
        ((2, 5), np.array([0, 1]), "loss: scores have shape (2, 5) and targets (2,); expected (2, 6)"),
        ((2, 6), np.array([0]), "loss: scores have shape (2, 6) and targets (1,); expected (1, 6)"),
    ],
)
def test_targets_that_cannot_be_meant_are_told_on_every_rank(
    shape: tuple[int, ...], target: np.ndarray, told: str
) -> None:
    async def main(rank: overlap.Rank) -> str:
        with pytest.raises(overlap.UsageError) as caught:
            await parallel.VocabularyLoss(rank, rank.world, WORDS).issue(np.zeros(shape), target)
        return str(caught.value)

    assert run(main, 2) == [told] * 2
