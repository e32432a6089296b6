"""Ctrl-C in a thread that moves data for its sleeping loop: no hang, and nobody else is blamed."""

import random
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from linecache import getline

import numpy as np
import pytest

import overlap
from overlap import hints
from overlap.embedded import connecting, connection
from overlap.runtime import interrupts
from tests.interrupting import Tracer, interrupt_wait, sample
from transports.shared_memory.engine import BUILT
from transports.shared_memory.memory_link import MemoryRequest

from .connecting import TIMEOUT_S, MemoryStore

ROUNDS = 600
WHY = "rank 0 failed: KeyboardInterrupt"
# After it the interpreter looks for no signal until the program has the connection.
RETURNS = "return self  # the interpreter looks for no signal until the program has it: see `connecting`"
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
    end, main, interrupted = MemoryRequest._end_in_state, threading.main_thread(), list[int]()

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

    monkeypatch.setattr(MemoryRequest, "_end_in_state", interrupting)
    store = MemoryStore()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(answer, store)
        with pytest.raises(overlap.RankFailedError, match=WHY):
            program()
        assert WHY in ended(other)


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
    """A program that catches it and waits again goes on.

    No interrupt comes where nobody catches it: each is asked for in a wait, once the one before was caught, and the
    signal is blocked outside the waits.
    """
    store, over, asked, caught = MemoryStore(), threading.Event(), threading.Event(), list[int]()
    main, outstanding = threading.main_thread().ident or 0, False

    def interrupt() -> None:
        chance = random.Random(1)
        while not over.is_set():
            if asked.wait(0.01):
                asked.clear()
                over.wait(chance.uniform(0.0002, 0.003))
                signal.pthread_kill(main, signal.SIGINT)

    def patiently(future: overlap.Future[np.ndarray]) -> np.ndarray:
        nonlocal outstanding
        while True:
            try:
                if not outstanding:
                    outstanding = True
                    asked.set()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                found = future.result(TIMEOUT_S)
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            except KeyboardInterrupt:
                caught.append(1)
                outstanding = False
                continue
            return found

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(answer, store, elements)
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
                    over.set()
                    hitting.result(TIMEOUT_S)
            assert other.result(TIMEOUT_S) == ROUNDS
    finally:
        signal.sigtimedwait({signal.SIGINT}, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    assert caught


@compiled
@pytest.mark.parametrize("elements", [0, 1, 300_000], ids=["message", "on the board", "in private memory"])
def test_a_wait_ends_at_once_and_its_operation_goes_on(elements: int) -> None:
    store, may_answer, main = MemoryStore(), threading.Event(), threading.get_ident()

    def peer() -> None:
        with overlap.connect(1, 2, store=store) as world:
            assert may_answer.wait(TIMEOUT_S)
            if elements:
                world.rank.all_reduce(np.full(elements, 2)).result(TIMEOUT_S)
            else:
                world.rank.send(np.array([3]), 0).result(TIMEOUT_S)

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(peer)
        with overlap.connect(0, 2, store=store) as world:
            future = world.rank.all_reduce(np.full(elements, 1)) if elements else world.rank.recv(np.empty(1, int), 1)
            hitting = pool.submit(interrupt_wait, main, may_answer)
            with pytest.raises(KeyboardInterrupt):
                future.result(TIMEOUT_S)
            hitting.result(TIMEOUT_S)
            may_answer.set()
            assert (future.result(TIMEOUT_S) == 3).all()
        other.result(TIMEOUT_S)


def program(rank: overlap.Rank) -> list[float]:
    """Use collectives, messages and computes; the peer does the same."""
    numbers, peer = np.arange(8.0), 1 - rank.rank
    total, large = rank.all_reduce(numbers), rank.all_reduce(np.ones(20_000))
    sent, came = rank.send(numbers, peer), rank.recv(np.empty(8), peer)
    doubled = rank.compute(np.multiply, total, 2.0)
    results = [float(future.result(TIMEOUT_S).sum()) for future in (doubled, large, came)]
    sent.result(TIMEOUT_S)
    rank.barrier().result(TIMEOUT_S)
    return results


def talk(tracer: Tracer) -> type[BaseException] | None:
    """Run the program on two ranks; the tracer looks at rank 0, in this thread."""

    def peer() -> None:
        with overlap.connect(1, 2, store=store) as world:
            program(world.rank)

    store = MemoryStore()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(peer)
        with suppress(KeyboardInterrupt), overlap.connect(0, 2, store=store) as world:
            ended_by = tracer.run(partial(program, world.rank))
            if ended_by is not None:
                raise KeyboardInterrupt
        failure = other.exception(TIMEOUT_S)
        # it ends well if the interrupt comes after it has got its last answer
        assert failure is None or (ended_by is not None and isinstance(failure, overlap.OverlapError))
    return ended_by


@compiled
@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_at_some_lines(count: int) -> None:
    """Each program that is interrupted ends its world, and later worlds are right."""
    first = Tracer()
    assert talk(first) is None
    for line, turn in sample(first.passed, count, 4):
        tracer = Tracer(line, turn)
        assert talk(tracer) is (KeyboardInterrupt if tracer.interrupted else None), line


def test_at_each_line_of_connect() -> None:
    """A program that never gets its connection leaves no thread and no handler of Ctrl-C."""
    connections: list[overlap.Connection] = []

    def program() -> None:
        with overlap.connect(0, 1) as world:
            connections.append(world)
            sys.settrace(None)

    first = Tracer(after_calls=True)
    assert first.run(program) is None
    modules = (hints, connecting, connection, interrupts)
    files = {module.__file__ for module in modules}
    for line, turns in sorted(first.passed.items()):
        for turn in range(1, turns + 1) if line[0] in files and getline(*line).strip() != RETURNS else ():
            connections.clear()
            tracer = Tracer(line, turn, after_calls=True)
            assert tracer.run(program) is (KeyboardInterrupt if tracer.interrupted else None), line
            assert not connections or not tracer.interrupted, line
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, line
            for thread in threading.enumerate():
                if thread.name == "overlap rank 0":  # an interrupt in the wait for its end leaves it on its way there
                    thread.join(TIMEOUT_S)
                    assert not thread.is_alive(), line
