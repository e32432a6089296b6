"""Every collective against its numpy reference on modelled machines, in virtual time."""

import numpy as np
import pytest

import overlap

from .cases import KINDS, SCATTERING, Case, cases
from .reference import Results
from .test_collectives import check_world, issue_all, out_cases, receives

MACHINES = ("local", "trn1.32xlarge", "dl1.24xlarge")
SIZES = (1, 2, 8)  # legal on all of them


@pytest.mark.parametrize("cluster", MACHINES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_variants_and_shapes(kind: str, size: int, cluster: str) -> None:
    todo = list(cases(kind, size))
    check_world(todo, overlap.run(issue_all, todo, ranks=size, cluster=cluster, clock="virtual"))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("size", SIZES)
def test_out_is_filled_from_futures(size: int) -> None:
    todo = out_cases(size)

    async def main(rank: overlap.Rank) -> Results:
        issued, outs = [], []
        for case in todo:
            want = case.expected(size)[rank.rank]
            outs.append(np.full_like(want, 99) if receives(case, rank.rank) else None)
            x = rank.compute(case.input, rank.rank, seconds=1e-6)
            issued.append(case.issue(rank.world, x, out=outs[-1]))
        results = [await future for future in issued]
        assert all(result is out for result, out in zip(results, outs, strict=True))
        return results

    check_world(todo, overlap.run(main, ranks=size, clock="virtual"))


@pytest.mark.slow
def test_large_arrays() -> None:
    todo = []
    for kind in KINDS:
        shape = (700_001 * 3,) if kind in SCATTERING else (700_001,)
        kwargs = {"pairs": [(0, 2), (2, 0)]} if kind == "permute" else {}
        todo.append(Case(kind=kind, shape=shape, dtype=np.dtype(np.float32), kwargs=kwargs))
    check_world(todo, overlap.run(issue_all, todo, ranks=3, clock="virtual"))
