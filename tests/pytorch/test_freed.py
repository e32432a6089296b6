"""Tensors that a program frees while their operations wait for other ranks."""

from __future__ import annotations

import gc
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402

from overlap.torch import ProcessGroup  # noqa: E402

from .pairs import connected  # noqa: E402


@pytest.mark.parametrize("elements", [1, 1_000, 20_000, 2_000_000])
def test_an_operation_keeps_its_tensor(elements: int) -> None:
    """Small inputs are copied at the call; large ones are read where they lie."""
    count = 8
    with connected(2, dist.HashStore()) as worlds:
        groups = [ProcessGroup(dist.HashStore(), world.rank.world, timedelta(seconds=30)) for world in worlds]
        first = [group.allreduce([torch.ones(1)]) for group in groups]
        assert all(work.wait() for work in first)  # they have met: from now on the engine begins at the call
        for number in range(count):
            groups[0].allreduce([torch.full((elements,), float(number))])
        gc.collect()
        others = [torch.full((elements,), -1.0) for _ in range(2 * count)]  # where those were, unless they are kept
        got = [torch.full((elements,), 100.0) for _ in range(count)]
        works = [groups[1].allreduce([x]) for x in got]
        assert all(work.wait() for work in works)
        assert [sorted(set(x.tolist())) for x in got] == [[100.0 + number] for number in range(count)]
        assert all((other == -1).all() for other in others)
