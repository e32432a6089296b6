"""The breakdown of idle time of HolisticTraceAnalysis: derived from causes, against a computation by its rules."""

import random
from itertools import pairwise

import pytest

import overlap
from overlap.explain.causes import HOST
from tests.explain.profiles import Recording

KERNEL_WAIT_US = 20
"""Limit of the kernel wait; the default of HolisticTraceAnalysis is 30 ns, which no queue of a device reaches."""


def kernels(seed):
    """Return launches, starts and ends on one stream, in order."""
    chance, free, at, found = random.Random(seed), 100, 0, []
    for _ in range(300):
        at += chance.choice((2, 5, 40, 300))
        start = max(free + chance.choice((0, 1, 5, 30)), at + chance.choice((3, 10, 40)))
        free = start + chance.choice((4, 30, 120))
        found.append((at, start, free))
    return found


def breakdown(found):
    """Return host wait, kernel wait and other wait as `get_idle_time_breakdown` of HTA defines them, by stream."""
    host = kernel = other = 0
    for (_, _, before), (launch, start, _) in pairwise(found):
        idle = start - before
        if launch > before:
            host += idle
        elif idle <= KERNEL_WAIT_US:
            kernel += idle
        else:
            other += idle
    return host, kernel, other


@pytest.mark.parametrize("seed", range(5))
def test_the_waits_of_hta_are_sums_of_causes(tmp_path, seed):
    rec, found = Recording(), kernels(seed)
    for launch, start, end in found:
        rec.kernel(start, end, launch=launch, length=1)
    why = overlap.why(rec.write(tmp_path / "t.json"))
    host = sum(why.cost_ns(cause) for cause in HOST)
    assert (host // 1000, why.cost_ns("queue") // 1000, why.cost_ns("unrecorded") // 1000) == breakdown(found)
    assert all(breakdown(found))
