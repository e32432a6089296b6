"""Worlds in virtual time, on a machine whose times can be worked out by hand."""

from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest

import overlap
import topology
from overlap.config import overriding_config
from overlap.timeline.spans import Timeline

T = TypeVar("T")

MS = 1_000_000
KB = 1000

# Every pair of eight devices has a wire of its own that carries a byte in a microsecond. Nothing else takes time.
MESH = """
name = "mesh"
devices = 8
[chip]
name = "abacus"
cores = 1
flops_per_s = {{ bf16 = 1e9, fp32 = 1e8 }}
memory_bytes_per_s = 1e30
[wires]
shape = "full"
link = "roce"
[links.roce]
latency_s = {latency_s}
bandwidth_bytes_per_s = {bytes_per_s}
"""


def mesh(ranks: int, *, latency_s: float = 0.0, bytes_per_s: float = 1e6, nodes: int = 1) -> topology.Cluster:
    """Return that machine, with other figures if you like."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "mesh.toml")
        file.write_text(MESH.format(latency_s=latency_s, bytes_per_s=bytes_per_s))
        return topology.Cluster.load(file, ranks=ranks, nodes=nodes)


def simulate(
    main: Callable[..., Awaitable[T]],
    ranks: int,
    *args: object,
    cluster: topology.Cluster | str | None = None,
    algorithm: str | None = None,
    timeout_s: float | None = None,
    **assumed: Any,
) -> tuple[list[T], Timeline]:
    """Run a world in virtual time; return the results and the timeline."""
    timelines: list[Timeline] = []
    with overriding_config(watcher=timelines.append):
        results = overlap.run(
            main, *args, ranks=ranks, cluster=cluster or mesh(ranks), algorithm=algorithm, timeout_s=timeout_s,
            clock=overlap.Virtual(**assumed),
        )  # fmt: skip
    return results, timelines[0]


def now_ns(rank: overlap.Rank) -> int:
    """Return the present instant."""
    return rank.now_ns()


def spans(timeline: Timeline, rank: int, lane: str | None = None) -> list[tuple[str, int, int]]:
    """Return name, start and end of a rank's spans, in order of start."""
    found = timeline.for_rank(rank)
    return [(each.name, each.start_ns, each.end_ns) for each in found if lane in (None, each.lane)]


@contextmanager
def assert_fails(error: type[BaseException], match: str) -> Any:
    """Expect a rank to fail with an error; yields a list that holds the `RankFailedError` afterwards."""
    seen: list[overlap.RankFailedError] = []
    with pytest.raises(overlap.RankFailedError, match=match) as caught:
        yield seen
    seen.append(caught.value)
    assert isinstance(caught.value.__cause__, error)
