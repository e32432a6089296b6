"""Runs of an engine that are cancelled, or whose board is lost, in every phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transports.shared_memory._native", reason="it was not compiled")

from .test_collectives_of_engines import BOARD_BYTES, CANCELLED, DONE, LONG_S, LOST, PENDING, Host, made
from .test_signed_rows import LENT, MAPPED, post

ARRIVED, SLICED, TAKEN = 1, 2, 3
LONG = 16 << 20  # elements of float32 that take a thread many pieces


@pytest.fixture
def host() -> Iterator[Host]:
    made_here = Host(3)
    yield made_here
    made_here.close()


def others_give(host: Host, number: int, value: float) -> None:
    """Post an input of the other ranks, in memory that all map."""
    for other in (1, 2):
        data = np.full(LENT, value, np.float32).tobytes()
        memoryview(host.segments[other])[BOARD_BYTES : BOARD_BYTES + len(data)] = data
        post(host, other, number, MAPPED, BOARD_BYTES)


def until_said(host: Host, run: Any, phase: int) -> None:
    while host.word(0, 0, 0)[0] & 255 < phase:
        assert host.wait(0, run, 0.001) == PENDING


def without_a_row(host: Host, out: np.ndarray[Any, Any]) -> Any:
    what = made("broadcast", None, np.float32, 6, 3)
    x = np.ones(6, np.float32)
    ahead = [host.submit(0, what, number, x, x) for number in range(64)]
    assert {run.state for run in ahead} == {DONE}
    return host.submit(0, what, 64, out[:6], out[:6])


def meeting(host: Host, out: np.ndarray[Any, Any]) -> Any:
    run = host.submit(0, made("all_reduce", "sum", np.float32, LENT, 3), 0, np.ones(LENT, np.float32), out)
    until_said(host, run, ARRIVED)
    return run


def slicing(host: Host, out: np.ndarray[Any, Any]) -> Any:
    run = meeting(host, out)
    others_give(host, 0, 1.0)
    until_said(host, run, SLICED)
    return run


def leaving(host: Host, out: np.ndarray[Any, Any]) -> Any:
    x = np.ones(3 * 360_000, np.float32)  # too long to be copied: the others have to take it
    run = host.submit(0, made("reduce_scatter", "sum", np.float32, len(x), 3), 0, x, np.zeros(360_000, np.float32))
    for other in (1, 2):
        post(host, other, 0, MAPPED, BOARD_BYTES)
    until_said(host, run, TAKEN)
    return run


def taking(host: Host, out: np.ndarray[Any, Any]) -> Any:
    for other in (1, 2):
        post(host, other, 0, 3, out.ctypes.data)
    target = np.zeros(3 * LONG, np.float32)
    return host.submit(0, made("all_gather", None, np.float32, LONG, 3), 0, np.ones(LONG, np.float32), target)


PHASES = [without_a_row, meeting, slicing, leaving]


@pytest.mark.everyday(8)
@pytest.mark.parametrize("lost", [False, True], ids=["cancelled", "lost"])
@pytest.mark.parametrize("begin", PHASES, ids=lambda begin: begin.__name__)
def test_a_run_that_waits_ends_at_once(host: Host, begin: Callable[..., Any], lost: bool) -> None:
    out, found = np.zeros(LENT, np.float32), list[int]()
    run = begin(host, out)
    threads = [threading.Thread(target=lambda: found.append(host.wait(0, run))) for _ in range(2)]
    for thread in threads:
        thread.start()
    if lost:
        host.boards[0].lose()
    else:
        assert host.engines[0].cancel(run)
    for thread in threads:
        thread.join(LONG_S)
    # A rank that only gives has what it needs, with a row: it is done whether or not others come.
    assert found == [DONE if lost and begin is without_a_row else LOST if lost else CANCELLED] * 2
    others_give(host, 0, 5.0)
    assert host.wait(0, run, 0.0) == found[0]
    assert not out.any()


def test_a_run_that_a_thread_works_on_ends_with_its_piece(host: Host) -> None:
    out = np.ones(LONG, np.float32)
    run = taking(host, out)
    assert not host.engines[0].cancel(run) or run.state == CANCELLED
    assert host.wait(0, run) == CANCELLED
    assert host.engines[0].cancel(run)


def test_rows_of_runs_that_were_cancelled_are_used_again(host: Host) -> None:
    what, x, out = made("all_reduce", "sum", np.float32, 6, 3), np.ones(6, np.float32), np.zeros(6, np.float32)
    for number in range(200):
        cancelled = number % 3 == 0
        outs = [np.zeros(6, np.float32) for _ in range(3)]
        runs = [host.submit(rank, what, number, x, outs[rank]) for rank in range(2 if cancelled else 3)]
        if cancelled:
            assert all(host.engines[rank].cancel(run) for rank, run in enumerate(runs))
            runs.append(host.submit(2, what, number, x, out))
            assert host.wait(2, runs[2]) == DONE  # the others have given
        else:
            assert [host.wait(rank, run) for rank, run in enumerate(runs)] == [DONE] * 3
            assert all((each == 3).all() for each in outs)
