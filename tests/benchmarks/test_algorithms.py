"""The bench of algorithms: what is made of its rows."""

from __future__ import annotations

from overlap.cli.bench.sampling import Times

from .algorithms import summary
from .figures import line


def test_the_largest_regret_is_told_and_the_mean() -> None:
    times = Times(median_ns=100.0, p10_ns=100.0, p90_ns=100.0)
    rows = [(1.0, "gather 16 KiB", times), (4.0, "reduce 1 MiB", times)]
    assert [line(figure) for figure in summary("algorithms/2", "2 processes, Unix", rows)] == [
        "2 processes, Unix: fastest over chosen, reduce 1 MiB        0.25x                     >= 0.909x  missed",
        "2 processes, Unix: fastest over chosen, mean of 2           0.50x                     >= 0.909x  missed",
    ]
