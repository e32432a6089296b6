"""Worlds of several processes: the same results, and the same errors, as in one."""

from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

import overlap
from overlap.processes import control
from overlap.processes.control import ControlPlane
from overlap.processes.wire import Finished, RankEvent, Waits
from overlap.runtime.message import Message
from overlap.waits.ends import RankView, Seen

from . import companies
from .cases import KINDS, Case, cases, differs
from .companies import LAYOUTS, Company, Wires, by_shared_memory, by_sockets, in_memory, run_far
from .test_collectives import check_world, issue_all

MATRIX = [(kind, layout) for kind in KINDS for layout in LAYOUTS]

WIRES: dict[str, Wires] = {
    "memory": in_memory,
    "Unix sockets": by_sockets,
    "shared memory": by_shared_memory,
    "slots": partial(by_shared_memory, reads=False),
    "TCP, 4 rails": partial(by_sockets, unix=False, rails=4),
    "TCP, staged": partial(by_sockets, unix=False, peer_direct=False),
}


def failures(outcomes: list[object]) -> list[overlap.RankFailedError]:
    """All processes must have failed; return their errors."""
    assert all(isinstance(outcome, overlap.RankFailedError) for outcome in outcomes), outcomes
    return outcomes  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "layout"), MATRIX, ids=lambda value: str(value))
@pytest.mark.parametrize("wires", WIRES)
def test_every_collective(kind: str, layout: tuple[int, int], wires: str) -> None:
    todo = list(cases(kind, layout[0] * layout[1]))
    check_world(todo, run_far(issue_all, *layout, todo, wires=WIRES[wires]))


@pytest.mark.parametrize("wires", WIRES)
def test_large_arrays_cross_in_many_chunks(wires: str) -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        x = np.arange(3 << 18, dtype=np.float32) + rank.rank  # 3 MiB: more than one chunk in every message
        total = np.arange(3 << 18, dtype=np.float32) * 4 + 6
        checks = [bool((await rank.all_reduce(x) == total).all())]
        checks.append(bool((await rank.broadcast(x, root=3) == x - rank.rank + 3).all()))
        halves = await rank.all_to_all(x)
        checks.append(bool((halves[: x.size // 4] == x[rank.rank * x.size // 4 :][: x.size // 4] - rank.rank).all()))
        return checks

    assert run_far(main, 2, 2, wires=WIRES[wires]) == [[True] * 3] * 4


@pytest.mark.parametrize("kind", ["broadcast", "scatter"])
@pytest.mark.parametrize("late", [True, False], ids=["root last", "root first"])
def test_ranks_that_only_receive_need_not_say_what(kind: str, late: bool) -> None:
    case = Case(kind=kind, shape=(4, 3), kwargs={"root": 3})
    there = [trio.Event(), trio.Event()]

    async def main(rank: overlap.Rank) -> np.ndarray | None:
        is_root = rank.rank == 3
        if is_root == late:
            await there[is_root].wait()
        future = case.issue(rank.world, case.input(3) if is_root else None)
        there[not is_root].set()
        return await future

    for rank, (got, want) in enumerate(zip(run_far(main, 2, 2), case.expected(4), strict=True)):
        assert differs(got, want) is None, rank


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The rank and number of each operation that the processes tell each other of, asked and unasked."""
    found = list[tuple[int, int]]()

    class Listening(ControlPlane):
        def _send_event(self, event: RankEvent) -> None:
            if isinstance(event, Waits):
                found.append((event.rank, event.seq))
            super()._send_event(event)

    monkeypatch.setattr(companies, "ControlPlane", Listening)
    monkeypatch.setattr(control, "_WATCH_S", 3600.0)
    return found


def test_a_root_tells_nobody_what_its_messages_show(waits: list[tuple[int, int]]) -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        mine = np.full(2, 7.0 * (1 - rank.rank))
        got = [float((await rank.broadcast(mine)).sum()) for _ in range(5)]
        for _ in range(2):
            got.append(float((await rank.broadcast(mine if rank.rank == 0 else None)).sum()))
        await rank.barrier()
        return got

    assert run_far(main, 2, 1, wires=by_sockets) == [[14.0] * 7] * 2
    assert waits == []


def test_a_root_answers_all_that_ask_at_once(waits: list[tuple[int, int]]) -> None:
    async def main(rank: overlap.Rank) -> float:
        name = "a name that makes the call too long for the signature of a message, so that others ask for it"
        tree = await rank.broadcast({name: np.ones(2)} if rank.rank == 1 else None, 1)
        return float(tree[name].sum())

    assert run_far(main, 4, 1, wires=by_sockets) == [2.0] * 4
    assert waits.count((1, 0)) == 1


@pytest.mark.parametrize("kind", ["broadcast", "scatter"])
@pytest.mark.parametrize("rows", [2, 1 << 17], ids=["at once", "in chunks"])
def test_who_gives_an_array_for_the_result_asks_nobody(kind: str, rows: int, waits: list[tuple[int, int]]) -> None:
    async def main(rank: overlap.Rank) -> bool:
        x = np.arange(2 * rows, dtype=np.int32).reshape(-1, 2) if rank.rank == 0 else None
        out = np.zeros((rows if kind == "broadcast" else rows // 2, 2), np.int32)
        await getattr(rank, kind)(x, 0, out)
        first = rank.rank * len(out) if kind == "scatter" else 0
        return bool((out.reshape(-1) == np.arange(2 * first, 2 * first + out.size, dtype=np.int32)).all())

    assert run_far(main, 2, 1, wires=by_sockets) == [True] * 2
    assert 1 not in {rank for rank, _ in waits}


@pytest.mark.parametrize("kind", ["broadcast", "scatter"])
@pytest.mark.parametrize("wires", ["Unix sockets", "shared memory"])
@pytest.mark.parametrize(
    ("out", "got"),
    [(np.zeros(3), r"float64 \(3,\)"), (np.zeros((4, 4)), r"float64 \(4, 4\)"), (np.zeros(4, "i1"), "int8")],
)
def test_an_array_for_the_result_that_is_wrong_is_named_when_the_root_has_said_what_comes(
    kind: str, out: np.ndarray, got: str, wires: str
) -> None:
    async def main(rank: overlap.Rank) -> list[bool]:
        x, mine = np.ones(4 if kind == "broadcast" else 8), out.copy()
        if rank.rank == 0:
            with suppress(overlap.PeerFailedError):  # what is short has left before the other rank was heard
                await getattr(rank, kind)(x)
        else:
            with pytest.raises(overlap.UsageError, match=rf"^out: expected float64 \(4,\), got {got}"):
                await getattr(rank, kind)(None, 0, mine)
        return [bool(mine.any()), mine.flags.writeable]

    assert run_far(main, 2, 1, wires=WIRES[wires]) == [[False, True]] * 2


def test_point_to_point_and_groups() -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        mesh = rank.mesh(dp=2, tp=2)
        total = await mesh["dp"].all_reduce(np.array([float(rank.rank)]))
        other = np.int64((rank.rank + 2) % 4)  # in the other process, whatever type its number has
        sent = rank.send(np.array([10.0 + rank.rank]), other, tag=7)
        got = await rank.recv(((1,), "float64"), int(other), tag=7)
        await sent
        half = await rank.split(rank.rank % 2)
        assert half is not None
        return [float(total[0]), float(got[0]), float((await half.all_gather(got)).sum())]

    assert run_far(main, 2, 2) == [[2.0, 12.0, 22.0], [4.0, 13.0, 24.0], [2.0, 10.0, 22.0], [4.0, 11.0, 24.0]]


def one_differs(first: str, second: str, **kwargs: object) -> list[overlap.RankFailedError]:
    async def main(rank: overlap.Rank) -> None:
        kind, dtype = (second if rank.rank >= 2 else first).split()
        await getattr(rank, kind)(np.zeros(4, dtype), **kwargs)

    return failures(run_far(main, 2, 2))


def test_the_end_of_messages_that_is_known_is_taken_for_no_other() -> None:
    async def main(rank: overlap.Rank) -> tuple[list[float], list[str]]:
        side, got, lanes = rank.stream("side"), [], []
        for number, stream in enumerate([None, None, None, "side", side, side, None, None]):
            x = np.full(3, number, np.float32)
            end = rank.send(x, 1, stream=stream) if rank.rank == 0 else rank.recv(x, 0, stream=stream)
            assert isinstance(end, Message)
            await end
            got.append(float(x[0]))
            lanes.append(end.port.stream.name)
        other: Any = 1 - rank.rank
        for wrong in ({"dst": float(other)}, {"dst": other, "tag": 0.0}, {"dst": other, "stream": [side]}):
            with pytest.raises(overlap.UsageError, match=list(wrong)[-1]):
                rank.send(x, **wrong)
        return got, lanes

    lanes = ["comm"] * 3 + ["side"] * 3 + ["comm"] * 2
    assert run_far(main, 2, 1) == [([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], lanes)] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("all_reduce float32", "all_reduce float64"),
        ("all_reduce float32", "all_reduce int32"),
        ("all_reduce float32", "all_gather float32"),
        ("broadcast float32", "all_reduce float32"),
        ("broadcast float32", "broadcast float64"),
    ],
)
def test_a_different_call_fails_every_process_with_both_calls(first: str, second: str) -> None:
    for error in one_differs(first, second):
        cause = error.cause
        if isinstance(cause, overlap.CollectiveMismatchError):
            assert {call.split("(")[0] for call in cause.calls} == {first.split()[0], second.split()[0]}
            assert len({rank // 2 for rank in cause.ranks}) == 2
            assert all("test_remote.py:" in site for site in cause.call_sites)
        else:
            assert isinstance(cause, overlap.RemoteError)
            assert cause.type_name == "CollectiveMismatchError"
        assert str(error).count(" called ") == 2


def test_another_operator_is_never_a_wrong_number() -> None:
    async def main(rank: overlap.Rank) -> None:
        await rank.all_reduce(np.ones(2), op="max" if rank.rank == 2 else "sum")

    for error in failures(run_far(main, 4, 1)):
        assert "rank 2 called all_reduce(float64 (2,), op='max')" in str(error)
        assert "called all_reduce(float64 (2,), op='sum')" in str(error)


def test_a_sender_that_has_gone_on_is_told_that_it_differed() -> None:
    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 0:
            await rank.permute(np.zeros(1), [])  # no wire: over at once
            await rank.barrier()
        else:
            await rank.all_reduce(np.zeros(1))

    for error in failures(run_far(main, 2, 1)):
        assert "operation #0 on group 'world' differs between ranks" in str(error)


def test_after_a_difference_nothing_begins() -> None:
    over, told, seen, heard = trio.Event(), trio.Event(), trio.Event(), list[str]()

    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 1:
            await rank.permute(np.zeros(1), [])  # no wire: over at once, and reported by nobody but rank 0
            over.set()
            await told.wait()
            try:
                await rank.barrier()
            except overlap.CollectiveMismatchError as error:
                heard.append(str(error))
                raise
            finally:
                seen.set()
        else:
            await over.wait()
            try:
                await rank.all_reduce(np.zeros(1))
            finally:
                told.set()
                await seen.wait()

    for error in failures(run_far(main, 2, 1)):
        assert "operation #0 on group 'world' differs between ranks" in str(error)
    assert [message.partition(":")[0] for message in heard] == ["operation #0 on group 'world' differs between ranks"]


@pytest.mark.parametrize("before", [0, 1], ids=["in a group that has not met yet", "in one that has"])
def test_a_call_that_was_told_before_anybody_came_to_it_is_compared_when_somebody_does(before: int) -> None:
    told = trio.Event()

    async def main(rank: overlap.Rank) -> None:
        for _ in range(before):
            await rank.barrier()
        if rank.rank == 0:
            await rank.broadcast(np.zeros(2), root=0)  # over when sent
            await rank.barrier()
        else:
            await told.wait()
            await rank.permute(np.zeros(1), [])  # no wire: over at once, so that nobody else can find the difference

    async def nemesis(everybody: list[Company]) -> None:
        await everybody[1].heard(Waits, seq=before + 1)
        told.set()

    for error in failures(run_far(main, 2, 1, nemesis=nemesis, wires=by_sockets)):
        assert f"operation #{before} on group 'world' differs between ranks" in str(error)
        assert "rank 0 called broadcast(float64 (2,)" in str(error)
        assert "rank 1 called permute(float64 (1,)" in str(error)


def test_a_failure_names_the_rank_in_the_other_process() -> None:
    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 3:
            raise ValueError("no such batch")
        await rank.barrier()

    far, _, near, _ = failures(run_far(main, 2, 2))
    assert (far.rank, near.rank) == (3, 3)
    assert isinstance(near.cause, ValueError)
    assert isinstance(far.cause, overlap.RemoteError)
    assert "raise ValueError" in far.cause.trace
    assert str(far).startswith("rank 3 failed at test_remote.py:")
    assert "ValueError: no such batch" in str(far)


def test_a_failed_input_fails_the_operation_in_every_process() -> None:
    def broken() -> np.ndarray:
        raise ZeroDivisionError("lost the gradient")

    async def main(rank: overlap.Rank) -> None:
        x = rank.compute(broken) if rank.rank == 1 else np.zeros(2)
        await rank.all_reduce(x)

    for error in failures(run_far(main, 2, 2)):
        assert error.rank == 1
        assert "ZeroDivisionError: lost the gradient" in str(error)


def test_an_end_that_its_rank_has_caught_fails_the_other_ends_in_every_process_and_nothing_else() -> None:
    def broken() -> np.ndarray:
        raise ZeroDivisionError("lost the gradient")

    async def main(rank: overlap.Rank) -> tuple[str, float]:
        x = rank.compute(broken) if rank.rank == 1 else np.zeros(2)
        try:
            await rank.all_reduce(x)
        except (overlap.OverlapError, ZeroDivisionError) as error:
            told = str(error)
        return told, float((await rank.all_reduce(np.ones(1)))[0])

    place = f"tests/runtime/test_remote.py:{main.__code__.co_firstlineno + 3}"
    told = f"rank 1 failed before all_reduce #0 on group 'world' ({place}): ZeroDivisionError: lost the gradient"
    assert run_far(main, 2, 2) == [(told, 4.0), ("lost the gradient", 4.0), (told, 4.0), (told, 4.0)]


@pytest.mark.parametrize("first", [True, False], ids=["before the others come", "while the others wait"])
def test_a_rank_that_leaves_early_is_named(first: bool) -> None:
    waiting, gone = trio.Event(), trio.Event()

    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 3:
            if not first:
                await waiting.wait()
            return
        if first:
            await gone.wait()
        future = rank.all_reduce(np.zeros(2))
        waiting.set()
        await future

    async def nemesis(everybody: list[Company]) -> None:
        for company in everybody[:3]:
            await company.heard(Finished)
        gone.set()

    for error in failures(run_far(main, 4, 1, nemesis=nemesis)):
        assert error.rank == 3
        assert "rank 3 finished its program while rank" in str(error)


def test_a_rank_may_leave_while_its_message_is_under_way() -> None:
    gone = trio.Event()

    async def main(rank: overlap.Rank) -> float:
        if rank.rank == 0:
            rank.send(np.array([4.0]), 1)
            return 0.0
        await gone.wait()
        return float((await rank.recv(((1,), "float64"), 0))[0])

    async def nemesis(everybody: list[Company]) -> None:
        await everybody[1].heard(Finished)
        gone.set()

    assert run_far(main, 2, 1, nemesis=nemesis, wires=by_sockets) == [0.0, 4.0]


def test_a_stall_reports_the_ranks_of_every_process() -> None:
    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 3:
            await rank.recv(((2,), "float32"), 0)
        else:
            await rank.barrier()

    for outcome in run_far(main, 2, 2, timeout_s=1.0):
        assert isinstance(outcome, overlap.StallError)
        assert [line.split(" (")[0] for line in outcome.report] == [
            "rank 0: barrier #0 of group 'world'",
            "rank 1: barrier #0 of group 'world'",
            "rank 2: barrier #0 of group 'world'",
            "rank 3: recv #0 from rank 0",
        ]
        assert outcome.report[0].endswith(" for rank 3")


def test_a_lost_process_ends_the_world() -> None:
    began = trio.Event()

    async def main(rank: overlap.Rank) -> None:
        if rank.rank < 2:
            with rank.step(7):
                future = rank.all_reduce(np.zeros(1))
                began.set()
                await future
        await trio.sleep_forever()

    async def nemesis(everybody: list[Company]) -> None:
        await began.wait()
        everybody[0].lose(1, "the connection ended")
        everybody[1].lose(0, "the connection ended")

    near, _, far, _ = failures(run_far(main, 2, 2, nemesis=nemesis))
    assert isinstance(near.cause, overlap.PeerLostError)
    text = str(near).removeprefix("rank 2 failed: PeerLostError: process 1 (ranks 2-3) is lost: the connection ended; ")
    assert text.startswith("rank 0 waited for it in all_reduce #0 on group 'world' (tests/runtime/test_remote.py:")
    assert text.endswith(") in step 7; the other 3 ranks were stopped")
    assert far.rank == 0


def waits_event(ranks: str, collective: str) -> list[object]:
    """Return the event that rank 1 waits in an operation, as it is sent."""
    call = [collective, None, None, None, 4, 0, [], [], False, False, None, ""]
    return ["Waits", 1, 1, ranks, 0, 2, call, b"", "there"]


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        (["Finished", 0, [], False, False], "it is about rank 0, which belongs to another process"),
        (
            ["Quiet", [msgspec.to_builtins(RankView(rank=1, seen=Seen.LEFT))]],
            "it has the view of rank 1, which belongs to process 0",
        ),
        (
            ["Finished", "3", [], False, False],
            "15 bytes that are no message of the control plane: Expected `int`, got `str` - at `$[1]`",
        ),
        (waits_event("0-3", "jump"), "invalid call: 'jump' is not a valid Collective"),
        (waits_event("3-0", "barrier"), "invalid ranks: '3-0' is not a rank or a range such as 3-5"),
        (
            ["OperationFailed", 1, 1, "0-3", 0, False, ["Difference", "world", 0, [0, 4], ["", ""], ["", ""]]],
            "it is about rank 4, and there are 4 ranks",
        ),
        (["Jump"], "6 bytes that are no message of the control plane: Invalid value 'Jump' - at `$[0]`"),
        (None, "1 bytes that are no message of the control plane: Expected `array`, got `None`"),
    ],
)
def test_what_is_not_understood_is_refused(message: object, refusal: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        await trio.sleep_forever()

    async def nemesis(everybody: list[Company]) -> None:
        everybody[1].send_notice(msgspec.msgpack.encode(message))
        everybody[1].lose(0, "its connection ended")

    near, *_ = failures(run_far(main, 2, 2, nemesis=nemesis))
    assert (near.rank, type(near.cause), str(near.cause)) == (
        2,
        overlap.OverlapError,
        f"process 1 sent an invalid event: {refusal}; this is a bug in overlap, please report it",
    )


@pytest.mark.parametrize("wires", [by_shared_memory, by_sockets])
def test_who_is_ahead_and_who_comes_later_take_one_way(wires: Wires) -> None:
    """The first operation of a group opens what its ranks have in common; a second one may be under way by then."""
    begun = trio.Event()

    async def main(rank: overlap.Rank) -> list[float]:
        ones = np.ones(3)
        if rank.rank == 0:
            both = [rank.all_reduce(ones), rank.all_reduce(2 * ones)]
            begun.set()
            return [float((await one)[0]) for one in both]
        await begun.wait()
        return [float((await rank.all_reduce(ones))[0]), float((await rank.all_reduce(2 * ones))[0])]

    assert run_far(main, 2, 1, wires=wires) == [[2.0, 4.0]] * 2
