"""Many long operations in flight end in the order of their priorities, on sockets and on the virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import overlap
import topology

from .companies import by_sockets, run_far

COUNT, ELEMENTS = 64, 1 << 18  # of float32: 1 MiB each
PRIORITIES = [(7 * i) % 16 - 8 for i in range(COUNT)]
STRONGEST = min(PRIORITIES) - 1

MACHINE = """\
name = "two hosts"
devices = 2
[chip]
name = "host"
cores = 1
[wires]
shape = "full"
link = "neuronlink"
[links.neuronlink]
latency_s = 1e-4
bandwidth_bytes_per_s = 1.2e8
"""


async def mixed(rank: overlap.Rank) -> list[int]:
    """Issue all at once, and a more urgent one after the first has ended; return priorities in the order of ends."""
    ended: list[int] = []
    stream = rank.stream("many", window=COUNT + 1)

    async def wait(future: overlap.Future[Any], priority: int) -> None:
        got = await future
        assert (got == 1).all()
        ended.append(priority)
        if len(ended) == 1:
            nursery.start_soon(wait, issue(STRONGEST), STRONGEST)

    def issue(priority: int) -> overlap.Future[Any]:
        x = np.full(ELEMENTS, rank.rank, np.float32)
        return rank.all_reduce(x, "sum", priority=priority, stream=stream)

    async with trio.open_nursery() as nursery:
        for priority, future in [(priority, issue(priority)) for priority in PRIORITIES]:
            nursery.start_soon(wait, future, priority)
    return ended


@pytest.mark.slow
def test_on_the_virtual_clock_they_end_in_exactly_that_order(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(MACHINE)
    ended = overlap.run(mixed, ranks=2, cluster=topology.Cluster.load(file), clock="virtual")
    first, late, *others = ended[0]
    assert late == STRONGEST
    assert [first, *others] == sorted(PRIORITIES)
    assert ended[1] == ended[0]


def test_on_sockets_none_ends_before_one_that_is_clearly_more_urgent() -> None:
    """Neighbours may change places: what the system has taken of one is not taken back for the other."""
    ended = run_far(mixed, 2, 1, wires=by_sockets)
    for one in ended:
        assert isinstance(one, list)
        assert sorted(one) == sorted([STRONGEST, *PRIORITIES])
        assert STRONGEST in one[:5]
        one.remove(STRONGEST)
        assert [(at, priority) for at, priority in enumerate(one) if min(one[at:]) < priority - 1] == []
