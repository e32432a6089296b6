"""Ranks that disagree: the same error on every rank, with both ranks, both calls and both source lines."""

from collections.abc import Callable
from sys import _getframe

import numpy as np
import pytest

import overlap
from overlap import CollectiveMismatchError, RemoteError
from overlap.processes.control import ControlPlane
from overlap.runtime.communicators import Communicators
from tests.errors import error_from

from .companies import Wires, by_shared_memory, by_sockets, run_far
from .worlds import PATHS, Turns, failure_of, run

Issue = Callable[[overlap.Rank], "overlap.CollectiveFuture"]

HERE = "tests/runtime/test_mismatch.py"

X = np.ones(6, np.float32)
CALLS: list[tuple[str, Issue, str, Issue, str]] = [
    ("kind", lambda r: r.all_reduce(X), "all_reduce(float32 (6,), op='sum')",
     lambda r: r.broadcast(X), "broadcast(float32 (6,), root=0)"),
    ("shape", lambda r: r.all_reduce(X), "all_reduce(float32 (6,), op='sum')",
     lambda r: r.all_reduce(X[:5]), "all_reduce(float32 (5,), op='sum')"),
    ("axes", lambda r: r.all_reduce(X), "all_reduce(float32 (6,), op='sum')",
     lambda r: r.all_reduce(X.reshape(2, 3)), "all_reduce(float32 (2, 3), op='sum')"),
    ("dtype", lambda r: r.all_gather(X), "all_gather(float32 (6,))",
     lambda r: r.all_gather(X.astype(np.int32)), "all_gather(int32 (6,))"),
    ("op", lambda r: r.all_reduce(X), "all_reduce(float32 (6,), op='sum')",
     lambda r: r.all_reduce(X, "max"), "all_reduce(float32 (6,), op='max')"),
    ("op of reduce_scatter", lambda r: r.reduce_scatter(X), "reduce_scatter(float32 (6,), op='sum')",
     lambda r: r.reduce_scatter(X, "mean"), "reduce_scatter(float32 (6,), op='mean')"),
    ("root", lambda r: r.broadcast(X), "broadcast(float32 (6,), root=0)",
     lambda r: r.broadcast(X, 1), "broadcast(float32 (6,), root=1)"),
    ("root without an array", lambda r: r.scatter(X if r.rank == 0 else None), "scatter({}, root=0)",
     lambda r: r.scatter(X, 1), "scatter(float32 (6,), root=1)"),
    ("root of reduce", lambda r: r.reduce(X), "reduce(float32 (6,), op='sum', root=0)",
     lambda r: r.reduce(X, 2), "reduce(float32 (6,), op='sum', root=2)"),
    ("array of a receiver", lambda r: r.broadcast(X, 0), "broadcast(float32 (6,), root=0)",
     lambda r: r.broadcast(X[:2], 0), "broadcast(float32 (2,), root=0)"),
    ("pairs", lambda r: r.permute(X, [(0, 1)]), "permute(float32 (6,), pairs=[(0, 1)])",
     lambda r: r.permute(X, [(0, 2)]), "permute(float32 (6,), pairs=[(0, 2)])"),
    ("order of pairs", lambda r: r.permute(X, [(0, 1), (1, 0)]), "permute(float32 (6,), pairs=[(0, 1), (1, 0)])",
     lambda r: r.permute(X, [(1, 0), (0, 1)]), "permute(float32 (6,), pairs=[(1, 0), (0, 1)])"),
    ("barrier", lambda r: r.barrier(), "barrier()",
     lambda r: r.all_to_all(X), "all_to_all(float32 (6,))"),
]  # fmt: skip


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sites_of(issue: Issue) -> set[str]:
    """Where one of the lambdas above may say that it was called: the lines of its code."""
    return {f"{HERE}:{line}" for _, _, line in issue.__code__.co_lines() if line is not None}


@pytest.mark.parametrize("odd_one", [0, 1, 2])
@pytest.mark.parametrize(
    ("usual", "usual_call", "odd", "odd_call"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS]
)
def test_every_rank_learns_who_disagrees_with_whom(
    usual: Issue, usual_call: str, odd: Issue, odd_call: str, odd_one: int, path: str
) -> None:
    async def main(rank: overlap.Rank) -> CollectiveMismatchError:
        error = await error_from(CollectiveMismatchError, (odd if rank.rank == odd_one else usual)(rank))
        assert (await rank.all_reduce(np.ones(1))).tolist() == [3.0]  # and the world goes on
        return error

    errors = run(main, 3, path=path)
    assert len({id(error) for error in errors}) == 3
    assert len({str(error) for error in errors}) == 1
    error = errors[0]
    assert error.group == "world"
    assert error.seq == 0
    assert odd_one in error.ranks
    for rank, call, where in zip(error.ranks, error.calls, error.call_sites, strict=True):
        said = odd_call if rank == odd_one else usual_call.format("float32 (6,)" if rank == 0 else "None")
        assert call == said
        assert where in sites_of(odd if rank == odd_one else usual)
        assert f"rank {rank} called {call} at {where}" in str(error)
    assert error.ranks[0] != error.ranks[1]


@pytest.mark.parametrize("order", [(2, 0, 1, 3), (0, 2, 1, 3), (1, 0, 3, 2)])
def test_the_odd_one_out_is_told_first_whoever_comes_first(order: tuple[int, ...]) -> None:
    async def main(rank: overlap.Rank) -> None:
        async with turns.of(rank.rank):
            future = rank.all_reduce(np.ones(3), "max" if rank.rank == 2 else "sum")
        await future

    turns = Turns(order)
    failure = failure_of(run, main, 4)
    line = main.__code__.co_firstlineno + 2
    last = "every rank of a group must issue the same operations in the same order; the other 3 ranks were stopped"
    at = f"float64 (3,), op='{{}}') at {HERE}:{line}"
    other = failure.cause.ranks[1]  # type: ignore[attr-defined]
    assert failure.rank == 2
    assert str(failure) == (
        "ranks disagree: CollectiveMismatchError: operation #0 on group 'world' differs between ranks: "
        f"rank 2 called all_reduce({at.format('max')}, rank {other} called all_reduce({at.format('sum')}; {last}"
    )


def test_two_that_differ_do_not_wait_for_ever_for_a_third() -> None:
    """It may wait for one of them, in something else."""

    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 2:
            await rank.recv(((1,), float), 0)
        await rank.all_reduce(np.ones(3), "max" if rank.rank else "sum")
        await rank.send(np.ones(1), 2)

    failure = failure_of(run, main, 3)
    assert isinstance(failure.cause, CollectiveMismatchError)
    assert sorted(failure.cause.ranks) == [0, 1]


def test_the_message() -> None:
    lines: dict[int, int] = {}

    async def main(rank: overlap.Rank) -> str:
        group = rank.group([1, 0], name="dp")
        await group.barrier()
        if rank.rank == 0:
            lines[0] = _getframe().f_lineno + 1
            future = group.all_reduce(np.ones((2, 2)), "prod")
        else:
            lines[1] = _getframe().f_lineno + 1
            future = group.all_gather(np.ones(4, np.int16))
        return str(await error_from(CollectiveMismatchError, future))

    first, second = run(main, 2)
    assert first == second
    told = {
        0: f"rank 0 called all_reduce(float64 (2, 2), op='prod') at {HERE}:{lines[0]}",
        1: f"rank 1 called all_gather(int16 (4,)) at {HERE}:{lines[1]}",
    }
    message = "operation #1 on group 'dp' differs between ranks: {}, {}; every rank of a group must issue the same {}"
    rest = "operations in the same order"
    assert first in {message.format(told[a], told[b], rest) for a, b in ((0, 1), (1, 0))}


@pytest.mark.parametrize("algorithm", [None, "ring"])
@pytest.mark.parametrize("wires", [by_shared_memory, by_sockets], ids=["shared memory", "sockets"])
@pytest.mark.parametrize(
    ("usual", "usual_call", "odd", "odd_call"), [row[1:] for row in CALLS[:2]], ids=[row[0] for row in CALLS[:2]]
)
def test_messages_that_meet_need_no_report(
    usual: Issue,
    usual_call: str,
    odd: Issue,
    odd_call: str,
    wires: Wires,
    algorithm: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message carries its call, so what ranks report after a while is not waited for."""
    monkeypatch.setattr(ControlPlane, "send_waiting_call", lambda *report: None)
    monkeypatch.setattr(Communicators, "ask_others", lambda *report: None)

    async def main(rank: overlap.Rank) -> str:
        await rank.barrier()
        return str(await error_from(CollectiveMismatchError, (usual if rank.rank == 0 else odd)(rank)))

    for error in run_far(main, 2, 1, wires=wires, algorithm=algorithm):
        assert isinstance(error, str), error
        assert "operation #1 on group 'world'" in error
        assert f"rank 0 called {usual_call} at {HERE}:" in error
        assert f"rank 1 called {odd_call} at {HERE}:" in error


GIVING: list[tuple[str, Issue, str, Issue, str]] = [
    ("roots", lambda r: r.broadcast(X), "", lambda r: r.broadcast(X, 1), ""),
    ("takers", lambda r: r.gather(X), "", lambda r: r.gather(X, 1), ""),
    ("gives or takes", lambda r: r.broadcast(X), "", lambda r: r.reduce(X), ""),
    ("nobody", lambda r: r.permute(X, []), "", lambda r: r.permute(X, [(0, 1)]), ""),
]


@pytest.mark.parametrize("odd_rank", [0, 2])
@pytest.mark.parametrize("algorithm", [None, "ring"])
@pytest.mark.parametrize("wires", [by_shared_memory, by_sockets], ids=["shared memory", "sockets"])
@pytest.mark.parametrize(
    ("usual", "odd"), [(row[1], row[3]) for row in (*CALLS, *GIVING)], ids=[row[0] for row in (*CALLS, *GIVING)]
)
def test_ranks_that_catch_it_and_go_on_never_wait_for_each_other(
    usual: Issue, odd: Issue, wires: Wires, algorithm: str | None, odd_rank: int
) -> None:
    """Some have ended the operation well, and others have failed at it: in the end all go on, or all fail."""

    async def main(rank: overlap.Rank) -> list[int | None]:
        await rank.barrier()
        ended: list[int | None] = []
        for issue in (odd if rank.rank == odd_rank else usual, *[usual] * 3, lambda r: r.all_reduce(X)):
            try:
                await issue(rank)
                ended.append(None)
            except CollectiveMismatchError as error:
                ended.append(error.seq)
        return ended

    ends = run_far(main, 3, 1, wires=wires, algorithm=algorithm, timeout_s=10)
    for end in ends:
        assert isinstance(end, list) or isinstance(getattr(end, "cause", None), CollectiveMismatchError | RemoteError)
    lists = [end for end in ends if isinstance(end, list)]
    assert {seq for end in lists for seq in end} <= {None, 1}


def test_operations_in_another_order(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        reduce, gather = np.ones(3), np.ones(2, np.int32)
        if rank.rank == 1:
            futures = [rank.all_gather(gather), rank.all_reduce(reduce)]
        else:
            futures = [rank.all_reduce(reduce), rank.all_gather(gather)]
        said = []
        for future in futures:
            said.append(str(await error_from(CollectiveMismatchError, future)))
        return said

    errors = run(main, 3, path=path)
    assert errors[0] == errors[1] == errors[2]
    assert [error.split(" on ")[0] for error in errors[0]] == ["operation #0", "operation #1"]


@pytest.mark.parametrize("change", [{"shape": (4,)}, {"dtype": np.dtype(np.float32)}])
def test_sender_and_receiver(change: dict[str, object], path: str) -> None:
    like = {"shape": (3,), "dtype": np.dtype(np.float64)} | change

    async def main(rank: overlap.Rank) -> CollectiveMismatchError | None:
        if rank.rank == 2:
            return None
        with pytest.raises(CollectiveMismatchError) as caught:
            await (rank.send(np.ones(3), 1) if rank.rank == 0 else rank.recv((like["shape"], like["dtype"]), 0))
        return caught.value

    sender, receiver, _ = run(main, 3, path=path)
    assert sender is not None
    assert str(sender) == str(receiver)
    calls = dict(zip(sender.ranks, sender.calls, strict=True))
    assert calls == {0: "send/recv(float64 (3,))", 1: f"send/recv({like['dtype']} {like['shape']})"}


@pytest.mark.parametrize("elements", [3, 1 << 18])
def test_in_the_middle_of_a_run_of_operations(elements: int, path: str) -> None:
    """The ones before and after succeed, and all arrays come back."""

    async def main(rank: overlap.Rank) -> list[object]:
        arrays = [np.full(elements, i + 1.0) for i in range(5)]
        ops = ["sum", "sum", "max" if rank.rank == 1 else "sum", "sum", "sum"]
        futures = [rank.all_reduce(x, op) for x, op in zip(arrays, ops, strict=True)]
        got: list[object] = []
        for future in futures:
            try:
                got.append((await future)[-1])
            except CollectiveMismatchError as error:
                got.append(error.seq)
        assert all(x.flags.writeable for x in arrays)
        return got

    assert run(main, 3, path=path) == [[3.0, 6.0, 2, 12.0, 15.0]] * 3


def test_nobody_awaits_it(path: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        rank.all_reduce(np.ones(1 + rank.rank))

    failure = failure_of(run, main, 2, path=path)
    assert isinstance(failure.cause, CollectiveMismatchError)
    assert "rank 1 called all_reduce(float64 (2,), op='sum') at tests/runtime/test_mismatch.py:" in str(failure)


def test_inputs_that_come_late(path: str) -> None:
    async def main(rank: overlap.Rank) -> tuple[int, ...]:
        future = rank.all_reduce(rank.compute(np.ones, 3 + (rank.rank == 2)))
        return tuple(sorted((await error_from(CollectiveMismatchError, future)).ranks))

    ranks = run(main, 3, path=path)
    assert ranks[0] == ranks[1] == ranks[2]
    assert 2 in ranks[0]
