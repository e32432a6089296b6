"""Measures our ranks wherever they are: in this process, or in processes that are started for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .layout import Layout
from .measure import Measurement, measure, measurement
from .operations import Case
from .peer import Spec
from .process import hear, start
from .sampling import Sampling

__all__ = ["MEMBER", "measure_rows"]

MEMBER = "overlap.cli.bench.member"


def measure_rows(
    cases: Sequence[Case], sampling: Sampling, layout: Layout, *, check: bool = True, algorithm: str | None = None
) -> Iterator[Measurement]:
    """Run cases that differ in their counts only, each in a world of its own; yield each row when it is known.

    Raises:
        OverlapError: If a process of the world fails.
    """
    if layout.nodes == 1:
        for case in cases:
            yield measure(case, sampling, check=check, algorithm=algorithm)
        return
    options = layout.options(cases[0].ranks, algorithm=algorithm)
    spec = Spec.of(cases, sampling, check=check)
    for case, row in zip(cases, hear([start(options, [MEMBER, spec.to_json()])]), strict=True):
        yield measurement(case, sampling, row["told"], check=check)
