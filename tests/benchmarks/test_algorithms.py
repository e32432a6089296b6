"""The bench of algorithms: what is made of its rows."""

from __future__ import annotations

import pytest

import topology
from overlap.cli.bench.sampling import Times
from overlap.collectives.slicing import in_slices
from overlap.cost.select import plan

from .algorithms import distinct, summary
from .figures import line
from .two_hosts.planned import MACHINE, OPERATIONS, SIZES_BYTES


def test_the_largest_regret_is_told_and_the_mean() -> None:
    times = Times(median_ns=100.0, p10_ns=100.0, p90_ns=100.0)
    rows = [(1.0, "gather 16 KiB", times), (4.0, "reduce 1 MiB", times)]
    assert [line(figure) for figure in summary("algorithms/2", "2 processes, Unix", rows)] == [
        "2 processes, Unix: fastest over chosen, reduce 1 MiB        0.25x                     >= 0.909x  missed",
        "2 processes, Unix: fastest over chosen, mean of 2           0.50x                     >= 0.909x  missed",
    ]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_between_two_hosts_every_algorithm_can_be_cut_in_slices_and_the_chosen_one_is_measured(operation: str) -> None:
    size = SIZES_BYTES[-1]
    for ranks in (2, 4):
        cluster = topology.cluster(str(MACHINE), nodes=2, ranks=ranks)
        measured = distinct(operation, size, cluster)
        assert plan(operation, size, cluster).algorithm in measured
        for algorithm in measured:
            in_slices(plan(operation, size, cluster, algorithm=algorithm).schedule(), size)
