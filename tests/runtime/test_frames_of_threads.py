"""Frames of another thread: no collection interrupts the making of a frame's object."""

import dis
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from overlap.threads import read_frames, without_collector


class Deep(threading.Thread):
    """A thread under more frames than the collector waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.over = threading.Event(), threading.Event()

    def run(self) -> None:
        self.go(100)

    def go(self, depth: int) -> None:
        if depth:
            self.go(depth - 1)
        else:
            self.there.set()
            self.over.wait()

    def leave(self) -> None:
        self.over.set()
        self.join()


@pytest.fixture
def deep() -> Iterator[Deep]:
    thread = Deep()
    thread.start()
    thread.there.wait()
    yield thread
    thread.leave()


@contextmanager
def collecting(look: Callable[[FrameType], None]) -> Iterator[None]:
    """Collect garbage as often as the interpreter does; `look` gets the frame of `read_frames` that it interrupts."""

    def note(phase: str, _: object) -> None:
        inside = sys._getframe(1)
        if phase == "start" and inside.f_code is read_frames.__code__ and "frame" in inside.f_locals:
            look(inside)

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)


def test_no_collection_interrupts_the_making_of_a_frame(deep: Deep) -> None:
    instructions = {each.offset: each.argval for each in dis.get_instructions(read_frames)}
    interrupted: list[object] = []
    with collecting(lambda reading: interrupted.append(instructions[reading.f_lasti])):
        names = [frame.f_code.co_name for frame in read_frames(deep.ident or 0)]
    assert names.count("go") == 101
    assert "f_back" not in interrupted
    assert bool(interrupted) == (sys.version_info >= (3, 12))  # which collects between two instructions


def test_a_thread_that_leaves_in_a_collection_leaves_its_frames(deep: Deep) -> None:
    """A finalizer may let it go, from Python 3.12 on also while its frames are read."""
    with collecting(lambda _: deep.leave()):
        names = [frame.f_code.co_name for frame in read_frames(deep.ident or 0)]
    assert names.count("go") == 101
    assert deep.is_alive() == (sys.version_info < (3, 12))


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
