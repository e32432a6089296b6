"""A rank that ends issues nothing any more: its own error ends the world, not what its tasks do at their end."""

from contextlib import suppress

import numpy as np
import pytest
import trio
import trio.testing

import overlap

from .worlds import failure_of, run

R = overlap.Rank
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
