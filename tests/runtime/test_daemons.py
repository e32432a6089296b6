"""Daemons that ignore their cancellation are named again and again, and waited for."""

import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import overlap
from overlap import RankLeftError
from overlap.runtime import daemons
from tests.faults.job import Job

from .worlds import TIMEOUT_S, failure_of

R = overlap.Rank
Ended = Callable[[], bool]


async def shielded(ended: Ended) -> None:
    with trio.CancelScope(shield=True):
        while not ended():  # noqa: ASYNC110  a thread makes it true
            await trio.sleep(0.001)


async def catching(ended: Ended) -> None:
    while not ended():
        with suppress(trio.Cancelled):
            await trio.sleep(10)


def parent_of(child: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def parent(*args: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child, *args)

    return parent


def boom() -> None:
    raise ValueError("boom")


async def returns(rank: R) -> str:
    return "ended"


async def raises(rank: R) -> None:
    boom()


async def computes(rank: R) -> None:
    rank.compute(boom, seconds=0.1)
    await trio.sleep_forever()


WAYS = {"shielded": shielded, "catching": catching}
WAYS |= {f"{name} child": parent_of(child) for name, child in WAYS.items()}


def named(rank: int, daemon: str = "stubborn") -> str:
    return (
        f"daemon '{daemon}' (serve.py:7) of rank {rank} goes on although it was cancelled, and its rank waits for it: "
        "let it end on trio.Cancelled, and shield for bounded clean-up only; Ctrl-C twice ends the process"
    )


@pytest.mark.parametrize("end", [returns, raises, computes])
@pytest.mark.parametrize("way", WAYS)
def test_a_daemon_that_ignores_its_cancellation_is_named_again_and_waited_for(
    way: str, clock: Any, end: Callable[[R], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its rank ends: by itself, by an error, or because another rank fails."""
    notices: list[str] = []
    ends: list[int] = []
    monkeypatch.setattr(daemons, "notify", notices.append)
    for pause in ("GRACE_S", "REPEAT_S"):
        monkeypatch.setattr(daemons, pause, 0.01)

    async def serve(rank: R) -> None:
        await WAYS[way](lambda: notices.count(named(rank.rank)) >= 2)
        ends.append(rank.rank)

    async def main(rank: R) -> object:
        rank.spawn(serve, rank, daemon=True, name="stubborn", call_site="serve.py:7")
        await trio.sleep(0.01)
        if rank.rank == 0 or end is returns:
            return await end(rank)
        return await trio.sleep_forever()

    if end is returns:
        assert overlap.run(main, ranks=2, clock=clock, timeout_s=TIMEOUT_S) == ["ended", "ended"]
    else:
        failure = failure_of(overlap.run, main, ranks=2, clock=clock, timeout_s=TIMEOUT_S)
        assert (failure.rank, repr(failure.cause)) == (0, "ValueError('boom')")
    assert set(notices) == {named(0), named(1)}
    assert sorted(ends) == [0, 1]


INTERRUPTED = """
import trio, overlap
from overlap.runtime import daemons

daemons.GRACE_S = 0.01


async def shielded():
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()


async def main(rank):
    rank.spawn(shielded, daemon=True, name="stubborn", call_site="serve.py:7")
    print("begins", flush=True)
    await trio.sleep_forever()


overlap.run(main, ranks=1)
"""


@pytest.mark.slow
def test_a_second_interrupt_ends_the_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "begins\n"
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == f"overlap: {named(0)}\n"
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == -signal.SIGINT
        finally:
            process.kill()


ENDING = (
    INTERRUPTED.replace("GRACE_S = 0.01", "GRACE_S, daemons.LIMIT_S = 0.01, 0.2").rpartition("    print")[0]
    + """
    await rank.barrier()
    if "fails" in sys.argv:
        if rank.rank == 0:
            raise ValueError("boom")
        await trio.sleep_forever()


overlap.run(main)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fails", "returns"])
def test_a_launched_process_ends_after_a_limit_and_says_so(way: str, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(f"import sys\n{ENDING}")
    with Job(tmp_path, "--processes", "2", program=str(tmp_path / "serve.py"), arguments=[way]) as job:
        assert job.end() == 1
        line = r"daemon 'stubborn' \(serve.py:7\) of rank \d did not end within 0.2 s of its cancellation, and"
        assert re.search(line, job.err)
        assert ("RankFailedError: rank 0 failed at serve.py:20: ValueError: boom" in job.err) is (way == "fails")
        job.check_nothing_is_left()


def test_a_daemon_cleans_up_before_the_failure_of_its_rank_is_reported(clock: Any) -> None:
    events: list[str] = []

    async def serve() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(10, shield=True):
                await trio.sleep(0.02)
                events.append("closed")

    async def main(rank: R) -> None:
        daemon = rank.spawn(serve, daemon=True)
        daemon.add_done_callback(lambda done: events.append(f"done, {type(done.exception()).__name__}"))
        await trio.sleep(0.01)
        boom()

    with pytest.raises(overlap.RankFailedError, match="ValueError: boom"):
        overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    assert events == ["closed", "done, PeerFailedError"]


def test_a_daemon_that_catches_its_cancellation_a_few_times_ends_by_itself(
    clock: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []

    async def reluctant() -> None:
        for _ in range(20):
            with suppress(trio.Cancelled):
                await trio.sleep(10)
        events.append("ended")

    async def main(rank: R) -> None:
        daemon = rank.spawn(parent_of(reluctant), daemon=True)
        await trio.sleep(0.01)
        assert daemon.cancel()
        assert daemon.cancel()

    overlap.run(main, ranks=1, clock=clock, timeout_s=TIMEOUT_S)
    assert (events, capfd.readouterr().err) == (["ended"], "")


def test_a_daemon_sees_the_error_of_a_rank_that_has_left_before_its_own_rank_ends() -> None:
    """Trio runs the tasks of a turn in a random order, so one run proves little."""

    async def main(rank: R) -> str:
        async def serve() -> None:
            with suppress(RankLeftError):
                await rank.recv(((1,), float), 1, tag=5)

        if rank.rank == 0:
            rank.spawn(serve, daemon=True)
            await rank.send(np.ones(1), 1)
            await rank.recv(((1,), float), 1)
        else:
            await rank.recv(((1,), float), 0)
            await rank.send(np.ones(1), 0)
        return "ended"

    for _ in range(30):
        assert overlap.run(main, ranks=2, timeout_s=TIMEOUT_S) == ["ended", "ended"]
