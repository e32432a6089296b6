"""Culprits: who is named for what goes wrong once ranks have met, for errors that nobody awaited, and at ends."""

from contextlib import suppress

import numpy as np
import pytest
import trio
import trio.testing

import overlap
from overlap.diagnostics import find_origin
from overlap.runtime.memory.buffer_pool import BufferPool

from .companies import run_far
from .worlds import Turns, failure_of, run

# ----------------------------------------------------------------------------------------------------------------------
# Whatever goes wrong once ranks have met fails the operation on all of them, and names the one it went wrong for

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


# -- the culprit of an error is found through ranks that failed because of others --------------------------------------


def test_the_cause_of_a_cause_is_found() -> None:
    cause = ValueError("weights")
    first = overlap.PeerFailedError.caused_by(cause, "rank 0 failed", culprit=0)
    second = overlap.PeerFailedError.caused_by(first, "rank 1 failed", culprit=1)
    assert find_origin(0, second) == (0, cause)
    assert find_origin(1, first) == (0, cause)


def test_a_rank_of_which_no_more_is_known_is_the_culprit_itself() -> None:
    lost = overlap.PeerLostError("process 2 is lost", culprit=2)
    assert find_origin(0, lost) == (2, lost)


# -- A world in which all wait while an error is known that nobody has awaited ends with that error --------------------


def no_data() -> None:
    raise ValueError("no data")


async def main(rank: overlap.Rank) -> None:
    if rank.rank == 0:
        rank.compute(no_data, errors="await", seconds=0.001)
    await rank.recv(np.empty(1), src=1 - rank.rank)


@pytest.mark.parametrize("clock", [pytest.param("real", marks=pytest.mark.slow), "virtual"])
def test_it_ends_with_that_error(clock: str) -> None:
    cluster = "local" if clock == "real" else "trn1.2xlarge"
    line = no_data.__code__.co_firstlineno + 1
    with pytest.raises(
        overlap.RankFailedError, match=rf"rank 0 failed at test_culprits\.py:{line}: ValueError: no data"
    ):
        overlap.run(main, ranks=2, clock=clock, cluster=cluster)


# -- A rank that ends issues nothing any more: its own error ends the world, not what its tasks do at their end --------

ISSUES = {
    "all_reduce": lambda rank: rank.all_reduce(np.ones(3)),
    "send": lambda rank: rank.send(np.ones(3), 1),
    "recv": lambda rank: rank.recv(np.ones(3), None),
    "compute": lambda rank: rank.compute(np.ones, 3),
    "spawn": lambda rank: rank.spawn(trio.sleep, 0),
    "deadline": lambda rank: rank.all_reduce(np.ones(3), timeout_s=60),
}


@pytest.mark.everyday(6)
@pytest.mark.parametrize("issue", ISSUES.values(), ids=ISSUES)
def test_issuing_in_a_finally_fails_with_the_failure_of_the_rank(issue) -> None:
    """The peer waits in another call: with an operation of the failing rank it would be a mismatch."""
    errors: list[BaseException] = []

    async def task(rank: R) -> None:
        try:
            await trio.sleep_forever()
        finally:
            try:
                issue(rank)
            except overlap.PeerFailedError as error:
                errors.append(error)
            with trio.CancelScope(shield=True):  # the peer sees that operation before it sees the end of this rank
                await trio.testing.wait_all_tasks_blocked()

    async def main(rank: R) -> None:
        if rank.rank:
            await rank.all_reduce(np.ones(4))
        rank.spawn(task, rank)
        await trio.testing.wait_all_tasks_blocked()
        raise ValueError("own")

    failure = failure_of(run, main, 2)
    assert (failure.rank, str(failure.cause), failure.others) == (0, "own", {})
    assert [str(error) for error in errors] == ["rank 0 failed: ValueError: own"]
    assert errors[0].__cause__ is failure.cause


@pytest.mark.parametrize("elements", [3, 300_000])
def test_no_operation_of_a_finally_is_under_way_when_the_nursery_is_closed(elements: int) -> None:
    """It would be given up by a task, after the last task of the rank: the peer takes part in none."""

    async def task(rank: R) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with suppress(overlap.PeerFailedError):
                rank.all_reduce(np.ones(elements))
            rank.send(np.ones(elements), 1)

    async def main(rank: R) -> None:
        if rank.rank:
            await rank.all_reduce(np.ones(elements))
            await trio.sleep_forever()
        rank.spawn(task, rank)
        await trio.testing.wait_all_tasks_blocked()
        raise ValueError("own")

    failure = failure_of(run, main, 2, path="ring")
    assert (failure.rank, str(failure.cause), failure.others) == (0, "own", {})


@pytest.mark.everyday(6)
@pytest.mark.parametrize("issue", ISSUES.values(), ids=ISSUES)
def test_a_rank_that_has_left_issues_nothing(issue) -> None:
    """The nursery of its tasks is closed."""

    async def main(rank: R) -> str:
        ranks.append(rank)
        if rank.rank == 0:
            await rank.barrier()
            return ""
        await rank.barrier()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(overlap.PeerFailedError, match="the world has ended"):
            issue(next(other for other in ranks if other.rank == 0))
        return "refused"

    ranks: list[R] = []
    assert run(main, 2) == ["", "refused"]
