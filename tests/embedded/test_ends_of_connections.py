"""How connections end: left open by a program, killed while others hold results, or never made by a late rank."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from overlap.embedded import connection, rendezvous

from .connecting import MemoryStore
from .holding import TIMEOUT_S

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
    connection._end_at_exit(weakref.ref(one), before)  # type: ignore[arg-type]
    assert one.ends == [at_exit if fails else "closed"]


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
