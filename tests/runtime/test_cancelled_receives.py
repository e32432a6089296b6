"""Receives that are cancelled while their peer sends, leaves or disagrees: in a process, and between processes."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.lowlevel

import overlap
from overlap.runtime.callbacks import call_when_settled
from overlap.runtime.message import Message
from overlap.runtime.settling import wait_until_settled

from .companies import Wires, by_shared_memory, by_sockets, in_memory, run_far
from .test_cancel import end_of
from .test_withdrawn_receives import cancelled_await, ended
from .test_withdrawn_receives import run as run_here
from .worlds import TIMEOUT_S

R = overlap.Rank
Program = Callable[[R], Awaitable[Any]]
LIKE, LONGER = ((3,), "float64"), ((4,), "float64")
GO = ((1,), "float64")
LARGE = 200_000  # elements: 1.6 MB, which no wire takes without a receiver

FAR: dict[str, Wires] = {"memory": in_memory, "sockets": by_sockets, "shared memory": by_shared_memory}
HERE = ["virtual", "direct", "recording", "deciding later"]
WIRES = [*HERE, *FAR]


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(main: Program, wire: str) -> list[Any]:
    """Run a program on two ranks of one process, or of two."""
    if wire in HERE:
        return run_here(main, wire)
    found = run_far(main, 2, 1, wires=FAR[wire])
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


# -- while the peer sends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [3, LARGE])
def test_a_message_comes_once_whenever_its_receive_is_cancelled(elements: int, wire: str) -> None:
    """Cancelled, it goes to the next receive; else it comes to this one."""
    rounds = 8

    async def main(rank: R) -> list[Any]:
        came = []
        for number in range(rounds):
            if rank.rank == 1:
                rank.send(np.full(elements, float(number)), 0)
                await rank.recv(GO, 0, tag=1)
                continue
            first = rank.recv(((elements,), "float64"), 1)
            for _ in range(number):
                await trio.lowlevel.checkpoint() if wire != "virtual" else await trio.sleep(1e-6)
            taken = rank.recv(((elements,), "float64"), 1) if first.cancel() else first
            came.append({*(await taken).tolist()})
            assert first.cancelled() is (taken is not first)
            rank.send(np.ones(1), 1, tag=1)
        await rank.barrier()
        return came

    assert run(main, wire)[0] == [{float(number)} for number in range(rounds)]


# -- ranks that leave --------------------------------------------------------------------------------------------------


def test_a_rank_leaves_with_withdrawn_receives_and_a_later_message_to_it_names_it(wire: str) -> None:
    async def main(rank: R) -> str:
        if rank.rank == 0:
            await cancelled_await(rank.recv(LIKE, 1))
            assert rank.recv(LIKE, 1).cancel()
            await rank.barrier()
            return "left"
        await rank.barrier()
        with pytest.raises(overlap.RankLeftError):
            await rank.recv(GO, 0)  # until it has left
        return await end_of(rank.send(np.ones(3), 0, call_site="train.py:4"))

    send = "send #0 to rank 0 on group 'world' (train.py:4)"
    told = f"RankLeftError: rank 0 finished its program while rank 1 needs it in {send}"
    assert run(main, wire) == ["left", told]


def test_receives_that_are_asked_for_again_name_the_peer_that_has_left(wire: str) -> None:
    async def main(rank: R) -> list[str]:
        if rank.rank == 1:
            await rank.recv(GO, 0)
            return []
        withdrawn = rank.recv(LIKE, 1, call_site="train.py:4")
        await cancelled_await(withdrawn)
        rank.send(np.ones(1), 1)
        told = [await end_of(rank.recv(LIKE, 1, call_site="train.py:5"))]
        return [*told, await end_of(withdrawn)]

    assert run(main, wire)[0] == [
        "RankLeftError: rank 1 finished its program while rank 0 needs it in "
        f"recv #{number} from rank 1 on group 'world' (train.py:{5 - number})"
        for number in range(2)
    ]


# -- mismatches --------------------------------------------------------------------------------------------------------


# Over a wire that decides later, the withdrawn receive may meet the message before, and then disagrees with it.
@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "deciding later"])
def test_a_withdrawn_receive_of_another_shape_disagrees_with_nobody(wire: str) -> None:
    async def main(rank: R) -> str:
        if rank.rank == 1:
            await rank.barrier()
            return await end_of(rank.send(np.arange(3.0), 0))
        await cancelled_await(rank.recv(LONGER, 1))
        assert rank.recv(LONGER, 1).cancel()
        await rank.barrier()
        return await end_of(rank.recv(LIKE, 1))

    assert run(main, wire) == ["array([0., 1., 2.])", "None"]


def test_a_message_that_was_given_back_is_compared_with_its_next_receive_alone(wire: str) -> None:
    """The sender has sent it, and hears nothing of the receiver's mistake; the message is lost with the mistake."""

    async def main(rank: R) -> list[str]:
        if rank.rank == 1:
            told = [await end_of(rank.send(np.full(3, value), 0, call_site="train.py:3")) for value in (1.0, 2.0)]
            await rank.barrier()
            return told
        first = rank.recv(LIKE, 1)
        await ended(first)
        await cancelled_await(first)
        told = [await end_of(rank.recv(like, 1, call_site="train.py:9")) for like in (LONGER, LIKE)]
        await rank.barrier()
        return told

    receiver, sender = run(main, wire)
    assert sender == ["None", "None"]
    assert receiver[1] == "array([2., 2., 2.])"
    kind, _, text = receiver[0].partition(": operation #")
    number, _, text = text.partition(" ")
    assert (kind, number.isdecimal()) == ("CollectiveMismatchError", True)  # by the receives, or by the sends
    assert text == (
        "on group 'world' differs between ranks: rank 1 called send/recv(float64 (3,)) at received before, "
        "rank 0 called send/recv(float64 (4,)) at train.py:9; "
        "a message is received with the shape and dtype with which it was sent"
    )


def test_after_a_cancelled_receive_the_next_one_disagrees_with_its_own_line(wire: str) -> None:
    """Over a wire that takes a message before anybody asks for it, the receiver alone learns of it."""

    async def main(rank: R) -> str:
        if rank.rank == 1:
            await rank.barrier()
            return await end_of(rank.send(np.ones(3), 0, call_site="train.py:3"))
        await cancelled_await(rank.recv(LIKE, 1, call_site="train.py:8"))
        wrong = rank.recv(LONGER, 1, call_site="train.py:9")
        await rank.barrier()
        return await end_of(wrong)

    receiver, sender = run(main, wire)
    calls = {
        "rank 0 called send/recv(float64 (4,)) at train.py:9",
        "rank 1 called send/recv(float64 (3,)) at train.py:3",
    }
    head = "CollectiveMismatchError: operation #0 on group 'world' differs between ranks: "
    tail = "; a message is received with the shape and dtype with which it was sent"
    assert receiver.startswith(head)
    assert receiver.endswith(tail)
    assert receiver in {head + ", ".join(order) + tail for order in (sorted(calls), sorted(calls, reverse=True))}
    assert sender == ("None" if wire in ("sockets", "shared memory") else receiver)


# -- very many ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_a_hundred_thousand_withdrawn_receives_nothing_is_kept(clock: Any) -> None:
    def living() -> int:
        gc.collect()
        return sum(type(each) is Message for each in gc.get_objects())

    async def main(rank: R) -> list[int]:
        before = living()  # of other tests, whose errors are kept with their frames
        for number in range(100_000):
            future = rank.recv(LIKE, 0)
            if number % 2:
                await cancelled_await(future)
            else:
                future.cancel()
        del future
        kept = living() - before
        rank.send(np.arange(3.0), 0)
        return [kept, *(await rank.recv(LIKE, 0)).tolist()]

    [[kept, *got]] = overlap.run(main, ranks=1, clock=clock)
    assert kept <= 1  # the last one
    assert got == [0, 1, 2]


# -- inputs that fail --------------------------------------------------------------------------------------------------


def fail() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_input_that_fails_is_from_elsewhere_for_the_receiver(cancelled: bool, wire: str) -> None:
    """The sender handles its own error; the receiver is told whose it is, and goes on."""

    async def main(rank: R) -> str:
        if rank.rank == 1:
            await rank.barrier()
            made = rank.compute(fail, name="make", seconds=0.01, call_site="train.py:3")
            told = await end_of(rank.send(made, 0, call_site="train.py:4"))
            await rank.recv(GO, 0)
            return told
        if cancelled:
            await cancelled_await(rank.recv(LIKE, 1))
        await rank.barrier()
        told = await end_of(rank.recv(LIKE, 1, call_site="train.py:9"))
        await rank.send(np.ones(1), 1)
        return told

    assert run(main, wire) == [
        "PeerFailedError: rank 1 failed before send #0 to rank 0 on group 'world' (train.py:4): ValueError: boom",
        "ValueError: boom",
    ]


def test_a_rank_whose_input_fails_unseen_ends_all(wire: str) -> None:
    """Its send is no await, so that the error ends the rank at once; the other learns of it where it waits."""
    told: list[str] = []

    async def main(rank: R) -> None:
        if rank.rank == 1:
            rank.send(rank.compute(fail, name="make", seconds=0.01, call_site="train.py:3"), 0, tag=1)
            try:
                await rank.recv(LIKE, 0)
            finally:
                told.append("rank 1 is cancelled")
        told.append(await end_of(rank.recv(LIKE, 1)))

    with pytest.raises(overlap.RankFailedError) as failed:
        run(main, wire)
    line = fail.__code__.co_firstlineno + 1
    assert str(failed.value).startswith(f"rank 1 failed at test_cancelled_receives.py:{line}: ValueError: boom")
    assert told == ["rank 1 is cancelled", "PeerFailedError: rank 1 failed: ValueError: boom"]


def test_a_callback_of_any_thread_is_called_with_an_item_of_a_receive() -> None:
    async def main(rank: overlap.Rank) -> list[float]:
        got: list[float] = []
        receive = rank.recv(LIKE, 0)
        for item in (receive[1], receive[slice(1, 3)][0]):
            call_when_settled(item, lambda done: got.append(done.result()))
        await rank.send(np.arange(3.0), 0)
        await receive
        call_when_settled(receive[2], lambda done: got.append(done.result()))
        return got

    assert overlap.run(main, ranks=1, timeout_s=5) == [[1.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    "register",
    [
        lambda receive, call: receive.add_done_callback(call),
        call_when_settled,
        lambda receive, call: wait_until_settled(receive, TIMEOUT_S) and call(receive),
    ],
    ids=["loop", "anywhere", "wait"],
)
def test_a_callback_is_called_though_its_receive_gives_the_message_back_meanwhile(
    register: Callable[[Any, Callable[[Any], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled await has found no user of the result, just before another thread adds a callback."""

    async def main(rank: overlap.Rank) -> list[float]:
        if rank.rank == 0:
            await rank.send(np.ones(2), 1)
            return []
        receive, called = rank.recv(np.empty(2), 0), trio.Event()
        while not receive.done:
            await trio.lowlevel.checkpoint()
        claim = type(receive)._prepare_for_use

        def claim_late(future: Any) -> None:
            claim(future)
            monkeypatch.undo()
            with monkeypatch.context() as patch:
                patch.setattr(type(future), "_has_user", lambda _: False)
                trio.from_thread.run_sync(future._on_await_cancelled)

        monkeypatch.setattr(type(receive), "_prepare_for_use", claim_late)
        await trio.to_thread.run_sync(register, receive, lambda _: called.set())
        await called.wait()
        return cast("list[float]", receive.result().tolist())

    assert overlap.run(main, ranks=2, timeout_s=5)[1] == [1.0, 1.0]


@pytest.mark.parametrize("use", ["callback", "thread", "asyncio"])
def test_a_receive_that_another_thread_begins_to_use_as_it_leaves_its_lane_takes_part_again(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled await has found no user of the receive, just before another thread uses it."""
    leave, claim = Message._leave_lane, Message._prepare_for_use

    def in_callback(receive: overlap.Future[Any]) -> Any:
        ended = threading.Event()
        receive.add_done_callback(lambda _: ended.set())
        assert ended.wait(TIMEOUT_S)
        return receive.result()

    async def awaited(receive: overlap.Future[Any]) -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return await receive

    ways: dict[str, Callable[[Any], Any]] = {
        "callback": in_callback,
        "thread": lambda receive: receive.result(TIMEOUT_S),
        "asyncio": lambda receive: asyncio.run(awaited(receive)),
    }

    async def main(rank: overlap.Rank) -> Any:
        if rank.rank == 0:
            await rank.recv(GO, 1)
            return await rank.send(np.arange(3.0), 1)
        receive, used = rank.recv(LIKE, 0), threading.Event()

        def claim_and_tell(self: Message[Any]) -> None:
            claim(self)
            used.set()

        def leave_late(self: Message[Any]) -> None:
            leave(self)
            monkeypatch.undo()
            monkeypatch.setattr(Message, "_prepare_for_use", claim_and_tell)
            results.append(pool.submit(ways[use], receive))
            assert used.wait(TIMEOUT_S)

        results: list[Any] = []
        monkeypatch.setattr(Message, "_leave_lane", leave_late)
        await cancelled_await(receive)
        rank.send(np.ones(1), 0)
        return (await trio.to_thread.run_sync(results[0].result)).tolist()

    with ThreadPoolExecutor(1) as pool:
        assert overlap.run(main, ranks=2) == [None, [0.0, 1.0, 2.0]]
