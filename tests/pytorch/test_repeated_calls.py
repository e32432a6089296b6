"""Calls of torch that were made before: in few steps, and like all others in what they give, show and refuse."""

import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from time import sleep
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")

import torch.distributed as dist  # noqa: E402

from overlap import Connection  # noqa: E402
from overlap.runtime.port import Ports  # noqa: E402
from overlap.torch import ProcessGroup  # noqa: E402
from transports.shared_memory.joining import MemoryJoining  # noqa: E402
from transports.shared_memory.segment import LoanPool  # noqa: E402

from .pairs import connected, do  # noqa: E402

ROUNDS = 12
_WAY = {"asyncOp": True}


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the operations that were issued in few steps."""
    names: list[str] = []
    issue = Ports.reissue

    def issued(ports: Ports, *args: Any) -> Any:
        operation = issue(ports, *args)
        if operation is not None:
            names.append(operation.op)
        return operation

    monkeypatch.setattr(Ports, "reissue", issued)
    return names


@pytest.fixture(params=["waits", "goes on"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the calls of a test wait, as functions of torch do by default, or return at once."""
    monkeypatch.setitem(_WAY, "asyncOp", request.param != "waits")


@pytest.fixture
def worlds(again: list[str]) -> Iterator[list[Connection]]:
    with connected(2, dist.HashStore()) as both:
        yield both


def on(world: Connection) -> ProcessGroup:
    return ProcessGroup(dist.HashStore(), world.rank.world, dist.default_pg_timeout)


def each(worlds: list[Connection], program: Callable[[ProcessGroup], Any]) -> list[Any]:
    groups = [on(world) for world in worlds]
    return do([lambda group=group: program(group) for group in groups])


def options(make: Any, **more: Any) -> Any:
    made = make()
    for name, value in {**_WAY, **more}.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("count", [2, 4_000, 100_000, 400_000])
def test_every_form_that_is_kept(count: int, worlds: list[Connection], again: list[str]) -> None:
    def program(group: ProcessGroup) -> list[Any]:
        rank, found = group.rank(), []
        for turn in range(ROUNDS):
            x = torch.full((count,), float(turn + rank))
            both, half = torch.zeros(2 * count), torch.zeros(count // 2)
            group.allreduce([x], options(dist.AllreduceOptions)).wait()
            largest = torch.full((count,), float(rank))
            group.allreduce([largest], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)).wait()
            group.all_gather_single(both, torch.full((count,), float(rank + turn))).wait()
            ones = torch.full((count,), 1.0 + rank)
            group.reduce_scatter_single(half, ones, options(dist.ReduceScatterOptions)).wait()
            swapped = torch.zeros(count)
            group.all_to_all_single(swapped, torch.full((count,), float(rank)), [], []).wait()
            root = torch.full((count,), float(turn if rank == 1 else -1))
            group.broadcast([root], options(dist.BroadcastOptions, rootRank=1)).wait()
            group.barrier().wait()
            parts = [x, largest, both[:count], both[count:], half, swapped[: count // 2], swapped[count // 2 :], root]
            assert all((part == part[0]).all() for part in parts)
            found.append([float(part[0]) for part in parts])
        return found

    expected = [[2 * turn + 1, 1, turn, turn + 1, 3, 0, 1, turn] for turn in range(ROUNDS)]
    assert each(worlds, program) == [expected] * 2
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"} <= set(again)


@pytest.mark.parametrize("count", [2, 4_000, 400_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_forms_with_a_root_or_lists(count: int, dtype: Any, worlds: list[Connection], again: list[str]) -> None:
    def parts_of(turn: int, whole: Any) -> Any:
        """Return two parts: in one piece, swapped, apart, or as opposites and conjugates of what the memory holds."""
        first, second = whole.chunk(2)
        forms = [
            [first, second], [second, first], [first, second.clone()],
            [first, torch._neg_view(second)], [first.conj(), second.conj()],
        ]  # fmt: skip
        return forms[turn % len(forms)]

    def program(group: ProcessGroup) -> list[Any]:
        rank, found = group.rank(), []
        for turn in range(ROUNDS):
            whole = torch.zeros(2 * count, dtype=dtype)
            own = torch.full((count,), turn + rank + 2j * rank if dtype.is_complex else turn + rank, dtype=dtype)
            gathered = parts_of(turn, whole)
            group.allgather([gathered], [own]).wait()
            root = turn % 2
            taken = parts_of(turn // 2, torch.zeros(2 * count, dtype=dtype))
            group.gather([taken] if rank == root else [], [own], options(dist.GatherOptions, rootRank=root)).wait()
            given = parts_of(turn, torch.arange(2 * count).to(dtype))
            out = torch.zeros(count, dtype=dtype)
            group.scatter([out], [given] if rank == root else [], options(dist.ScatterOptions, rootRank=root)).wait()
            assert torch.equal(out, parts_of(turn, torch.arange(2 * count).to(dtype))[rank])
            total = own.clone()
            group.reduce([total], options(dist.ReduceOptions, rootRank=root)).wait()
            lists = [gathered, *([taken, [total]] if rank == root else [])]
            assert all((part == part[0]).all() for parts in lists for part in parts)
            found.append([complex(part[0]) for parts in lists for part in parts])
        return found

    def expected(rank: int) -> list[list[complex]]:
        every = [[turn + r + (2j * r if dtype.is_complex else 0) for r in (0, 1)] for turn in range(ROUNDS)]
        return [[*pair, *([*pair, sum(pair)] if rank == turn % 2 else [])] for turn, pair in enumerate(every)]

    assert each(worlds, program) == [expected(0), expected(1)]
    assert {"all_gather", "gather", "scatter", "reduce"} <= set(again)


def test_a_rank_may_issue_from_the_start_what_another_repeats(worlds: list[Connection], again: list[str]) -> None:
    def program(group: ProcessGroup) -> list[float]:
        found = []
        for turn in range(ROUNDS):
            apart = group.rank() == 1 and turn % 2
            x = torch.ones(3000, 2).t() if apart else torch.ones(2, 3000)
            group.allreduce([x], options(dist.AllreduceOptions)).wait()
            found.append(float(x.sum()))
        return found

    assert each(worlds, program) == [[12_000.0] * ROUNDS] * 2
    assert again


def test_each_is_in_the_timeline(worlds: list[Connection], again: list[str]) -> None:
    def program(group: ProcessGroup) -> None:
        for _ in range(ROUNDS):
            group.allreduce([torch.ones(5)], options(dist.AllreduceOptions)).wait()
        for _ in range(ROUNDS):
            group.all_to_all_single(torch.ones(4), torch.ones(4), [], []).wait()

    each(worlds, program)
    assert {"all_reduce", "all_to_all"} <= set(again)
    for world in worlds:
        exchanges = [span.info.op for span in world.rank.recorder.spans() if span.name == "all_to_all_single"]
        assert exchanges == ["all_to_all"] * ROUNDS
        spans = [span for span in world.rank.recorder.spans() if span.name == "all_reduce"]
        assert [span.info.seq for span in spans] == [*range(ROUNDS)]
        assert {(span.info.op, span.info.nbytes, span.info.dtype) for span in spans} == {("all_reduce", 20, "float32")}
        assert all("test_repeated_calls.py:" in span.info.call_site for span in spans)


def test_ranks_that_differ_are_told_so(worlds: list[Connection], again: list[str]) -> None:
    def program(group: ProcessGroup) -> str:
        for count in (*[5] * ROUNDS, *[7] * ROUNDS):
            group.allreduce([torch.ones(count)], options(dist.AllreduceOptions)).wait()
        with pytest.raises(dist.DistBackendError) as caught:
            group.allreduce([torch.ones(5 + 2 * group.rank())], options(dist.AllreduceOptions)).wait()
        return str(caught.value)

    for text in each(worlds, program):
        assert f"#{2 * ROUNDS} on group" in text
        assert "float32 (5,)" in text
        assert "float32 (7,)" in text
    assert again


def test_without_a_place_a_program_does_it(
    worlds: list[Connection], again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(group: ProcessGroup) -> list[float]:
        found = []
        for turn in range(ROUNDS):
            x = torch.full((40_000,), 1.0 + group.rank())
            out = torch.zeros(80_000)
            group.allreduce([x], options(dist.AllreduceOptions)).wait()
            group.all_gather_single(out, x * turn).wait()
            found.append(float(x[-1] + out[0] + out[-1]))
        return found

    monkeypatch.setattr(MemoryJoining, "_can_read_peer", lambda *_: False)
    take = LoanPool.allocate
    monkeypatch.setattr(
        LoanPool, "allocate", lambda loan_pool, nbytes: None if nbytes == 160_000 else take(loan_pool, nbytes)
    )
    with connected(2, dist.HashStore()) as both:
        assert each(both, program) == [[3.0 + 6.0 * turn for turn in range(ROUNDS)]] * 2
    assert again


def test_after_an_abort_nothing_is_issued(worlds: list[Connection], again: list[str]) -> None:
    groups = [ProcessGroup(dist.HashStore(), w.rank.world, dist.default_pg_timeout, abort=lambda: None) for w in worlds]

    def turns(group: ProcessGroup) -> None:
        for _ in range(ROUNDS):
            group.allreduce([torch.ones(5)], options(dist.AllreduceOptions)).wait()

    do([lambda group=group: turns(group) for group in groups])
    groups[0].abort()
    for group in groups:
        with pytest.raises(dist.DistBackendError, match="aborted"):
            group.allreduce([torch.ones(5)], options(dist.AllreduceOptions)).wait()
    assert again


@pytest.mark.parametrize("late_s", [0.01, 0.2])
def test_late_ranks_are_waited_for(late_s: float, worlds: list[Connection], again: list[str]) -> None:
    def program(group: ProcessGroup) -> list[float]:
        found = []
        for turn in range(ROUNDS):
            if turn % 6 == 5 and group.rank() == turn // 6:
                sleep(late_s)
            x = torch.full((5,), float(turn))
            group.allreduce([x], options(dist.AllreduceOptions)).wait()
            found.append(float(x[0]))
        return found

    assert each(worlds, program) == [[2.0 * turn for turn in range(ROUNDS)]] * 2
    assert again == ["all_reduce"] * len(again)
    for world in worlds:
        assert [span.info.seq for span in world.rank.recorder.spans()] == [*range(ROUNDS)]


def test_a_rank_that_never_comes_is_waited_for_until_the_limit(worlds: list[Connection], again: list[str]) -> None:
    def program(group: ProcessGroup) -> str:
        for _ in range(ROUNDS):
            group.allreduce([torch.ones(5)], options(dist.AllreduceOptions)).wait()
        if group.rank():
            return ""
        with pytest.raises(dist.DistBackendError) as caught:
            group.allreduce([torch.ones(5)], options(dist.AllreduceOptions, timeout=timedelta(seconds=0.3))).wait()
        return str(caught.value)

    text = each(worlds, program)[0]
    assert f"all_reduce #{ROUNDS} on group 'world'" in text
    assert "0.3 s" in text
    assert "rank 1" in text


class Interrupted(Exception):
    """Raised by a handler of a signal."""


@pytest.mark.parametrize("after_s", [0.02, 0.15])
def test_what_a_handler_of_a_signal_interrupts_ends_all_the_same(after_s: float, worlds: list[Connection]) -> None:
    def interrupt(*_: object) -> None:
        if groups[0]._group._ports.context.handover.turn._is_owned():  # on a busy machine it is still issued
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            raise Interrupted

    def turns(group: ProcessGroup) -> float:
        x = torch.ones(5)
        for _ in range(ROUNDS):
            group.allreduce([x], options(dist.AllreduceOptions)).wait()
        return float(x[0])

    each(worlds, turns)
    groups, x = [on(world) for world in worlds], torch.ones(5)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        with pytest.raises(Interrupted):
            groups[0].allreduce([x], options(dist.AllreduceOptions)).wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    groups[1].allreduce([torch.ones(5)], options(dist.AllreduceOptions)).wait()
    assert each(worlds, turns) == [2.0**ROUNDS] * 2
    assert float(x[0]) == 2
