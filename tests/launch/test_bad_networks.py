"""Networks between two hosts, which are network namespaces, on bad days, up to a cable that is pulled."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.benchmarks.two_hosts.network import Host
from tests.emulated_hosts import emulated_hosts
from tests.interpreters import environment

from .test_worlds import LIMIT_S

PROGRAM = """
import sys
import numpy as np
import overlap

async def main(rank):
    nbytes, steps = map(int, sys.argv[1:])
    for step in range(steps):
        found = await rank.all_reduce(np.full(nbytes // 4, step, np.float32))
        assert (found == 2 * step).all()
        if step == 1:
            print("up", flush=True)
    print("right", flush=True)

overlap.run(main)
"""
NOWHERE = "02:00:00:00:00:99"  # an address that no device has: what is sent there is lost without a word


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    """Yield two emulated hosts, joined by 1 Gbit/s or by what the test asks for."""
    with emulated_hosts(bits_per_s=getattr(request, "param", 10**9)) as both:
        yield both


@contextmanager
def running(
    folder: Path, hosts: tuple[Host, Host], *arguments: object, options: Sequence[str] = (), program: str = PROGRAM
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a program on both hosts until it is up; none of it survives the block."""
    (folder / "train.py").write_text(program)
    endpoint = f"{hosts[0].address()}:29500"
    command = [sys.executable, "-m", "overlap", "run", "--nnodes", "2", "--no-prefix", "--rdzv-endpoint", endpoint]
    with ExitStack() as stack:
        nodes = []
        for host in hosts:
            flights = str(folder / f"flights-{host.index}")
            node = subprocess.Popen(
                [*host.enter, *command, "--node-rank", str(host.index), *options, "train.py", *map(str, arguments)],
                cwd=folder,
                env=environment(OVERLAP_SECRET="correct horse", OVERLAP_FLIGHT_DIR=flights),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(node)
            stack.callback(node.kill)
            nodes.append(node)
        for node in nodes:
            assert node.stdout is not None
            assert node.stdout.readline() == "up\n", node.communicate(timeout=LIMIT_S)
        yield nodes


def ended(nodes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    said = [node.communicate(timeout=LIMIT_S) for node in nodes]
    return [(node.returncode, out, err) for node, (out, err) in zip(nodes, said, strict=True)]


def lose(host: Host, other: Host, *, lost: bool) -> None:
    """Lose all that a host sends to the other one, without an error for either; or no longer."""
    how = ["replace", other.address(), "lladdr", NOWHERE, "nud", "permanent"] if lost else ["del", other.address()]
    host.run("ip", "neigh", *how, "dev", "rail0")


@pytest.mark.faults  # silence is believed after some seconds
@pytest.mark.parametrize("sender", [0, 1], ids=["to 1", "to 0"])
def test_where_one_direction_is_lost_both_sides_end(tmp_path: Path, hosts: tuple[Host, Host], sender: int) -> None:
    with running(tmp_path, hosts, 4 << 20, 1_000_000) as nodes:
        lose(hosts[sender], hosts[1 - sender], lost=True)
        told = ended(nodes)
    assert [code for code, _, _ in told] == [1, 1]
    for other, (_, _, err) in ((1, told[0]), (0, told[1])):
        assert f"overlap: rank {other} failed: PeerLostError: process {other} (rank {other}) is lost" in err, err


@pytest.mark.faults
@pytest.mark.parametrize(
    ("outage_s", "options", "survived"),
    [(1, [], True), (3, [], True), (8, ["--outage", "15"], True), (30, [], False)],
    ids=["1 s", "3 s", "8 s of 15", "30 s"],
)
def test_outages_are_survived_as_far_as_is_promised(
    tmp_path: Path, hosts: tuple[Host, Host], outage_s: float, options: list[str], survived: bool
) -> None:
    with running(tmp_path, hosts, 4 << 20, 60, options=options) as nodes:
        for host in hosts:
            lose(host, hosts[1 - host.index], lost=True)
        if survived:
            time.sleep(outage_s)
            for host in hosts:
                lose(host, hosts[1 - host.index], lost=False)
        told = ended(nodes)  # else it lasts until both have ended
    assert [code for code, _, _ in told] == [0 if survived else 1] * 2, told
    if survived:
        assert [out for _, out, _ in told] == ["right\n"] * 2
    else:
        assert all("is lost" in err for _, _, err in told), told


@pytest.mark.faults
def test_hosts_may_differ_in_how_long_a_packet_may_be(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    hosts[1].run("ip", "link", "set", "rail0", "mtu", "600")
    with running(tmp_path, hosts, 4 << 20, 20) as nodes:
        told = ended(nodes)
    assert [(code, out) for code, out, _ in told] == [(0, "right\n")] * 2, told


@pytest.mark.faults
@pytest.mark.parametrize("hosts", [10**6], indirect=True, ids=["1 Mbit/s"])
def test_a_slow_wire_is_no_lost_process(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    """A message of 512 KiB takes 4 s, and signs of life wait behind it."""
    with running(tmp_path, hosts, 512 << 10, 4) as nodes:
        told = ended(nodes)
    assert [(code, out) for code, out, _ in told] == [(0, "right\n")] * 2, told


# -- A cable that is pulled between two hosts, which are network namespaces: both sides end, and name the other --------

ENDLESS = """
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


@pytest.mark.slow  # a kernel gives a cable up after some seconds
@pytest.mark.parametrize(("nbytes", "how"), [(64, "idle"), (64, "busy"), (64 << 20, "busy")])
def test_both_sides_of_a_cut_cable_end_and_name_the_other(
    tmp_path: Path, hosts: tuple[Host, Host], nbytes: int, how: str
) -> None:
    with running(tmp_path, hosts, nbytes, how, program=ENDLESS) as nodes:
        hosts[0].run("ip", "link", "set", "rail0", "down")
        told = ended(nodes)
    assert [code for code, _, _ in told] == [1, 1]
    for other, (_, _, err) in ((1, told[0]), (0, told[1])):
        last = err.splitlines()[-1]
        begin = (
            f"overlap: rank {other} failed: PeerLostError: process {other} (rank {other}) is lost: its connection broke"
        )
        assert last.startswith(begin)
        assert (" waited for it in all_reduce #" in last) == (how == "busy")
