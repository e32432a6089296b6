"""A transport that is one short file keeps the contract, and carries a job once it is installed."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from transports import Wire
from transports.factory import Bootstrap
from transports.testing import CHECKS

from . import plain_tcp
from .efa.processes import SECRET, Table
from .promises import assert_kept
from .test_factory import install

PROGRAM = """
import numpy as np
import overlap

async def main(rank):
    large = await rank.all_reduce(np.full(1 << 18, rank.rank + 1.0))
    small = await rank.all_gather(np.array([rank.rank]))
    return float(large.sum()), small.tolist()

print(overlap.run(main)[0])
"""


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Wire, Wire]]:
    table = Table(2)
    ends = [
        plain_tcp.make(Bootstrap(member=member, placement=[[0], [1]], exchange=table.of(member), secret=SECRET))
        for member in range(2)
    ]
    async with trio.open_nursery() as nursery:
        leave = trio.Event()

        async def stay(transport: plain_tcp.PlainTcp, *, task_status: trio.TaskStatus[None]) -> None:
            async with transport.open():
                task_status.started()
                await leave.wait()

        async with trio.open_nursery() as opening:
            for transport in ends:
                opening.start_soon(nursery.start, stay, transport)
        try:
            yield ends[0].wire(0), ends[1].wire(1)
        finally:
            leave.set()


@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_the_contract(check: str) -> None:
    assert_kept(check, pair)


async def test_a_link_that_only_its_tasks_move_has_nothing_to_catch_up_with() -> None:
    async with pair() as (one, other):
        starter = one.route(1)
        await other.send(0, 5, memoryview(b"12345678"))
        assert starter.catch_up(1) is False
        out = bytearray(8)
        await one.recv_into(1, 5, out)
        assert (bytes(out), starter.catch_up(1)) == (b"12345678", False)


@pytest.mark.slow
def test_it_carries_a_job_once_it_is_installed(tmp_path: Path) -> None:
    install(tmp_path, "plain", "plain_tcp:make", Path(plain_tcp.__file__).read_text())
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "overlap", "run", "--processes", "2", "--transport", "plain", "--no-prefix"]
    done = subprocess.run(
        [*command, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "(786432.0, [0, 1])\n" * 2
