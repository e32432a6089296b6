"""Calls that were made before need no matching while nothing is wrong: nothing of what is promised is left out."""

from collections.abc import Callable

import numpy as np
import pytest
import trio

import overlap
from overlap.processes.control import ControlPlane
from overlap.processes.wire import Finished
from overlap.runtime.communicator import Communicator
from overlap.runtime.engine.compiler import Compiled
from overlap.runtime.match import Match

from .companies import Company, by_sockets, run_far

BEFORE = 3

Issue = Callable[[overlap.Rank, int], "overlap.CollectiveFuture"]


def message(rank: overlap.Rank, count: int) -> overlap.CollectiveFuture:
    return rank.send(np.ones(count), 1) if rank.rank == 0 else rank.recv(np.empty(count), 0)


CALLS: dict[str, Issue] = {
    "all_reduce": lambda rank, count: rank.all_reduce(np.ones(count)),
    "broadcast": lambda rank, count: rank.broadcast(np.ones(count)),
    "message": message,
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of the operations that are not matched."""
    seqs: list[int] = []
    alone = Communicator.make_lone_match

    def seen(self: Communicator, operation: overlap.CollectiveFuture) -> Match:
        seqs.append(operation.seq)
        return alone(self, operation)

    monkeypatch.setattr(Communicator, "make_lone_match", seen)
    return seqs


@pytest.mark.parametrize("name", [name for name in CALLS if name != "message"])
def test_only_calls_that_were_made_before_are_not_matched(
    name: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # or who is told of a call, as after a while, compares it
    monkeypatch.setattr(ControlPlane, "send_waiting_call", lambda *report: None)

    over = trio.Event()

    async def main(rank: overlap.Rank) -> None:
        for count in (3, 3, 4, 3, 4):
            await CALLS[name](rank, count)
        if rank.rank == 1:
            over.set()
        await over.wait()  # once a rank has finished, the others match

    assert run_far(main, 2, 1, wires=by_sockets) == [None, None]
    assert sorted(taken) == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_agreed_before_may_disagree(name: str, taken: list[int]) -> None:
    async def main(rank: overlap.Rank) -> None:
        for count in (3, 4) * BEFORE:
            await CALLS[name](rank, count)
        await CALLS[name](rank, 3 + rank.rank)

    for error in run_far(main, 2, 1, wires=by_sockets):
        assert isinstance(error, overlap.RankFailedError)
        assert f"operation #{2 * BEFORE}" in str(error)
        assert "(3,)" in str(error)
        assert "(4,)" in str(error)
    assert name == "message" or 2 * BEFORE in taken


@pytest.mark.parametrize("ends", [True, False], ids=["well", "late"])
def test_arrays_are_locked_until_it_ends(ends: bool, taken: list[int]) -> None:
    over = trio.Event()

    async def main(rank: overlap.Rank) -> list[bool]:
        x, out = np.ones(100_000), np.empty(100_000)
        for _ in range(BEFORE):
            await rank.all_reduce(x, out=out)
        if rank.rank == 1 and not ends:
            await over.wait()
            return []
        future = rank.all_reduce(x, out=out, timeout_s=None if ends else 0.01)
        locked = [x.flags.writeable, out.flags.writeable]
        await trio.to_thread.run_sync(future.exception)
        over.set()
        return [*locked, x.flags.writeable, out.flags.writeable, future.exception() is None]

    assert run_far(main, 2, 1, wires=by_sockets)[0] == [False, False, True, True, ends]
    assert BEFORE in taken


def test_who_comes_to_a_rank_that_has_finished_is_told() -> None:
    gone = trio.Event()

    async def main(rank: overlap.Rank) -> None:
        for _ in range(BEFORE):
            await rank.all_reduce(np.ones(3))
        if rank.rank == 0:
            await gone.wait()
            await rank.all_reduce(np.ones(3))

    async def nemesis(everybody: list[Company]) -> None:
        await everybody[0].heard(Finished)
        gone.set()

    error, _ = run_far(main, 2, 1, nemesis=nemesis, wires=by_sockets)
    assert isinstance(error, overlap.RankFailedError)
    assert "rank 1 finished its program while rank 0 needs it in all_reduce #3" in str(error)


def test_an_operation_that_cannot_begin_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with it is told to all, and the next one goes on alike."""
    laid = Compiled.lay_out_on_arrays

    def lay_out_on_arrays(self: Compiled, operation: overlap.CollectiveFuture) -> object:
        if operation.seq == BEFORE and operation.group.rank == 1:
            raise MemoryError("none left")
        return laid(self, operation)

    monkeypatch.setattr(Compiled, "lay_out_on_arrays", lay_out_on_arrays)
    came = trio.Event()

    async def main(rank: overlap.Rank) -> float:
        x = np.ones(4)
        for _ in range(BEFORE):
            await rank.all_reduce(x)
        if rank.rank == 1:  # whoever hears of it before it comes there gives up the group
            await came.wait()
        future = rank.all_reduce(x)
        came.set()
        with pytest.raises(MemoryError if rank.rank == 1 else overlap.PeerFailedError, match="none left"):
            await future
        return float((await rank.all_reduce(x))[0])

    assert run_far(main, 2, 1, wires=by_sockets) == [2.0, 2.0]
