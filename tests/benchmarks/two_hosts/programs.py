"""Runs one program on both hosts, as somebody with two machines would by hand, and hears what it says."""

import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overlap.cli.bench.cases import Case
from overlap.cli.bench.measuring import Result, summarize_case
from overlap.cli.bench.sampling import Sampling
from overlap.processes.place import without_launcher_variables
from tests.benchmarks.children import Child, environment, read_json_lines, start
from tests.benchmarks.versus.assignment import AssignmentInTurn
from tests.benchmarks.versus.layout import MEMBER

from .network import Host

_PORT = 29500  # a namespace of our own has no port in use
_LIMIT_S = 600  # absolute, as for peers

_QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns of hosts without names

_TRAINING = "tests.benchmarks.two_hosts.training"
_DDP = "tests.benchmarks.two_hosts.ddp"
_STANDING_STILL = "tests.benchmarks.two_hosts.standing_still"
_RAW = "tests.benchmarks.two_hosts.raw"
_OPERATIONS = "tests.benchmarks.pytorch.ranks"


def our_steps(hosts: Sequence[Host], sampling: Sampling) -> dict[str, Any]:
    """Train with one rank of ours on each host."""
    [told] = _run(hosts, [], [_TRAINING, json.dumps(asdict(sampling))])
    return told


def traced_steps(hosts: Sequence[Host], steps: int, trace: Path) -> None:
    """Take steps without a barrier, and keep the timeline of both hosts."""
    for _ in _run(hosts, ["--trace", str(trace)], [_TRAINING, "", str(steps)]):
        raise AssertionError("nobody has anything to tell")


def echoed(hosts: Sequence[Host], *, rails: int) -> object:
    """Have a rank that seldom looks send back what it gets; return how many elements were wrong."""
    [row] = _run(hosts, _rails(rails), [_STANDING_STILL])
    return row["told"]


def raw_exchanges(hosts: Sequence[Host], sampling: Sampling, sizes: Sequence[int]) -> dict[str, list[int]]:
    """Send so many bytes each way over a bare socket; return samples by size, in nanoseconds."""
    where = [hosts[0].address(), str(_PORT), json.dumps(asdict(sampling)), json.dumps([str(size) for size in sizes])]
    program = [sys.executable, "-m", _RAW]
    [told] = read_json_lines([Child([*host.enter, *program, str(host.index), *where], environment()) for host in hosts])
    samples: dict[str, list[int]] = told["samples_ns"]
    return samples


def all_reduces(
    hosts: Sequence[Host], cases: Sequence[Case], sampling: Sampling, *, rails: int, options: Sequence[str] = ()
) -> list[Result]:
    """Measure rows with one rank on each host, over one rail for each of the first links."""
    rows = _run(hosts, [*_rails(rails), *options], [MEMBER, AssignmentInTurn(cases=cases, sampling=sampling).to_json()])
    return [summarize_case(case, sampling, row["told"]) for case, row in zip(cases, rows, strict=True)]


def _rails(count: int) -> list[str]:
    return ["--rails", ",".join(f"rail{link}" for link in range(count))]


def _run(hosts: Sequence[Host], options: Sequence[str], program: Sequence[str]) -> Iterator[dict[str, Any]]:
    return read_json_lines(begun(hosts, options, program))


def begun(hosts: Sequence[Host], options: Sequence[str], program: Sequence[str]) -> list[Child]:
    """Start a module of ours on both hosts."""
    where = [
        "--nnodes",
        str(len(hosts)),
        "--rdzv-endpoint",
        f"{hosts[0].address()}:{_PORT}",
        "--timeout",
        str(_LIMIT_S),
    ]
    secret = {"OVERLAP_SECRET": secrets.token_hex(32)}
    return [
        start([*where, "--node-rank", str(host.index), *options], program, before=host.enter, variables=secret)
        for host in hosts
    ]


def ddp_steps(hosts: Sequence[Host], sampling: Sampling, buckets_mib: Sequence[float]) -> dict[str, Any]:
    """Train with one rank of PyTorch on each host, with every bucket size."""
    return _run_torch(hosts, [_DDP, json.dumps(asdict(sampling)), json.dumps([str(b) for b in buckets_mib])])


def torch_all_reduces(hosts: Sequence[Host], sampling: Sampling, sizes: Sequence[int]) -> list[dict[str, list[int]]]:
    """All-reduce with one rank of PyTorch on each host; return for each size the samples of both backends, in ns."""
    asked = {
        "warmup": sampling.warmup,
        "samples": sampling.iters,
        "buckets": [],
        "names": ["all_reduce"],
        "sizes": sizes,
    }
    told: list[dict[str, list[int]]] = _run_torch(hosts, [_OPERATIONS, json.dumps(asked)])["operations"]["all_reduce"]
    return told


def _run_torch(hosts: Sequence[Host], module: Sequence[str]) -> dict[str, Any]:
    """Run a module of PyTorch on both hosts; return what rank 0 says."""
    program = [sys.executable, "-m", *module]
    world = {"MASTER_ADDR": hosts[0].address(), "MASTER_PORT": str(_PORT), "WORLD_SIZE": str(len(hosts))}
    shared = without_launcher_variables(environment()) | world | _QUIET | {"GLOO_SOCKET_IFNAME": "rail0"}
    [told] = read_json_lines(
        [Child([*host.enter, *program], shared | {"RANK": str(host.index), "LOCAL_RANK": "0"}) for host in hosts]
    )
    return told
