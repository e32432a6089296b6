"""A network between two hosts that fails: one world goes on, with the weights of its history, and the others end."""

import re
import shutil
import time
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from tests.benchmarks.two_hosts.network import Host
from tests.emulated_hosts import emulated_hosts

from .job import LIMIT_S, Job
from .partitioned import mean_gradient

PROGRAM = str(Path(__file__).with_name("partitioned.py"))
Hosts: TypeAlias = "tuple[Host, Host]"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[Job]]]:
    """Start the launchers of a job on two hosts."""
    jobs: list[Job] = []
    (tmp_path / "shared").mkdir()

    def begin(hosts: Hosts, sides: Sequence[int], processes: int) -> list[Job]:
        common = ["--survive", "--witness", "shared", "--nnodes", str(len(sides)), "--grace", "1"]
        common += ["--rdzv-endpoint", f"{hosts[0].address()}:29400", "--processes", str(processes)]
        for node, side in enumerate(sides):
            enter = hosts[side].enter
            options = [*common, "--node-rank", str(node)]
            own = {"OVERLAP_SECRET": "of all the hosts", "OVERLAP_FLIGHT_DIR": str(tmp_path / f"flight-{node}")}
            jobs.append(Job(tmp_path, *options, program=PROGRAM, enter=enter, **own))
        return jobs

    yield begin
    for job in jobs:
        job.kill()


def until(jobs: Sequence[Job], seconds: float, condition: Callable[[], object]) -> None:
    """Take in what jobs print until a condition holds."""
    limit_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit_s, [(job.out, job.err) for job in jobs]
        pump(jobs, limit_s)


def pump(jobs: Sequence[Job], end_s: float) -> None:
    """Take in what jobs print for a moment."""
    for job in jobs:
        job.pump(time.monotonic())
    time.sleep(max(0.0, min(end_s - time.monotonic(), 0.05)))


def wait(jobs: Sequence[Job], seconds: float) -> None:
    """Let a network be as it is for a time."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pump(jobs, end_s)


def drop(hosts: Hosts, percent: int = 100, *, to: tuple[int, ...] = (0, 1)) -> None:
    """Drop packets in silence, at random, those that arrive at some of the hosts."""
    for index in to:
        rule = "drop" if percent == 100 else f"numgen random mod 100 < {percent} drop"
        chain = f"chain arriving {{ type filter hook input priority 0; iifname rail0 {rule}; }}"
        hosts[index].run("nft", "-f", "-", stdin=f"table inet faults {{ {chain}; }}")


def heal(hosts: Hosts) -> None:
    """Let all packets through."""
    for host in hosts:
        host.run("nft", "flush", "ruleset")


def silent(hosts: Hosts, jobs: Sequence[Job]) -> None:
    drop(hosts)
    until_decided(jobs)


def cut(hosts: Hosts, jobs: Sequence[Job]) -> None:
    """Take the wire away, as a switch that loses power: both hosts notice."""
    hosts[0].run("ip", "link", "set", "rail0", "down")
    until_decided(jobs)


def one_way(hosts: Hosts, jobs: Sequence[Job]) -> None:
    drop(hosts, to=(1,))
    until_decided(jobs)


def lossy(hosts: Hosts, jobs: Sequence[Job]) -> None:
    drop(hosts, 30)
    wait(jobs, 20)


def flapping(hosts: Hosts, jobs: Sequence[Job]) -> None:
    for _ in range(6):
        drop(hosts)
        wait(jobs, 3.9)
        heal(hosts)
        wait(jobs, 1.5)


def healed(after_s: float) -> Callable[[Hosts, Sequence[Job]], None]:
    def fail(hosts: Hosts, jobs: Sequence[Job]) -> None:
        drop(hosts)
        wait(jobs, after_s)
        heal(hosts)
        wait(jobs, 5)

    return fail


def until_decided(jobs: Sequence[Job]) -> None:
    """Wait until each job trains in a later world, or has ended: for 30 s, on a machine without much else to do."""
    trains = re.compile(r"goes on in epoch [1-9]")
    until(jobs, LIMIT_S / 2, lambda: all(trains.search(job.out) or job.process.poll() is not None for job in jobs))


FAULTS = {
    "cut": cut,
    "silent": silent,
    "one way": one_way,
    "lossy": lossy,
    "flapping": flapping,
    "healed after 2 s": healed(2),
    "healed after 20 s": healed(20),
}
SIDES = {"2 + 2": ([0, 1], 2), "1 + 1": ([0, 1], 1), "3 + 1": ([0, 0, 0, 1], 1)}


@pytest.mark.faults
@pytest.mark.parametrize("repetition", range(5))
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_world_goes_on(start, tmp_path, fault, sides, repetition):
    check_one_world_goes_on(start, tmp_path, FAULTS[fault], *SIDES[sides])


@pytest.mark.slow
def test_one_of_two_processes_goes_on(start, tmp_path):
    check_one_world_goes_on(start, tmp_path, silent, *SIDES["1 + 1"])


def check_one_world_goes_on(start, tmp_path, fault, sides, processes):
    if shutil.which("nft") is None:
        pytest.skip("not installed: nft of nftables")
    with emulated_hosts(bits_per_s=None, own_processes=True) as hosts:
        jobs = start(hosts, sides, processes)
        for job in jobs:
            job.until("goes on in epoch 0")
        fault(hosts, jobs)
        (tmp_path / "enough").touch()
        codes = [job.end() for job in jobs]
        for job in jobs:
            job.check_nothing_is_left()
    printed = "".join(job.out for job in jobs)
    results = {int(process): literal_eval(result) for result, process in
               re.findall(r"result (.*) of process (\d+)", printed)}  # fmt: skip
    said = [(job.out, job.err) for job in jobs]
    assert results, said
    members, steps, weight, worlds = results[min(results)]
    assert set(results) == set(members), said
    assert all(result[:3] == (members, steps, weight) for result in results.values()), said
    assert weight == replay(worlds, steps)
    for node, (job, code) in enumerate(zip(jobs, codes, strict=True)):
        own = range(node * processes, (node + 1) * processes)
        assert code == (0 if set(own) & set(members) else 1), said
        assert "Traceback" not in job.err


def replay(worlds, steps):
    """Return the weight after a history of worlds: their members, and the step after which each began."""
    weight = np.float32(0)
    ends = [*(begin for _, begin in worlds[1:]), steps]
    for (members, begin), end in zip(worlds, ends, strict=True):
        for step in range(begin, end):
            weight -= mean_gradient(members, step)
    return float(weight)
