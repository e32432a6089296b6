"""Ctrl-C, which is raised in the program, never inside our own packages; and what worlds change in the interpreter."""

import asyncio
import gc
import linecache
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from overlap import signals
from overlap.diagnostics import is_ours
from overlap.runtime import interpreter
from overlap.runtime.interpreter import (
    GC_THRESHOLD,
    SWITCH_INTERVAL_S,
    BlasLimit,
    collection_interval,
    tuned_interpreter,
)
from overlap.runtime.interrupts import _find_called_frame, calls_program, deferring_interrupts, finalizer, interruptible
from overlap.signals import Terminated, handling_signals
from tests.interrupting import Tracer, sample
from tests.threads import run_threads

# -- ctrl-C: raised in the program, and never between two instructions of our own packages -----------------------------

INT = signal.SIGINT

# Functions in a file of ours. A signal is handled as soon as the function that raises it has returned.
OURS = """
import signal

def work(log):
    log.append("begins")
    signal.raise_signal(signal.SIGINT)
    log.append("ends")

def work_and_wait(log):
    work(log)
    wait(log)

def wait(log):
    log.append("waits")

def work_and_fail(log):
    work(log)
    raise ValueError

def work_and_terminate(log):
    log.append("begins")
    signal.raise_signal(signal.SIGTERM)
    log.append("ends")

def call(function, *args):
    function(*args)

def start(function, *args):
    function(*args)

def drop(reference):
    work(reference.log)

class Dropped:
    def __init__(self, log):
        self.log = log
    def __del__(self):
        work(self.log)

def drop_and_wait(log):
    Dropped(log)
    log.append("waits")

class Awaited:
    def __init__(self, log, awaitable):
        self.log, self.awaitable = log, awaitable
    def __await__(self):
        work(self.log)
        yield from self.awaitable.__await__()
        self.log.append("resumed")
"""


@pytest.fixture
def ours() -> Iterator[dict[str, Any]]:
    """Functions of ours, while the handler is installed."""
    found: dict[str, Any] = {}
    exec(compile(OURS, str(Path(overlap.__file__).with_name("made_up.py")), "exec"), found)
    interruptible(found["wait"])
    interruptible(found["drop_and_wait"])
    calls_program(found["start"])
    finalizer(found["drop"])
    with deferring_interrupts():
        yield found
    assert signal.getsignal(INT) is signal.default_int_handler


def test_a_loop_that_waits_for_the_system_is_interrupted_at_once() -> None:
    """Its frame is below that of Trio's `run`, which our own `run` has called: nothing would return to the program."""
    found = []

    async def main(rank: overlap.Rank) -> None:
        frame = sys._getframe()
        while frame.f_code is not trio.run.__code__:
            assert frame.f_back is not None
            frame = frame.f_back
        found.append(_find_called_frame(frame))

    overlap.run(main, ranks=1)
    assert found == [None]


class Block:
    """A block that notes its end."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.log.append(f"block ends by {kind.__name__ if kind else 'itself'}")


def test_our_function_ends_first_and_then_the_block_that_has_called_it(ours: dict[str, Any]) -> None:
    log: list[str] = []

    def program() -> None:
        with Block(log):
            return ours["work"](log)

    with pytest.raises(KeyboardInterrupt):
        program()
    assert log == ["begins", "ends", "block ends by KeyboardInterrupt"]


@pytest.mark.parametrize("function", ["work_and_fail", "work_and_wait"])
def test_an_error_of_ours_gives_way_and_a_wait_ends_at_once(ours: dict[str, Any], function: str) -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        ours[function](log)
    assert log == ["begins", "ends"]


def test_the_program_is_interrupted_at_once_though_we_have_called_it(ours: dict[str, Any]) -> None:
    log: list[str] = []

    def callback() -> None:
        signal.raise_signal(INT)
        log.append("goes on")

    with pytest.raises(KeyboardInterrupt):
        ours["call"](callback)
    assert log == []


@pytest.mark.parametrize(("caller", "expected"), [("call", ["begins", "ends"]), ("start", ["begins"])])
def test_an_installed_package_is_our_library_or_the_program(
    ours: dict[str, Any], caller: str, expected: list[str]
) -> None:
    """It depends on the function that calls it."""
    log: list[str] = []
    installed: dict[str, Any] = {}
    exec(compile(OURS, "/usr/lib/python3/site-packages/made_up.py", "exec"), installed)
    with pytest.raises(KeyboardInterrupt):
        ours[caller](installed["work"], log)
    assert log == expected


class Referred:
    """An object for weak references."""


class Reference(weakref.ref[Any]):
    """A weak reference with a log."""

    log: list[str]


@pytest.mark.parametrize("kind", ["__del__", "weak reference"])
def test_an_interrupt_in_a_finalizer_is_not_lost(ours: dict[str, Any], kind: str) -> None:
    log: list[str] = []

    def program() -> None:
        target = ours["Dropped"](log) if kind == "__del__" else Referred()
        reference = Reference(target, ours["drop"] if kind != "__del__" else None)
        reference.log = log
        del target
        log.append("after it")

    with pytest.raises(KeyboardInterrupt):
        program()
    assert log == ["begins", "ends"]


def test_an_interrupt_in_a_finalizer_ends_the_wait_in_which_it_comes(ours: dict[str, Any]) -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        ours["call"](ours["drop_and_wait"], log)
    assert log == ["begins", "ends"]


class DroppedByProgram:
    def __del__(self) -> None:
        signal.raise_signal(INT)


@pytest.mark.usefixtures("ours")
def test_an_interrupt_in_a_finalizer_of_the_program_is_not_lost() -> None:
    log: list[str] = []

    def program() -> None:
        DroppedByProgram()
        log.append("after it")

    with pytest.raises(KeyboardInterrupt):
        program()
    assert log == []


@pytest.mark.usefixtures("ours")
def test_an_interrupt_in_a_weak_set_is_not_lost() -> None:
    log: list[str] = []

    def program() -> None:
        members, target = weakref.WeakSet[Referred](), Referred()
        members.add(target)
        sys.settrace(interrupt_removal)
        del target
        log.append("after it")

    def interrupt_removal(frame: Any, event: str, argument: object) -> None:
        if frame.f_code is weakref.WeakSet()._remove.__code__:  # type: ignore[attr-defined]
            sys.settrace(None)
            signal.raise_signal(INT)

    before = sys.gettrace()
    with pytest.raises(KeyboardInterrupt):
        program()
    sys.settrace(before)
    assert log == []


def test_a_second_interrupt_comes_at_once_if_the_first_one_has_not_come(
    ours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlap.runtime.interrupts._PATIENCE_S", -1.0)
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        ours["call"](ours["call"], lambda: (ours["work"](log), log.append("between"), ours["work"](log)))
    assert log == ["begins", "ends"]


def test_a_trio_program_gets_it_in_its_main_task(ours: dict[str, Any]) -> None:
    log: list[str] = []

    async def child() -> None:
        await ours["Awaited"](log, trio.Event().wait())

    async def main() -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)
                await trio.sleep_forever()
        finally:
            log.append("main task ends")

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(main)
    assert caught.group_contains(KeyboardInterrupt)
    assert log == ["begins", "ends", "main task ends"]


def test_a_program_on_asyncio_gets_it(ours: dict[str, Any]) -> None:
    log: list[str] = []

    async def main() -> None:
        try:
            await ours["Awaited"](log, asyncio.Event().wait())
        finally:
            log.append("main task ends")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert log == ["begins", "ends", "main task ends"]


def test_a_signal_that_ends_the_process_waits_for_our_function_too(
    ours: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[str] = []
    with pytest.raises(Terminated), handling_signals():
        ours["work_and_terminate"](log)
    assert log == ["begins", "ends"]
    assert "ended by SIGTERM" in capsys.readouterr().err


def test_handlers_of_the_program_are_left_alone() -> None:
    def handler(number: int, frame: object) -> None:
        raise AssertionError

    signal.signal(INT, handler)
    try:
        with deferring_interrupts():
            assert signal.getsignal(INT) is handler
        assert signal.getsignal(INT) is handler
    finally:
        signal.signal(INT, signal.default_int_handler)


# -- worlds --------------------------------------------------------------------------------------------------------


async def main(rank: overlap.Rank) -> float:
    """Use collectives, messages, computes, tasks, a narrow stream and a step."""
    numbers = np.arange(8.0) + rank.rank
    narrow = rank.stream("narrow", window=1)
    with rank.step(0):
        total = rank.all_reduce(numbers)
        others = [rank.all_gather(numbers, stream=narrow), rank.all_reduce(numbers, stream=narrow)]
        doubled = rank.compute(np.multiply, total, 2.0, seconds=1e-3)
        sent, received = rank.send(numbers, 1 - rank.rank), rank.recv(np.empty(8), 1 - rank.rank)
        task = rank.spawn(trio.sleep, 0)
        await total
        for other in [*others, sent, received]:
            await other
    await task
    await rank.reduce_scatter(np.arange(8.0))
    await rank.barrier()
    return float((await rank.broadcast(await doubled, root=0)).sum())


def check_lines(clock: str, count: int, seed: int) -> None:
    """Interrupt the program at some lines; after each it must run well again."""

    def program() -> list[float]:
        return overlap.run(main, ranks=2, clock=clock)

    threads, first = threading.active_count(), Tracer()
    assert first.run(program) is None
    for line, turn in sample(first.passed, count, seed):
        tracer = Tracer(line, turn)
        assert tracer.run(program) is (KeyboardInterrupt if tracer.interrupted else None), line
        assert (program(), signals._installed_handlers) == ([128.0, 128.0], []), line
    assert threading.active_count() <= threads  # those of earlier tests may have ended


def test_at_some_lines(clock: str) -> None:
    check_lines(clock, 6, 1)


def test_handlers_of_signals_are_restored_at_each_line() -> None:
    """Else a later run would not say that a signal has ended it."""

    def program() -> list[float]:
        return overlap.run(main, ranks=2, clock="virtual")

    first = Tracer()
    assert first.run(program) is None
    passed = sorted(line for line in first.passed if line[0] == signals.__file__)
    for line in (line for line in passed if linecache.getline(*line).strip() != "try:"):  # Python handles none there
        Tracer(line, 1).run(program)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, line
        assert (signals._installed_handlers, signals._live_worlds) == ([], []), line


def test_settings_of_the_interpreter_are_restored_at_each_line(clock: str) -> None:
    def program() -> list[float]:
        return overlap.run(main, ranks=2, clock=clock)

    before, first = settings(), Tracer()
    assert first.run(program) is None
    passed = [line for line in first.passed if line[0] == interpreter.__file__]
    assert passed
    for line in passed:
        Tracer(line, 1).run(program)
        assert settings() == before, line


@pytest.mark.slow
def test_at_many_lines(clock: str) -> None:
    check_lines(clock, 300, 2)


# Trio opens sockets of a loop before it protects them against interrupts, and sets hooks of generators that hold them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_at_600_random_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run ends by the interrupt, unless it ends before.

    The interpreter drops an interrupt in a callback of a weak reference, such as one of the standard library while
    Trio begins. Callbacks of ours defer it.
    """
    hooks = sys.get_asyncgen_hooks()
    ignored: list[Any] = []  # callables in which an interrupt was dropped

    def note_ignored(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            ignored.append(unraisable.object)

    monkeypatch.setattr(sys, "unraisablehook", note_ignored)
    chance, ident = Random(3), threading.get_ident()
    for _ in range(600):
        ignored.clear()
        signal.pthread_sigmask(signal.SIG_BLOCK, {INT})
        timer = threading.Timer(chance.uniform(0, 0.03), signal.pthread_kill, (ident, INT))
        timer.start()
        began_s = time.monotonic()
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {INT})
            while not ignored:
                began_s = time.monotonic()
                assert overlap.run(main, ranks=2) == [128.0, 128.0]
            assert not is_ours(ignored[0].__code__)
        except KeyboardInterrupt:
            assert time.monotonic() - began_s < 5
        timer.join()
    sys.set_asyncgen_hooks(*hooks)
    gc.collect()


# -- what worlds change in the interpreter comes back when the last of them ends, in whatever order they end -----------


def settings() -> tuple[float, tuple[int, int, int]]:
    return sys.getswitchinterval(), gc.get_threshold()


def test_settings_come_back_though_worlds_end_in_the_order_in_which_they_began() -> None:
    before = settings()
    first, second = tuned_interpreter(), tuned_interpreter()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() <= SWITCH_INTERVAL_S * 1.01
    assert gc.get_threshold()[0] >= GC_THRESHOLD
    second.__exit__(None, None, None)
    assert settings() == before


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_collections_are_as_rare_as_any_world_wants_and_as_the_program_wants_after_the_last(
    order: tuple[int, ...],
) -> None:
    before, wanted = gc.get_threshold(), [GC_THRESHOLD, 200_000, 200_000]
    blocks = [collection_interval.at_least(objects) for objects in wanted]
    for block in blocks:
        block.__enter__()
    for ended, index in enumerate(order):
        assert gc.get_threshold()[0] == max(wanted[i] for i in order[ended:])
        blocks[index].__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_one_blas_thread_until_the_last_world_has_ended() -> None:
    from threadpoolctl import threadpool_info

    def threads() -> list[int]:
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    before = threads()
    one, other = BlasLimit(), BlasLimit()
    one.impose()
    other.impose()
    one.lift()
    assert set(threads()) <= {1}
    other.lift()
    assert threads() == before


def test_two_worlds_in_two_threads_leave_nothing_changed() -> None:
    before, inside = settings(), threading.Barrier(2, timeout=30)
    failures: list[BaseException] = []

    async def main(rank: overlap.Rank) -> None:
        await rank.compute(int)
        if rank.rank == 0:
            await trio.to_thread.run_sync(inside.wait)
        await rank.barrier()

    def live() -> None:
        try:
            overlap.run(main, ranks=2, timeout_s=30)
        except BaseException as error:
            failures.append(error)

    run_threads(threading.Thread(target=live) for _ in range(2))
    assert failures == []
    assert settings() == before
