"""Cancelled waits, and errors that nobody awaits, in programs that own their main thread: threads and asyncio."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from overlap.runtime import daemons
from tests.errors import Mute, error_from, error_of
from tests.threads import running

from .connecting import TIMEOUT_S, MemoryStore, connected, in_threads

W = overlap.Connection
LIKE, LONGER, GO = ((3,), "float64"), ((4,), "float64"), ((1,), "float64")
wires = pytest.mark.parametrize("transport", [None, "efa"], ids=["memory", "sockets"])


def fail(text: str = "boom") -> None:
    raise ValueError(text)


def fail_mutely() -> None:
    raise Mute


def error_text(future: overlap.Future[Any]) -> str:
    error = future.exception(TIMEOUT_S)
    return f"{type(error).__name__}: {error}"


def sent(world: W, value: float, dst: int, **more: Any) -> None:
    world.rank.send(np.full(3, value), dst, **more).result(TIMEOUT_S)


# -- threads -----------------------------------------------------------------------------------------------------------


@wires
def test_of_two_calls_both_say_that_a_receive_is_withdrawn(transport: str | None) -> None:
    def program(world: W) -> list[Any]:
        rank, other = world.rank, 1 - world.rank.rank
        first = rank.recv(LIKE, other, call_site="train.py:7")
        answers = [first.cancel(), first.cancel(), first.cancelled()]
        told = error_text(first)
        rank.barrier().result(TIMEOUT_S)
        rank.send(np.full(3, 5.0), other)
        received = rank.recv(LIKE, other)
        got = received.result(TIMEOUT_S).tolist()
        return [answers, told, got, received.cancel(), first.cancel()]

    told = "FutureCancelledError: recv #0 from rank {} on group 'world' (train.py:7) was cancelled"
    assert connected(program, 2, transport=transport) == [
        [[True, True, True], told.format(1 - rank), [5.0] * 3, False, True] for rank in range(2)
    ]


def test_a_compute_that_runs_is_not_withdrawn_and_one_behind_it_is() -> None:
    begun, go_on, ran = threading.Event(), threading.Event(), list[str]()

    def hold() -> str:
        begun.set()
        assert go_on.wait(TIMEOUT_S)
        return "held"

    with overlap.connect(0, 1) as world:
        running = world.rank.compute(hold)
        queued = world.rank.compute(ran.append, "ran", name="queued", call_site="train.py:7")
        after = world.rank.compute(lambda: "after")
        assert begun.wait(TIMEOUT_S)
        assert [running.cancel(), queued.cancel(), queued.cancel()] == [False, True, True]
        assert error_text(queued) == "FutureCancelledError: compute 'queued' (train.py:7) was cancelled"
        go_on.set()
        assert [running.result(TIMEOUT_S), after.result(TIMEOUT_S), ran] == ["held", "after", []]


def test_a_callback_withdraws_others_and_not_its_own() -> None:
    told: list[Any] = []
    over = threading.Event()

    def called(done: overlap.Future[Any]) -> None:
        told.append([done.cancel(), waiting.cancel(), waiting.cancelled()])
        over.set()

    with overlap.connect(0, 1) as world:
        waiting, gate = world.rank.recv(LIKE, 0, tag=1), world.rank.recv(GO, 0)
        gate.add_done_callback(called)
        world.rank.send(np.ones(1), 0)
        assert over.wait(TIMEOUT_S)
    assert told == [[False, True, True]]


# -- asyncio -----------------------------------------------------------------------------------------------------------


@wires
def test_a_wait_that_asyncio_ends_leaves_its_message_to_the_next_receive(transport: str | None) -> None:
    """Also where the first receive was of another shape: nobody disagrees with a receive that is over."""

    async def receive(world: W) -> list[Any]:
        for like in (LIKE, LONGER):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_of(world.rank.recv(like, 1)), 0.01)
        withdrawn = world.rank.recv(LONGER, 1, call_site="train.py:7")
        waiting = asyncio.create_task(_of(withdrawn))
        await asyncio.sleep(0.01)
        answer = withdrawn.cancel()
        error = await error_from(overlap.FutureCancelledError, waiting)
        await world.rank.barrier()
        return [answer, str(error), (await world.rank.recv(LIKE, 1)).tolist()]

    def program(world: W) -> list[Any]:
        if world.rank.rank == 0:
            return asyncio.run(receive(world))
        world.rank.barrier().result(TIMEOUT_S)
        sent(world, 5.0, 0)
        return []

    told = "recv #2 from rank 1 on group 'world' (train.py:7) was cancelled"
    assert connected(program, 2, transport=transport)[0] in [
        [True, told.replace("#2", number), [5.0] * 3] for number in ("#0", "#1", "#2")
    ]


async def _of(future: overlap.Future[Any]) -> Any:
    return await future


def test_a_receive_that_was_left_has_failed_once_its_connection_has_closed() -> None:
    async def leave(receive: overlap.Future[Any]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_of(receive), 0.01)

    called: list[overlap.Future[Any]] = []
    with overlap.connect(0, 1) as world:
        receive = world.rank.recv(LIKE, 0)
        asyncio.run(leave(receive))
    receive.add_done_callback(called.append)
    assert (called, receive.wait(TIMEOUT_S)) == ([receive], True)
    assert error_text(receive) == "PeerFailedError: the world has ended"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "told"),
    [(fail, "ValueError: boom"), (fail_mutely, "RuntimeError: Mute: (its text cannot be had: RuntimeError)")],
)
def test_an_error_that_nobody_asks_for_fails_the_rank_when_it_closes(function: Callable[[], None], told: str) -> None:
    world = overlap.connect(0, 1)
    assert world.rank.compute(function).wait(TIMEOUT_S)
    assert world.rank.compute(abs, -1).result(TIMEOUT_S) == 1
    error = error_of(overlap.RankFailedError, world.close)
    line = function.__code__.co_firstlineno + 1
    assert str(error) == f"rank 0 failed at test_cancelled_waits.py:{line}: {told}"


@wires
@pytest.mark.parametrize("late", [False, True])
def test_an_input_that_fails_is_from_elsewhere_for_the_receiver(late: bool, transport: str | None) -> None:
    """Also if the receiver comes to its receive long after that."""

    def program(world: W) -> list[str]:
        rank = world.rank
        if rank.rank == 1:
            told = error_text(rank.send(rank.compute(fail), 0, call_site="train.py:4"))
            if late:
                rank.send(np.ones(1), 0, tag=1).result(TIMEOUT_S)
        else:
            if late:
                rank.recv(GO, 1, tag=1).result(TIMEOUT_S)
            told = error_text(rank.recv(LIKE, 1))
        return [told, str(rank.all_reduce(np.ones(1)).result(TIMEOUT_S))]

    assert connected(program, 2, transport=transport) == [
        [
            "PeerFailedError: rank 1 failed before send #0 to rank 0 on group 'world' (train.py:4): ValueError: boom",
            "[2.]",
        ],
        ["ValueError: boom", "[2.]"],
    ]


@wires
def test_a_receive_names_the_peer_that_has_closed(transport: str | None) -> None:
    def program(world: W) -> str:
        if world.rank.rank == 1:
            world.rank.barrier().result(TIMEOUT_S)
            return "closes"
        assert world.rank.recv(LIKE, 1).cancel()
        world.rank.barrier().result(TIMEOUT_S)
        return error_text(world.rank.recv(LIKE, 1, call_site="train.py:4"))

    told = "rank 1 finished its program while rank 0 needs it in recv #0 from rank 1 on group 'world' (train.py:4)"
    assert connected(program, 2, transport=transport) == [f"RankLeftError: {told}", "closes"]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_daemon_that_ignores_its_cancellation_is_named_and_keeps_a_connection_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: list[str] = []
    events: list[str] = []

    async def shielded() -> None:
        with trio.CancelScope(shield=True):
            while not texts:  # noqa: ASYNC110  a thread makes it true
                await trio.sleep(0.001)
        events.append("daemon ended")

    async def begin(rank: overlap.Rank) -> None:
        rank.spawn(shielded, daemon=True, call_site="train.py:7")

    monkeypatch.setattr(daemons, "GRACE_S", 0.01)
    monkeypatch.setattr(daemons, "notify", texts.append)
    with overlap.connect(0, 1) as world:
        world.run(begin, world.rank)
    events.append("closed")
    assert events == ["daemon ended", "closed"]
    assert texts[0].startswith(
        "daemon 'shielded' (train.py:7) of rank 0 goes on although it was cancelled, and its rank "
    )


def test_a_receive_that_keeps_connections_open_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    told = threading.Event()

    def notify(text: str) -> None:
        texts.append(text)
        told.set()

    monkeypatch.setattr("overlap.runtime.blame.stall.notify", notify)
    monkeypatch.setenv("OVERLAP_STALL_S", "0.1")
    store = MemoryStore()

    def live(rank: int) -> None:
        world = overlap.connect(rank, 2, store=store)
        waiting = world.rank.recv(LIKE, 1 - rank, call_site=f"train.py:{rank}")

        def close() -> None:
            with suppress(overlap.RankFailedError):  # of the rank that is the last to withdraw its receive
                world.close()

        with running(threading.Thread(target=close)):
            assert told.wait(TIMEOUT_S)
            waiting.cancel()

    in_threads(live, 2)
    head, *table, outlook = texts[0].splitlines()
    assert head.startswith(
        "no progress for 0.1 s: ranks 0-1 wait for each other, and may yet go on: rank 0 in recv #0 "
    )
    assert [line.partition(";")[0] for line in table] == [
        f"  rank {rank}: recv #0 from rank {1 - rank} (train.py:{rank})" for rank in range(2)
    ]
    assert "its program is" not in texts[0]
    assert outlook == "  the run waits on; Ctrl-C ends it, as --stall-timeout SECONDS would"  # threads may cancel them


@pytest.mark.parametrize("waits", ["receive", "others"])
def test_a_close_that_takes_too_long_says_what_it_waits_for(waits: str) -> None:
    store, tried = MemoryStore(), threading.Event()

    def live(rank: int) -> str:
        world = overlap.connect(rank, 2, store=store)
        if rank == 1:
            assert tried.wait(TIMEOUT_S)
            with pytest.raises(overlap.RankFailedError):
                world.close()
            return "closed"
        if waits == "receive":
            world.rank.recv(LIKE, 1, call_site="train.py:7")
        error = error_of(TimeoutError, world.close, timeout_s=0.2)
        tried.set()
        return str(error)

    awaited = "recv #0 from rank 1 on group 'world' (train.py:7)" if waits == "receive" else "the other ranks"
    assert in_threads(live, 2) == [
        f"close: rank 0 has not been done within 0.2 s: it waits for {awaited}; let all ranks close, or pass a longer "
        "timeout_s",
        "closed",
    ]


FORKING = """
import asyncio, os, numpy as np, overlap
LIKE = ((1,), "float64")

def raised(call):
    try:
        return call()
    except overlap.PeerFailedError as error:
        return type(error).__name__

async def give_up(future):
    try:
        await asyncio.wait_for(future, 0.01)
    except TimeoutError:
        pass

with overlap.connect(0, 1) as world:
    waiting, given_up = world.rank.recv(LIKE, 0), world.rank.recv(LIKE, 0)
    compute, withdrawn = world.rank.compute(abs, -1), world.rank.recv(LIKE, 0)
    compute.result(60), withdrawn.cancel()
    asyncio.run(give_up(given_up))
    world.rank.barrier().result(60)
    child = os.fork()
    if child == 0:
        print(waiting.cancel(), waiting.cancelled(), raised(waiting.result), flush=True)
        print(given_up.cancel(), raised(given_up.result), flush=True)
        print(compute.cancel(), compute.result(60), withdrawn.cancel(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(waiting.cancel(), given_up.cancel(), waiting.cancelled())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_in_a_fork_nothing_is_withdrawn() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ran.stdout.splitlines() == [
        "False False PeerFailedError",
        "False PeerFailedError",
        "False 1 True",
        "True True True",
    ], ran.stderr
