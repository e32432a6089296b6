"""Frames of another thread: nothing is collected while they are asked for."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from overlap.threads import read_frames, without_collector


@pytest.fixture
def deep() -> Iterator[int]:
    """A thread that stands under more frames than the collector waits for."""
    there, over = threading.Event(), threading.Event()

    def go(depth: int) -> None:
        if depth:
            go(depth - 1)
        else:
            there.set()
            over.wait()

    thread = threading.Thread(target=go, args=(100,))
    thread.start()
    there.wait()
    yield thread.ident or 0
    over.set()
    thread.join()


def test_frames_are_found_and_nothing_is_collected_meanwhile(deep: int) -> None:
    looking: list[bool] = []  # whenever something was collected

    def note(phase: str, _: object) -> None:
        inside = sys._getframe(1)
        looking.append(inside.f_code is read_frames.__code__ and "frame" in inside.f_locals)

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        names = [frame.f_code.co_name for frame in read_frames(deep)]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert names.count("go") == 101
    assert not any(looking)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        read_frames(threading.get_ident())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_comes_back_after_the_last_who_looks() -> None:
    with without_collector():
        with without_collector():
            pass
        assert not gc.isenabled() or sys.version_info >= (3, 12)
    assert gc.isenabled()


FORKS = """
import gc, os, threading
from overlap.threads import without_collector

inside, forking = threading.Event(), threading.Event()

def look():
    with without_collector():
        inside.set()
        forking.wait()
        for _ in range(1_000_000):  # a fork that does not wait comes in here
            pass

thread = threading.Thread(target=look)
thread.start()
inside.wait()
os.register_at_fork(before=forking.set)  # the last one that is registered is called first
child = os.fork()
if child == 0:
    with without_collector():
        pass
    os._exit(not gc.isenabled())
thread.join()
assert gc.isenabled()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_waits_until_nobody_looks() -> None:
    assert subprocess.run([sys.executable, "-c", FORKS], timeout=60).returncode == 0


def test_a_thread_that_has_ended_has_no_frames() -> None:
    thread = threading.Thread(target=str)
    thread.start()
    thread.join()
    assert read_frames(thread.ident or 0) == []
