"""Private parts of Trio, and frames of other threads: what they give, and what happens without each of them."""

import builtins
import dis
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import overlap
from overlap.errors import UsageError
from overlap.runtime import trio_private
from overlap.runtime.blame.loop import program_task_lines
from overlap.threads import paused_garbage_collector, read_frames, without_garbage_collector
from tests import interpreters

from .structured import TIMEOUT_S

# -- private parts of Trio: what they give, and what happens in a version of Trio without each of them -----------------

Monkeypatch = pytest.MonkeyPatch


def hide(monkeypatch: Monkeypatch, missing: str) -> None:
    """Let `trio_private` find no attribute of a name; Trio itself needs it."""

    def found(owner: object, name: str, default: object) -> object:
        return default if name == missing else builtins.getattr(owner, name, default)

    monkeypatch.setattr(trio_private, "getattr", found, raising=False)


# -- the order of tasks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["_ALLOW_DETERMINISTIC_SCHEDULING", "_r"])
def test_without_the_switch_of_the_scheduler_faults_are_refused(missing: str, monkeypatch: Monkeypatch) -> None:
    monkeypatch.delattr(trio._core._run, missing)  # type: ignore[attr-defined]
    with pytest.raises(UsageError) as refused, trio_private.ordering_tasks(Random(1)):
        pass
    reason = f"faults: the order of tasks cannot be chosen in Trio {trio.__version__}; install Trio 0.32"
    assert str(refused.value) == reason


@pytest.mark.parametrize("missing", ["_core", "_run"])
def test_without_the_module_of_the_scheduler_faults_are_refused(missing: str, monkeypatch: Monkeypatch) -> None:
    async def main(rank: overlap.Rank) -> None:
        pass

    hide(monkeypatch, missing)
    with pytest.raises(UsageError, match=r"^faults: the order of tasks cannot be chosen in Trio \d"):
        overlap.run(main, ranks=1, clock=overlap.Virtual(faults=overlap.Faults(seed=1)))


# -- errors that a nursery cannot show ---------------------------------------------------------------------------------


UNSHOWABLE = """
import sys, trio, overlap
from overlap.runtime import trio_private

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__

async def child():
    raise Mute

async def main(rank):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(child)

if "unknown" in sys.argv:
    trio_private.is_of_tasks = lambda code: False
try:
    overlap.run(main, ranks=1)
except BaseException as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        (
            "known",
            "RankFailedError rank 0 failed at mute.py:11: RuntimeError: Mute: (its text cannot be had: RuntimeError)\n",
        ),
        ("unknown", "TrioInternalError internal error in Trio - please file a bug!\n"),
    ],
)
def test_without_frames_of_trio_an_error_that_a_nursery_cannot_show_names_no_rank(
    frames: str, told: str, tmp_path: Path
) -> None:
    """Trio's loop dies of it, and leaves its tasks behind."""
    (tmp_path / "mute.py").write_text(UNSHOWABLE)
    run = interpreters.run("mute.py", frames, cwd=tmp_path, timeout=TIMEOUT_S)
    assert run.stdout == told, run.stderr


# -- interrupts --------------------------------------------------------------------------------------------------------


def test_no_frame_is_the_loop_and_no_interrupt_is_delivered_if_they_are_not_known(monkeypatch: Monkeypatch) -> None:
    async def main() -> tuple[bool, bool, bool]:
        frame = sys._getframe()
        while frame.f_back is not None and not trio_private.is_loop(frame.f_code):
            frame = frame.f_back
        found = frame.f_code.co_name == "unrolled_run"
        hide(monkeypatch, "unrolled_run")
        found_without = trio_private.is_loop(frame.f_code)
        hide(monkeypatch, "deliver_ki")
        return found, found_without, trio_private.deliver_interrupt()

    assert trio.run(main) == (True, False, False)


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_any_task_may_time_out_if_its_deadline_is_not_known(monkeypatch: Monkeypatch) -> None:
    async def main() -> tuple[bool, bool, bool]:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                task = trio.lowlevel.current_task()
                around = trio_private.may_time_out(task, nursery)
                with trio.CancelScope(deadline=trio.current_time() + 1):
                    await trio.lowlevel.checkpoint()
                    within = trio_private.may_time_out(task, nursery)
                monkeypatch.setattr(trio_private, "_STATUS", "gone")
                return around, within, trio_private.may_time_out(task, nursery)

    assert trio.run(main) == (False, True, True)


# -- nurseries that wait -----------------------------------------------------------------------------------------------


def test_a_nursery_that_waits_is_named_beside_its_tasks_if_it_is_not_known(monkeypatch: Monkeypatch) -> None:
    async def main() -> tuple[list[str], list[str]]:
        async def parent() -> None:
            async with trio.open_nursery() as inner:
                inner.start_soon(trio.sleep_forever)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(parent)
            await wait_all_tasks_blocked()
            (task,) = nursery.child_tasks
            known = program_task_lines(task, 0)
            monkeypatch.setattr(trio_private, "_JOINING", ())
            unknown = program_task_lines(task, 0)
            nursery.cancel_scope.cancel()
        return known, unknown

    line = main.__code__.co_firstlineno + 2
    assert trio.run(main) == ([], [f"tests/runtime/test_trio_private.py:{line}"])


# -- frames of another thread: no collection interrupts the making of a frame's object ---------------------------------


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
    with without_garbage_collector():
        with without_garbage_collector():
            pass
        assert not gc.isenabled() or sys.version_info >= (3, 12)
    assert gc.isenabled()


def test_the_collector_comes_back_after_the_last_pause_that_overlaps() -> None:
    with paused_garbage_collector:
        paused_garbage_collector.__enter__()
    assert not gc.isenabled()
    paused_garbage_collector.__exit__()
    assert gc.isenabled()


FORKS = """
import gc, os, threading, time
from overlap.threads import paused_garbage_collector

inside, forking = threading.Event(), threading.Event()

def look():
    with paused_garbage_collector:
        inside.set()
        forking.wait()
        time.sleep(1)  # the fork comes in here

thread = threading.Thread(target=look)
thread.start()
inside.wait()
os.register_at_fork(before=forking.set)  # the last one that is registered is called first
child = os.fork()
if child == 0:
    with paused_garbage_collector:
        pass
    os._exit(not gc.isenabled())
thread.join()
assert gc.isenabled()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_collects_garbage_though_another_thread_had_paused_that() -> None:
    assert subprocess.run([sys.executable, "-c", FORKS], timeout=60).returncode == 0


def test_a_thread_that_has_ended_has_no_frames() -> None:
    thread = threading.Thread(target=str)
    thread.start()
    thread.join()
    assert read_frames(thread.ident or 0) == []
