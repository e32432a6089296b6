"""A cable that is pulled between two hosts, which are network namespaces: both sides end, and name the other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.benchmarks.two_hosts.network import Host, two_hosts
from tests.interpreters import environment

from .test_worlds import LIMIT_S

PROGRAM = """
import sys
import numpy as np
import overlap, trio

async def main(rank):
    for step in range(1_000_000):
        with rank.step(step):
            await rank.all_reduce(np.ones(int(sys.argv[1]) // 4, np.float32))
            if step == 1:
                print("up", flush=True)
                if sys.argv[2] == "idle":
                    await trio.sleep_forever()

overlap.run(main)
"""


def needs_namespaces() -> None:
    """Skip a test where hosts cannot be emulated."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no rights to make a network namespace")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    needs_namespaces()
    with two_hosts(links=1, bits_per_s=10**9) as both:
        yield both


@pytest.mark.slow  # a kernel gives a cable up after some seconds
@pytest.mark.parametrize(
    ("nbytes", "how"),
    [(64, "idle"), (64, "busy"), (64 << 20, "busy")],
)
def test_both_sides_of_a_cut_cable_end_and_name_the_other(
    tmp_path: Path, hosts: tuple[Host, Host], nbytes: int, how: str
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    endpoint = f"{hosts[0].address()}:29500"
    command = [sys.executable, "-m", "overlap", "run", "--nnodes", "2", "--no-prefix", "--rdzv-endpoint", endpoint]
    with ExitStack() as stack:
        nodes = []
        for host in hosts:
            node = subprocess.Popen(
                [*host.enter, *command, "--node-rank", str(host.index), "train.py", str(nbytes), how],
                cwd=tmp_path,
                env=environment(OVERLAP_SECRET="correct horse", OVERLAP_FLIGHT_DIR=f"{tmp_path}/flights-{host.index}"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(node)
            stack.callback(node.kill)
            nodes.append(node)
        for node in nodes:
            assert node.stdout is not None
            assert node.stdout.readline() == "up\n"
        subprocess.run([*hosts[0].enter, "ip", "link", "set", "rail0", "down"], check=True, timeout=LIMIT_S)
        told = [node.communicate(timeout=LIMIT_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    for other, err in ((1, told[0]), (0, told[1])):
        last = err.splitlines()[-1]
        begin = (
            f"overlap: rank {other} failed: PeerLostError: process {other} (rank {other}) is lost: its connection broke"
        )
        assert last.startswith(begin)
        assert (" waited for it in all_reduce #" in last) == (how == "busy")
