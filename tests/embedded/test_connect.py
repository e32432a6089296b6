"""What a program that owns its main thread gets from `overlap.connect`."""

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import overlap
from overlap.embedded import rendezvous
from overlap.runtime.engine.real_engine import RealEngine
from overlap.waits.signs import Evidence
from tests.errors import error_of
from tests.interpreters import free_port
from transports import LinkLostError

from .connecting import TIMEOUT_S, MemoryStore, connected, in_threads

W = overlap.Connection


def test_ranks_meet_through_a_store_and_reduce() -> None:
    def program(world: W) -> list[float]:
        return world.rank.all_reduce(np.full(3, world.rank.rank + 1.0)).result(TIMEOUT_S).tolist()

    assert connected(program, 3) == [[6.0] * 3] * 3


def test_a_step_that_is_left_open_ends_with_the_world_and_once() -> None:
    with overlap.connect(0, 1) as world:
        inner, outer = world.rank.step(4), world.rank.step(3)
        outer.__enter__()
        inner.__enter__()
    for step in (inner, outer, None):
        assert [span.step for span in world.rank.recorder.spans() if span.kind == "step"] == [4, 3]
        if step is not None:
            step.__exit__(None, None, None)


def test_ranks_meet_at_an_endpoint_again_and_again() -> None:
    endpoint = f"127.0.0.1:{free_port()}"

    def live(rank: int) -> list[int]:
        sums = []
        for turn in range(3):
            with overlap.connect(rank, 2, endpoint=endpoint, secret="a long secret") as world:
                sums.append(int(world.rank.all_reduce(np.array([turn + rank])).result(TIMEOUT_S)[0]))
        return sums

    assert in_threads(live, 2) == [[1, 3, 5]] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_processes_meet_in_a_store_that_holds_an_earlier_attempt(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic agent starts processes again and keeps its store: the rank that looks first sees old values."""
    store, looked = MemoryStore(), threading.Event()

    def live(rank: int, attempt: int) -> int:
        if attempt and rank != first:
            assert looked.wait(TIMEOUT_S)
        with overlap.connect(rank, 2, store=store) as world:
            return int(world.rank.all_reduce(np.array([attempt])).result(TIMEOUT_S)[0])

    monkeypatch.setattr(rendezvous, "_turns", Counter())  # which counts in one process
    assert in_threads(lambda rank: live(rank, 0), 2) == [0, 0]
    monkeypatch.setattr(rendezvous, "_turns", Counter())

    def get(key: str) -> bytes:
        old = store.values.get(key)
        looked.set()
        return MemoryStore.get(store, key) if old is None else old

    monkeypatch.setattr(store, "get", get)
    assert in_threads(lambda rank: live(rank, 1), 2) == [2, 2]


@pytest.mark.parametrize("gives_up", [0, 1])
def test_ranks_meet_after_one_of_them_found_nobody(gives_up: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr(rendezvous, "_turns", Counter())
    with monkeypatch.context() as patch:
        patch.setattr(store, "get", lambda key: {}[key])  # nobody sets it in time
        with pytest.raises(KeyError):
            overlap.connect(gives_up, 2, store=store)

    def live(rank: int) -> int:
        with overlap.connect(rank, 2, store=store) as world:
            return int(world.rank.all_reduce(np.array([1])).result(TIMEOUT_S)[0])

    assert in_threads(live, 2) == [2, 2]


def test_one_rank_is_a_world() -> None:
    with overlap.connect(0, 1) as world:
        assert world.rank.all_reduce(np.arange(3)).result(TIMEOUT_S).tolist() == [0, 1, 2]
    assert repr(world) == "<Connection of rank 0 of 1: closed>"


@pytest.mark.parametrize(
    ("host", "found"),
    [("10.1.0.7", "10.1.0.9"), ("localhost", "10.2.0.9"), ("unknown", "10.2.0.9"), (None, "10.2.0.9")],
    ids=["in the network of the store", "the store's host is local", "its name is unknown", "it tells none"],
)
def test_rank_0_of_several_machines_offers_an_address(
    host: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no default route, only the store tells in which network the machines are."""
    ours = {"10.1.0.7": "10.1.0.9", "localhost": "127.0.0.1", "192.0.2.1": "10.2.0.9"}

    def local_address(endpoint: tuple[str, int]) -> str:
        if endpoint[0] not in ours:
            raise OSError("Name or service not known")
        return ours[endpoint[0]]

    class Prefix(MemoryStore):
        underlying_store = MemoryStore()

    asked: list[str] = []

    def listen(endpoint: tuple[str, int]) -> None:
        asked.append(endpoint[0])
        raise rendezvous.ListenError("cannot listen there")

    if host is not None:
        monkeypatch.setattr(Prefix.underlying_store, "host", host, raising=False)
    monkeypatch.setattr(rendezvous, "_turns", Counter())
    monkeypatch.setattr(rendezvous, "local_address", local_address)
    monkeypatch.setattr(rendezvous, "listen", listen)
    store = Prefix()
    store.set(rendezvous._ask_key("overlap", 1), b"1 of another machine")
    with pytest.raises(overlap.UsageError, match="cannot listen there; pass host="):
        overlap.connect(0, 2, store=store)
    assert asked == [found]


def test_any_thread_issues() -> None:
    def program(world: W) -> list[float]:
        with ThreadPoolExecutor(1) as pool:
            futures = pool.submit(lambda: [world.rank.all_reduce(np.full(2, float(k))) for k in range(20)]).result()
        return [float(future.result(TIMEOUT_S)[0]) for future in futures]

    assert connected(program, 2) == [[2.0 * k for k in range(20)]] * 2


def test_futures_are_those_of_concurrent_futures() -> None:
    def program(world: W) -> list[Any]:
        heard: list[Any] = []
        future = world.rank.all_reduce(np.ones(1))
        said = [future.cancel(), future.cancelled(), future.wait(TIMEOUT_S), future.done(), future.exception()]
        future.add_done_callback(lambda it: heard.append((it is future, threading.current_thread())))
        return [*said, heard == [(True, threading.current_thread())]]

    assert connected(program, 2) == [[False, False, True, True, None, True]] * 2


def test_a_program_on_asyncio_awaits() -> None:
    async def main(world: W) -> list[float]:
        first, second = world.rank.all_reduce(np.ones(1)), world.rank.all_reduce(np.full(1, 2.0))
        return [float((await second)[0]), float((await first)[0]), float((await first)[0])]

    assert connected(lambda world: asyncio.run(main(world)), 2) == [[4.0, 2.0, 2.0]] * 2


def test_groups_and_splits() -> None:
    def program(world: W) -> list[Any]:
        half = world.split(world.rank.rank % 2)
        assert half is not None
        found = [half.all_gather(np.array([world.rank.rank])).result(TIMEOUT_S).tolist()]
        if world.rank.rank < 2:
            found.append(int(world.group([1, 0]).broadcast(np.array([world.rank.rank]), 0).result(TIMEOUT_S)[0]))
        return found

    assert connected(program, 3) == [[[0, 2], 1], [[1], 1], [[0, 2]]]


def test_two_jobs_in_one_process_beside_a_run() -> None:
    async def main(rank: overlap.Rank) -> float:
        return float((await rank.all_reduce(np.ones(1)))[0])

    def live(rank: int) -> list[float]:
        with overlap.connect(rank, 2, store=stores[0]) as one, overlap.connect(rank, 2, store=stores[1]) as two:
            futures = [world.rank.all_reduce(np.full(1, value)) for world, value in ((one, 1.0), (two, 5.0))]
            return [float(future.result(TIMEOUT_S)[0]) for future in futures]

    stores = [MemoryStore(), MemoryStore()]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(in_threads, live, 2)
        assert overlap.run(main, ranks=2, timeout_s=TIMEOUT_S) == [2.0, 2.0]
        assert beside.result(TIMEOUT_S) == [[2.0, 10.0]] * 2


def test_an_error_that_leaves_the_block_reaches_the_others() -> None:
    def live(rank: int) -> str:
        try:
            with overlap.connect(rank, 2, store=store) as world:
                if rank == 1:
                    raise ValueError("boom")
                world.rank.barrier().result(TIMEOUT_S)
        except (ValueError, overlap.PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    store = MemoryStore()
    assert in_threads(live, 2) == ["PeerFailedError: rank 1 failed: ValueError: boom", "ValueError: boom"]


def test_a_receive_from_any_rank_names_the_error_of_the_rank_whose_wire_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = threading.Event()

    async def break_wire(*_: object) -> None:
        broken.set()
        raise LinkLostError("process 0 (rank 0) has left", src=0, dst=1)

    def live(rank: int) -> str:
        try:
            with overlap.connect(rank, 2, store=store) as world:
                if rank == 1:
                    world.rank.recv().result(TIMEOUT_S)
                assert broken.wait(TIMEOUT_S)
                raise ValueError("boom")
        except (ValueError, overlap.PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"

    monkeypatch.setattr(RealEngine, "wait_for_announced_message", break_wire)
    monkeypatch.setattr(Evidence, "patience_s", TIMEOUT_S)
    store = MemoryStore()
    assert in_threads(live, 2) == ["ValueError: boom", "PeerFailedError: rank 0 failed: ValueError: boom"]


def test_an_error_that_nobody_asks_for_is_raised_at_the_end() -> None:
    with pytest.raises(overlap.RankFailedError) as caught, overlap.connect(0, 1) as world:
        world.rank.compute(lambda: 1 / 0)
    assert type(caught.value.cause) is ZeroDivisionError


def test_a_stall_names_the_line_of_the_thread_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(world: W) -> int:
        if world.rank.rank == 1:
            assert told.wait(TIMEOUT_S)  # where it is
        world.rank.barrier().result(TIMEOUT_S)
        return sys._getframe().f_code.co_firstlineno + 2

    def notify(text: str) -> None:
        texts.append(text)
        told.set()

    told, texts = threading.Event(), list[str]()
    monkeypatch.setattr("overlap.runtime.blame.stall.notify", notify)
    monkeypatch.setenv("OVERLAP_STALL_S", "0.1")
    line = connected(program, 2)[0]
    assert f"rank 1 has not come: its program is at test_connect.py:{line}; rank 0 waits for it in " in texts[0]


def test_after_the_end_a_call_says_so() -> None:
    with overlap.connect(0, 1) as world:
        pass
    assert str(error_of(overlap.PeerFailedError, world.rank.barrier)) == "the world has ended"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"rank": 2, "size": 2}, "rank: expected 0 to 1, got 2"),
        ({"rank": 0, "size": 0}, "size: expected a positive integer, got 0"),
        ({"rank": 0, "size": 2}, "endpoint: give either endpoint= or store=, where the ranks find each other"),
        (
            {"rank": 0, "size": 2, "endpoint": "127.0.0.1:0"},
            "endpoint: '127.0.0.1:0' has no port where others could look for it; use store= to find a free one",
        ),
        (
            {"rank": 0, "size": 2, "endpoint": "10.0.0.1:2900"},
            "secret: whoever reaches 10.0.0.1:2900 could join; give every process the same secret=",
        ),
        ({"rank": 0, "size": 1, "secret": 7}, "secret: expected bytes or text, got int"),
        ({"rank": 0, "size": 1, "job": ""}, "job: expected 1 to 47 printable characters, got ''"),
        (
            {"rank": 0, "size": 2, "endpoint": "127.0.0.1:2900", "nodes": 3},
            "nodes: expected a number of machines that divides the 2 ranks, got 3",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, Any], text: str) -> None:
    assert str(error_of(overlap.UsageError, overlap.connect, **said)) == text


FORKING = """
import os, numpy as np, overlap
with overlap.connect(0, 1) as world:
    pending = world.rank.recv(((1,), "float64"), 0)
    world.rank.barrier().result(60)  # once it is over, what was issued before it is under way
    child = os.fork()
    if child == 0:
        print(repr(pending.exception(60)), flush=True)
        try:
            world.rank.barrier()
        except overlap.PeerFailedError as error:
            print(error, flush=True)
        world.close()
        os._exit(0)
    os.waitpid(child, 0)
    world.rank.send(np.ones(1), 0)
    print(pending.result(60), world.rank.all_reduce(np.ones(1)).result(60))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_is_no_rank() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=TIMEOUT_S)
    why = (
        "this process is a fork of the one that has this rank, and is no rank itself: use none in it, or let it join a "
        "world of its own by overlap.connect"
    )
    assert ran.stdout.splitlines() == [f"PeerFailedError({why!r})", why, "[1.] [1.]"], ran.stderr


LEFT_OPEN = """
import numpy as np, overlap
world = overlap.connect(0, 1)
world.rank.all_reduce(np.ones(1))
print("left open")
"""


def test_what_is_left_open_ends_with_the_program() -> None:
    ran = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (ran.returncode, ran.stdout) == (0, "left open\n"), ran.stderr


def test_between_processes_a_deadline_and_an_abort_are_told_and_the_world_lives() -> None:
    def program(world: W) -> list[str]:
        late, dropped = world.group([0, 1], name="late"), world.group([0, 1], name="dropped")
        rank, x = world.rank, np.ones(1 << 20)  # so much is not sent before somebody asks for it
        if rank.rank == 0:
            pending = [late.all_reduce(x, timeout_s=0.01, call_site="train.py:7")]
            pending[0].wait(TIMEOUT_S)
            rank.send(np.ones(1), 1).result(TIMEOUT_S)
            pending.append(dropped.recv(((1,), "float64"), 1))  # for which nobody sends, so only the abort ends it
            dropped.abort("enough")
        else:
            rank.recv(((1,), "float64"), 0).result(TIMEOUT_S)
            pending = [late.all_reduce(x), dropped.recv(((1,), "float64"), 0)]
        texts = [f"{type(error).__name__}: {error}" for error in (each.exception(TIMEOUT_S) for each in pending)]
        return [*texts, str(rank.all_reduce(np.ones(1)).result(TIMEOUT_S))]

    first, second = connected(program, 2)
    told = "all_reduce #0 on group 'late' (train.py:7) has not ended within timeout_s=0.01: it waits for rank 1"
    aborted = "GroupAbortedError: group 'dropped' was aborted by rank 0: enough"
    assert first == [f"DeadlineError: {told}", aborted, "[2.]"]
    assert second == [f"PeerFailedError: rank 0 gave up: {told}", aborted, "[2.]"]


def test_what_is_issued_before_the_ranks_know_each_others_memory_goes_on_like_the_rest() -> None:
    def program(world: W) -> list[float]:
        futures = [world.rank.all_reduce(np.full(1, float(k))) for k in range(6)]  # the last when some know already
        return [float(future.result(TIMEOUT_S)[0]) for future in futures]

    for _ in range(4):
        assert connected(program, 2) == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]] * 2
