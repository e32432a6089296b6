"""Ctrl-C in a thread that moves data for its sleeping loop: no hang, and nobody else is blamed."""

import random
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

import overlap
from transports.shared_memory.engine import BUILT
from transports.shared_memory.memory_link import MemoryRequest

from .connecting import TIMEOUT_S, MemoryStore

ROUNDS = 600
WHY = "rank 0 failed: KeyboardInterrupt"
# Long collectives by packets can leave both loops running after an interrupt.
compiled = pytest.mark.skipif(not BUILT, reason="the engine was not compiled")


def answer(store: MemoryStore, elements: int = 0) -> int:
    """Be rank 1, which answers every message of rank 0, or adds numbers to its; return how many came."""
    came = 0
    with overlap.connect(1, 2, store=store) as world:
        for number in range(ROUNDS):
            if elements:
                total = world.rank.all_reduce(np.full(elements, number)).result(TIMEOUT_S)
                assert (total == 2 * number).all()
                came += 1
                continue
            assert world.rank.recv(np.empty(1, int), 0).result(TIMEOUT_S)[0] == number
            world.rank.send(np.array([number]), 0).result(TIMEOUT_S)
            came += 1
    return came


def ended(other: Future[int]) -> str:
    """Wait for rank 1; return why it has failed."""
    error = other.exception(TIMEOUT_S)
    return "" if error is None else str(error)


@compiled
def test_in_the_midst_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has come, and nobody has been told."""
    end, main, interrupted = MemoryRequest._end, threading.main_thread(), list[int]()

    def interrupting(call: MemoryRequest, state: int) -> None:
        if threading.current_thread() is main and not interrupted:
            interrupted.append(1)
            signal.raise_signal(signal.SIGINT)
        end(call, state)

    def program() -> None:
        with overlap.connect(0, 2, store=store) as world:
            with pytest.raises(KeyboardInterrupt):
                talk(world.rank)
            with pytest.raises(overlap.PeerFailedError, match=WHY):
                world.rank.recv(np.empty(1, int), 1).result(TIMEOUT_S)

    def talk(rank: overlap.Rank) -> None:
        for number in range(ROUNDS):
            rank.send(np.array([number]), 1).result(TIMEOUT_S)
            rank.recv(np.empty(1, int), 1).result(TIMEOUT_S)

    monkeypatch.setattr(MemoryRequest, "_end", interrupting)
    store = MemoryStore()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(answer, store)
        with pytest.raises(overlap.RankFailedError, match=WHY):
            program()
        assert WHY in ended(other)


# Where the interpreter is in a callback of its own, such as the collector's, an interrupt cannot be raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    "elements",
    [
        pytest.param(0, id="messages"),
        pytest.param(1, id="on the board", marks=compiled),
        pytest.param(20_000, id="in lent memory", marks=compiled),
        pytest.param(300_000, id="in private memory", marks=compiled),
    ],
)
def test_anywhere(elements: int) -> None:
    """A program that catches it and waits again either goes on, or hears that its own rank was interrupted."""
    store, over, waits = MemoryStore(), threading.Event(), [False]  # no event: an interrupt in one leaves it locked

    def interrupt() -> None:
        chance = random.Random(1)
        while not over.wait(chance.uniform(0.0002, 0.003)):
            if waits[0]:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def patiently(future: overlap.Future[np.ndarray]) -> np.ndarray:
        while True:
            try:
                waits[0] = True
                found = future.result(TIMEOUT_S)
                waits[0] = False
            except KeyboardInterrupt:
                continue
            return found

    told = ""
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(answer, store, elements)
        try:
            with overlap.connect(0, 2, store=store) as world:
                hitting = pool.submit(interrupt)
                try:
                    for number in range(ROUNDS):
                        if elements:
                            future = world.rank.all_reduce(np.full(elements, number))
                            assert (patiently(future) == 2 * number).all()
                            continue
                        sent = world.rank.send(np.array([number]), 1)
                        came = world.rank.recv(np.empty(1, int), 1)
                        patiently(sent)
                        assert patiently(came)[0] == number
                finally:
                    waits[0] = False
                    over.set()
                    hitting.result(TIMEOUT_S)
        except overlap.OverlapError as error:
            told = str(error)
        finally:
            over.set()
        if told:
            assert WHY in told
            assert WHY in ended(other)
        else:
            assert other.result(TIMEOUT_S) == ROUNDS
