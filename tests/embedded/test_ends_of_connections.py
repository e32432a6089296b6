"""How connections end: left open by a program, killed while others hold results, or never made by a late rank."""

import atexit
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import overlap
from overlap.embedded import connection, rendezvous

from .connecting import MemoryStore
from .holding import TIMEOUT_S


def test_an_interrupt_before_the_loop_runs_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, interrupted = list[connection.Connection](), threading.Event()
    thread_main = connection.Connection._thread_main

    def begin_late(one: connection.Connection) -> None:
        opened.append(one)
        assert interrupted.wait(TIMEOUT_S)
        thread_main(one)

    def interrupt(_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(connection.Connection, "_thread_main", begin_late)
    monkeypatch.setattr(connection, "wait_until_settled", interrupt)
    with pytest.raises(KeyboardInterrupt):
        overlap.connect(0, 1)
    interrupted.set()
    opened[0]._thread.join(TIMEOUT_S)
    assert not opened[0]._thread.is_alive()


# -- how a connection ends that a program has left open ----------------------------------------------------------------


class Open:
    def __init__(self) -> None:
        self.ends: list[Any] = []

    def fail(self, error: BaseException) -> None:
        self.ends.append(error)

    def close(self) -> None:
        self.ends.append("closed")


@pytest.mark.parametrize(
    ("before", "at_exit", "interactive", "fails"),
    [
        (None, None, False, False),
        (None, ValueError("bad"), False, True),
        (ValueError("earlier"), None, False, False),  # still the earlier one
        (ValueError("earlier"), ValueError("bad"), False, True),
        (None, ValueError("typed"), True, False),  # a prompt goes on after an error
    ],
)
@pytest.mark.everyday(5)
def test_only_the_error_that_ends_the_program_is_that_of_its_connection(
    monkeypatch: pytest.MonkeyPatch,
    before: BaseException | None,
    at_exit: BaseException | None,
    interactive: bool,
    fails: bool,
) -> None:
    for name in ("last_exc", "last_value", "ps1"):
        monkeypatch.delattr(sys, name, raising=False)
    if at_exit is not None or before is not None:
        monkeypatch.setattr(sys, "last_value", at_exit or before, raising=False)
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    one = Open()
    connection._close_at_exit(weakref.ref(one), before)  # type: ignore[arg-type]
    assert one.ends == [at_exit if fails else "closed"]


@pytest.mark.parametrize("launcher", ["torchrun", ""])
@pytest.mark.parametrize(
    "ends", ["by the failure", "because of the failure", "by a text of the failure", "by its own error", "well"]
)
def test_a_process_that_another_one_has_failed_ends_after_that_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, launcher: str, ends: str
) -> None:
    """Torchrun calls the process that ends first the root cause. One that has caught the failure may be it later."""
    at_exit, waits, store = list[Callable[[], object]](), list[float](), MemoryStore()
    monkeypatch.setattr(atexit, "register", lambda function, *args: at_exit.append(partial(function, *args)))
    monkeypatch.setattr(connection, "sleep", waits.append)
    monkeypatch.setattr(connection, "_errors_of_others", list[str]())
    for name in ("last_exc", "last_value", "ps1"):
        monkeypatch.delattr(sys, name, raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with ThreadPoolExecutor(2) as pool:
        culprit, victim = pool.map(lambda rank: overlap.connect(rank, 2, store=store), range(2))
    culprit.fail(ValueError("bad"))
    failure = victim.failure(TIMEOUT_S)
    consequence = ValueError("because of it")
    consequence.__context__ = failure
    errors = {
        "by the failure": failure,
        "because of the failure": ExceptionGroup("two", [KeyError(), consequence]),
        "by a text of the failure": RuntimeError("DistBackendError: rank 0 failed: ValueError: bad\n\nAt:\n"),  # by C++
        "by its own error": ValueError("own"),
    }
    if ends in errors:
        monkeypatch.setattr(sys, "last_value", errors[ends], raising=False)
    for end in at_exit:
        end()
    assert not waits  # it would keep the connections that have not ended
    connection._let_culprit_end_first()
    assert waits == [connection._CULPRIT_S] * (bool(launcher) and ends.endswith("the failure"))


# -- A process that is killed while others hold results that lie in its memory -----------------------------------------

SIZE, KILLED = 3, 1


@pytest.mark.slow
def test_results_that_ranks_share_outlive_the_process_whose_memory_it_was(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.embedded.holding"]
    processes = [
        subprocess.Popen([*program, str(rank), str(SIZE), str(tmp_path), str(KILLED)], stdout=subprocess.PIPE)
        for rank in range(SIZE)
    ]
    try:
        told = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        found = json.loads(told[rank])
        assert found["culprit"] == KILLED
        assert found["right"] == [True] * SIZE
        assert found["mapped"] == [SIZE, 1, 0]


# -- A rank that does not come to the store is named long before the store's own time-out ------------------------------


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, "rank 0 has waited 0.01 s at the store for rank 1, which has not connected, or is stopped; the store's "),
        (1, "rank 1 has waited 0.01 s at the store for rank 0, which has not connected, or waits for others; the "),
    ],
)
def test_the_rank_that_is_waited_for(rank: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, told = list[str](), threading.Event()
    monkeypatch.setattr(rendezvous, "LATE_S", 0.01)
    monkeypatch.setattr(rendezvous, "notify", lambda line: (said.append(line), told.set()))

    class Empty(MemoryStore):
        """A store in which no other rank has put anything; it gives up once that was told."""

        def get(self, key: str) -> bytes:
            assert told.wait(60)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        with rendezvous.rendezvous_through_store(Empty(), rank, 2, secret=None, job="late", nodes=None, host=None):
            pass
    assert [line[: len(expected)] for line in said] == [expected]
