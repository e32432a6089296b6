"""Runs one program on both hosts, as somebody with two machines would by hand, and hears what it says."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from overlap.cli.bench.cases import Assignment, Case
from overlap.cli.bench.measuring import MEMBER, Result, summarised
from overlap.cli.bench.sampling import Sampling
from overlap.cli.children import Child, environment, hear, start
from overlap.rendezvous.launcher_environment import without_membership

from .network import Host

__all__ = ["all_reduces", "ddp_steps", "our_steps"]

_PORT = 29500  # a namespace of our own has no port in use
_LIMIT_S = 600  # absolute, as for peers

_QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # it warns of hosts without names

_TRAINING = "tests.benchmarks.two_hosts.training"
_DDP = "tests.benchmarks.two_hosts.ddp"


def our_steps(hosts: Sequence[Host], sampling: Sampling) -> dict[str, Any]:
    """Train with one rank of ours on each host."""
    [told] = _run(hosts, [], [_TRAINING, json.dumps(asdict(sampling))])
    return told


def all_reduces(hosts: Sequence[Host], cases: Sequence[Case], sampling: Sampling, *, rails: int) -> list[Result]:
    """Measure rows with one rank on each host, over one rail for each of the first links."""
    options = ["--rails", ",".join(f"rail{link}" for link in range(rails))]
    rows = _run(hosts, options, [MEMBER, Assignment(cases=cases, sampling=sampling).to_json()])
    return [summarised(case, sampling, row["told"], check=True) for case, row in zip(cases, rows, strict=True)]


def _run(hosts: Sequence[Host], options: Sequence[str], program: Sequence[str]) -> Iterator[dict[str, Any]]:
    where = [
        "--nnodes",
        str(len(hosts)),
        "--rdzv-endpoint",
        f"{hosts[0].address()}:{_PORT}",
        "--timeout",
        str(_LIMIT_S),
    ]
    secret = {"OVERLAP_SECRET": secrets.token_hex(32)}
    return hear(
        [
            start([*where, "--node-rank", str(host.index), *options], program, before=host.enter, variables=secret)
            for host in hosts
        ]
    )


def ddp_steps(hosts: Sequence[Host], sampling: Sampling, buckets_mib: Sequence[float]) -> dict[str, Any]:
    """Train with one rank of PyTorch on each host, with every bucket size."""
    program = [sys.executable, "-m", _DDP, json.dumps(asdict(sampling)), json.dumps([str(b) for b in buckets_mib])]
    world = {"MASTER_ADDR": hosts[0].address(), "MASTER_PORT": str(_PORT), "WORLD_SIZE": str(len(hosts))}
    shared = without_membership(environment()) | world | _QUIET | {"GLOO_SOCKET_IFNAME": "rail0"}
    [told] = hear(
        [Child([*host.enter, *program], shared | {"RANK": str(host.index), "LOCAL_RANK": "0"}) for host in hosts]
    )
    return told
