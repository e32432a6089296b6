"""Whatever goes wrong once ranks have met fails the operation on all of them, and names the one it went wrong for."""

import numpy as np
import pytest
import trio

import overlap
from overlap.runtime.memory.buffer_pool import BufferPool

from .companies import run_far
from .worlds import Turns, failure_of, run

R = overlap.Rank


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let arrays of 13 and of 26 elements have no memory."""
    enough = BufferPool.empty

    def empty(self: BufferPool, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:
        if shape in ((13,), (26,)):
            raise MemoryError("no room for 13")
        return enough(self, shape, dtype)

    monkeypatch.setattr(BufferPool, "empty", empty)


@pytest.mark.parametrize("path", ["direct", "ring"])
def test_no_memory_for_a_result_whose_input_was_computed(scarce: None, path: str) -> None:
    """The collective starts from a callback of the loop, where nobody's program could catch the error."""

    async def main(rank: R) -> None:
        await rank.all_gather(rank.compute(np.ones, 13))

    failure = failure_of(run, main, 2, path=path)
    assert isinstance(failure.cause, MemoryError)
    assert "no room for 13" in str(failure)


def test_no_memory_for_a_result_that_waited_for_its_window(scarce: None) -> None:
    async def main(rank: R) -> None:
        lane = rank.stream("narrow", window=1)
        first = rank.all_reduce(np.ones(400_000), stream=lane)
        second = rank.broadcast(np.ones(13), stream=lane)
        await first
        await second

    failure = failure_of(run, main, 2)
    assert isinstance(failure.cause, MemoryError)


def test_an_error_in_the_call_of_the_last_rank_reaches_those_who_wait(scarce: None) -> None:
    """Its program may catch the error and go on; the others must not wait for it for ever."""

    async def main(rank: R) -> str:
        async with turns.of(rank.rank):
            future = rank.all_gather(np.ones(13))
        try:
            await future
        except (MemoryError, overlap.PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return "gathered"

    turns = Turns((1, 0))
    mine, other = run(main, 2)
    assert "MemoryError: no room for 13" in mine
    assert "no room for 13" in other
    assert sum(text.startswith("PeerFailedError: rank 0 failed before all_gather #0") for text in (mine, other)) == 1


def test_an_error_is_not_lost_because_telling_it_takes_too_much() -> None:
    """Four pending operations of 20 KB names each do not fit in what processes tell each other."""

    async def main(rank: R) -> None:
        if rank.rank == 0:
            lane = rank.group([0, 1])
            for letter in "abcd":
                lane.all_reduce(np.ones(2), name=letter * 20_000)
            raise ValueError("boom \ud800")
        await rank.barrier()

    for outcome in run_far(main, 2, 1):
        assert isinstance(outcome, overlap.RankFailedError)
        assert outcome.rank == 0
        assert "ValueError: boom" in str(outcome)


def test_the_line_is_the_programs_where_a_library_has_made_code_of_its_own():
    async def main(rank):
        await trio.sleep(float("nan"))  # trio refuses it in a method that attrs has written

    with pytest.raises(overlap.RankFailedError, match=r"^rank 0 failed at test_culprits\.py:\d+: ValueError: "):
        overlap.run(main, ranks=1)
