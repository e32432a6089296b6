"""Ranks of several processes whose differing calls make none of them wait: each gives, and receives nothing."""

import re
from collections.abc import Awaitable, Callable
from random import Random

import numpy as np
import pytest
import trio

import overlap
from overlap.processes.control import ControlPlane
from overlap.runtime.communicator import Communicator
from overlap.runtime.match import History, RankCall

from .companies import Wires, by_shared_memory, by_sockets, run_far

WIRES = [by_sockets, by_shared_memory]


async def broadcast(rank: overlap.Rank) -> object:
    return await rank.broadcast(np.full(2, rank.rank), root=rank.rank)


async def scatter(rank: overlap.Rank) -> object:
    return await rank.scatter(np.arange(rank.world_size), root=rank.rank)


async def reduce(rank: overlap.Rank) -> object:
    return await rank.reduce(np.full(2, rank.rank), root=(rank.rank + 1) % rank.world_size)


async def gather(rank: overlap.Rank) -> object:
    return await rank.gather(np.full(2, rank.rank), root=(rank.rank + 1) % rank.world_size)


async def permute(rank: overlap.Rank) -> object:
    return await rank.permute(np.full(2, rank.rank), [(rank.rank, (rank.rank + 1) % rank.world_size)])


async def one_of_each(rank: overlap.Rank) -> object:
    return await (gather, reduce, permute)[rank.rank](rank)


OWN_ROOT, ANY_CALL = r"rank (\d) called \w+\(int64 \(\d,\), root=\1\)", r"rank (\d) called \w+\(int64 "


@pytest.mark.parametrize("wires", WIRES)
@pytest.mark.parametrize(
    ("issue", "called"),
    [
        (broadcast, OWN_ROOT),
        (scatter, OWN_ROOT),
        *((issue, ANY_CALL) for issue in (reduce, gather, permute, one_of_each)),
    ],
)
def test_differing_calls_end_the_world_at_its_end_at_the_latest(
    issue: Callable[[overlap.Rank], Awaitable[object]], called: str, wires: Wires
) -> None:
    async def main(rank: overlap.Rank) -> None:
        await issue(rank)

    for error in run_far(main, 3, 1, wires=wires):
        assert isinstance(error, overlap.RankFailedError)
        assert "operation #0 on group 'world' differs between ranks" in str(error)
        assert len(re.findall(called, str(error))) == 2


@pytest.mark.parametrize("issue", [broadcast, gather])
def test_a_later_operation_reports_it_however_many_came_before(
    issue: Callable[[overlap.Rank], Awaitable[object]],
) -> None:
    async def main(rank: overlap.Rank) -> str:
        await issue(rank)
        try:
            while True:
                await rank.all_reduce(np.ones(2))
        except overlap.CollectiveMismatchError as error:
            return str(error)[:12]

    # in 25 ms, after which calls are reported, some hundred operations end: more than a communicator remembers
    assert run_far(main, 2, 1, wires=by_shared_memory) == ["operation #0"] * 2


@pytest.mark.parametrize("wires", WIRES)
def test_calls_that_agree_are_reported_and_fail_nothing(wires: Wires) -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        results = list[object]()
        for step in range(50):
            root = step % rank.world_size
            results.append(await rank.reduce(np.ones(1), root=root))
            results.append(await rank.gather(np.ones(1), root=root))
            results.append(await rank.permute(np.ones(1), [(root, (root + 1) % rank.world_size)]))
            await trio.sleep(0.001)
        return [result for result in results if result is not None]

    assert [len(results) for results in run_far(main, 3, 1, wires=wires)] == [84, 84, 82]


# -- ranks without an array: they read the call of another rank in its row or message ---------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of operations whose call processes ask for; that others wait for long is reported to nobody."""
    seqs: list[int] = []
    send = ControlPlane.send_waiting_call

    def seen(self: ControlPlane, of: History, seq: int, call: RankCall) -> None:
        seqs.append(seq)
        send(self, of, seq, call)

    monkeypatch.setattr(ControlPlane, "send_waiting_call", seen)
    monkeypatch.setattr(Communicator, "ask_about_waits", lambda *_: None)
    return seqs


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("wires", WIRES)
def test_ranks_without_an_array_ask_nobody(wires: Wires, each: int, asked: list[int]) -> None:
    """Dtype, shape, root and kind change; whoever comes first."""
    chance = Random(each)
    calls = [(chance.random() < 0.5, chance.choice(["f4", "i8", "c16"]), chance.randrange(1, 40)) for _ in range(60)]

    async def main(rank: overlap.Rank) -> None:
        size = rank.world_size
        await rank.barrier()  # the board is open then
        for seq, (whole, dtype, count) in enumerate(calls):
            root = seq % size
            x = np.arange(count * size, dtype=dtype).reshape(size, count)
            if (seq + rank.rank) % 3 == 0:
                await trio.sleep(0.001)
            issue = rank.broadcast if whole else rank.scatter
            result = await issue(x if rank.rank == root else None, root=root)
            expected = x if whole else x[rank.rank : rank.rank + 1]
            assert np.array_equal(result, expected)
            assert result.dtype == dtype

    assert run_far(main, 2, each, wires=wires) == [None] * 2 * each
    assert asked == []


@pytest.mark.parametrize("wires", WIRES)
def test_a_call_that_is_too_long_for_a_signature_is_asked_for(wires: Wires, asked: list[int]) -> None:
    async def main(rank: overlap.Rank) -> None:
        await rank.barrier()
        tree = {f"a long name of layer {i}": np.full(i, 1.0) for i in range(40)}
        given = await rank.broadcast(tree if rank.rank == 0 else None)
        assert {name: array.tolist() for name, array in given.items()} == {n: a.tolist() for n, a in tree.items()}

    assert run_far(main, 2, 1, wires=wires) == [None, None]
    assert sorted(asked) == [1, 1]  # the question, and its answer


@pytest.mark.parametrize("wires", WIRES)
def test_an_answer_may_come_before_the_row_that_shows_the_same(wires: Wires) -> None:
    """Ranks that wait for long have asked: the root answers and posts at once."""

    async def main(rank: overlap.Rank) -> None:
        await rank.barrier()
        for _ in range(5):
            if rank.rank == 0:
                await trio.sleep(0.12)
            tree = {"a name that is too long for the signature of a call, " * 2: np.ones(3)}
            assert await rank.broadcast(tree if rank.rank == 0 else None)

    assert run_far(main, 2, 2, timeout_s=20, wires=wires) == [None] * 4


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("wires", WIRES)
def test_a_rank_without_an_array_sees_another_call(wires: Wires, first: int) -> None:
    async def main(rank: overlap.Rank) -> None:
        await rank.barrier()
        if rank.rank != first:
            await trio.sleep(0.01)
        await (rank.all_reduce(np.ones(3)) if rank.rank == 0 else rank.broadcast(None, timeout_s=5))

    for error in run_far(main, 2, 1, wires=wires):
        assert isinstance(error, overlap.RankFailedError)
        assert "ranks disagree: CollectiveMismatchError: operation #1" in str(error)
        assert "rank 0 called all_reduce" in str(error)
        assert "rank 1 called broadcast" in str(error)


@pytest.mark.parametrize("wires", WIRES)
def test_an_array_of_another_shape_for_the_result_is_refused_once_the_call_is_known(wires: Wires) -> None:
    async def main(rank: overlap.Rank) -> None:
        await rank.barrier()
        x = np.ones(3) if rank.rank == 0 else None
        await rank.broadcast(x, out=np.empty(4) if rank.rank == 2 else None)

    for error in run_far(main, 2, 2, wires=wires):
        assert isinstance(error, overlap.RankFailedError)
        assert "(4,)" in str(error)


@pytest.mark.parametrize("wrong", [1, 2])
@pytest.mark.parametrize("wires", WIRES)
def test_only_the_root_shows_the_call(wires: Wires, wrong: int) -> None:
    """A rank with an array for the result assumes dtype and shape, perhaps wrongly."""
    seen: list[str] = []

    async def main(rank: overlap.Rank) -> None:
        await rank.barrier()
        if rank.rank == 0:
            await trio.sleep(0.02)
        out = np.empty(4) if rank.rank == wrong else None
        try:
            await rank.broadcast(np.ones(3) if rank.rank == 0 else None, out=out)
        except overlap.OverlapError as error:
            seen.append(str(error))
            raise

    for error in run_far(main, 3, 1, wires=wires):
        assert isinstance(error, overlap.RankFailedError)
        assert "out: expected" in str(error)
    assert not [each for each in seen if "differs between ranks" in each]


@pytest.mark.parametrize("wires", WIRES)
def test_a_wait_for_the_call_of_another_rank_ends_at_its_deadline(wires: Wires) -> None:
    over = trio.Event()

    async def main(rank: overlap.Rank) -> None:
        await rank.barrier()
        if rank.rank == 0:
            await over.wait()
            return
        with pytest.raises(overlap.DeadlineError):
            await rank.broadcast(None, timeout_s=0.01)
        over.set()

    first, second = run_far(main, 2, 1, wires=wires)
    assert second is None, (first, second)
