"""What it costs to issue: a collective, alone and behind thousands, a compute, and the span that tells of one."""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np

from overlap import Rank, run
from overlap.cli.bench.sampling import Sampling, Times
from overlap.settings import Settings, imposed
from overlap.timeline.spans import RawCollective, Recorder

__all__ = [
    "measure_issue",
    "measure_span",
]


_IN_FLIGHT = 8  # issued before the first is awaited: fits in a stream's window
_SPANS = 1000  # in a sample: one span is shorter than two looks at the clock


def measure_issue(sampling: Sampling) -> Times:
    """Time until `all_reduce()` of 8 bytes returns, on rank 0 of 2."""
    with imposed(Settings()):
        return Times.of(run(_issue, sampling, ranks=2)[0])


async def _issue(rank: Rank, sampling: Sampling) -> list[int]:
    arrays = [np.ones(2, np.float32) for _ in range(_IN_FLIGHT)]
    samples = []
    for _ in range((sampling.warmup + sampling.iters) * 10):
        futures = []
        for x in arrays:
            begun_ns = perf_counter_ns()
            future = rank.all_reduce(x)
            samples.append(perf_counter_ns() - begun_ns)
            futures.append(future)
        for future in futures:
            await future
    return samples[sampling.warmup * 10 * _IN_FLIGHT :]


def measure_span(sampling: Sampling) -> Times:
    """Time to take two instants and record a collective's span between them, with everything a timeline tells of it."""
    recorder = Recorder(0)
    code = measure_span.__code__
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        begun_ns = perf_counter_ns()
        for seq in range(_SPANS):
            start_ns = perf_counter_ns()
            end_ns = perf_counter_ns()
            meeting = ("all_reduce", "ring", "world", seq, 8, "float32", start_ns)
            info: RawCollective = (meeting, start_ns, 0, code, 1)
            recorder.append(("comm", "comm", "all_reduce", start_ns, end_ns, info))
        samples.append((perf_counter_ns() - begun_ns) / _SPANS)
    return Times.of(samples[sampling.warmup :])
