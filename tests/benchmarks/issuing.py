"""What it costs to issue: a collective, alone and behind thousands, a compute, and the records that tell of one."""

from __future__ import annotations

from collections.abc import Callable
from mmap import mmap
from threading import Event
from time import perf_counter_ns

import numpy as np
import trio
from numpy.typing import NDArray

from overlap import Rank, run
from overlap.cli.bench.sampling import Sampling, Times
from overlap.config import RunConfig, setting_environment
from overlap.flight.layout import file_bytes
from overlap.flight.recorder import Known, Writer
from overlap.timeline.recording import RawCollective, Recorder

ARRAYS = 100
UNFINISHED = 8000

_PATIENCE_S = 60.0  # reached only if something is stuck
_IN_FLIGHT = 8  # issued before the first is awaited: fits in a stream's window
_SPANS = 1000  # in a sample: one span is shorter than two looks at the clock


def measure_issue(sampling: Sampling) -> Times:
    """Time until `all_reduce()` of 8 bytes returns, on rank 0 of 2."""
    with setting_environment(RunConfig()):
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


def measure_issue_behind(sampling: Sampling) -> Times:
    """Time until `all_reduce()` returns while thousands wait for the other rank, each of an array of its own."""
    with setting_environment(RunConfig()):
        return Times.of(run(_issue_behind, sampling, trio.Event(), ranks=2)[0])


async def _issue_behind(rank: Rank, sampling: Sampling, issued: trio.Event) -> list[int]:
    if rank.rank == 1:
        await issued.wait()
    samples, futures = [], []
    for _ in range(UNFINISHED + (sampling.warmup + sampling.iters) * _IN_FLIGHT):
        x = np.ones(2, np.float32)
        begun_ns = perf_counter_ns()
        future = rank.all_reduce(x)
        samples.append(perf_counter_ns() - begun_ns)
        futures.append(future)
    issued.set()
    for future in futures:
        await future
    return samples[UNFINISHED + sampling.warmup * _IN_FLIGHT :]


def measure_issue_in_a_thread(sampling: Sampling) -> Times:
    """Time until `all_reduce()` of 8 bytes returns in the compute thread of rank 0 of 2."""
    with setting_environment(RunConfig()):
        return Times.of(run(_issue_in_a_thread, sampling, ranks=2)[0])


async def _issue_in_a_thread(rank: Rank, sampling: Sampling) -> list[int]:
    def issue() -> list[int]:
        arrays = [np.ones(2, np.float32) for _ in range(_IN_FLIGHT)]
        samples, futures = [], []
        for x in arrays:
            begun_ns = perf_counter_ns()
            future = rank.all_reduce(x)
            samples.append(perf_counter_ns() - begun_ns)
            futures.append(future)
        for future in futures:
            wait: Callable[..., object] = future.result
            wait(timeout=_PATIENCE_S)
        return samples

    rounds = [await rank.compute(issue) for _ in range(sampling.warmup + sampling.iters)]
    return [sample for one in rounds[sampling.warmup :] for sample in one]


def measure_compute(sampling: Sampling, argument: Callable[[], object]) -> Times:
    """Time until `rank.compute(fn, argument)` returns, while the compute stream is busy with something else."""
    with setting_environment(RunConfig()):
        return Times.of(run(_compute, sampling, argument, ranks=1)[0])


async def _compute(rank: Rank, sampling: Sampling, argument: Callable[[], object]) -> list[int]:
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        busy, arguments, futures = Event(), [argument() for _ in range(_IN_FLIGHT)], []
        rank.compute(busy.wait, _PATIENCE_S)
        for passed in arguments:
            begun_ns = perf_counter_ns()
            future = rank.compute(_nothing, passed)
            samples.append(perf_counter_ns() - begun_ns)
            futures.append(future)
        busy.set()
        for future in futures:
            await future
    return samples[sampling.warmup * _IN_FLIGHT :]


def _nothing(_: object) -> None:
    pass


def an_array() -> NDArray[np.float32]:
    """Return 1 MiB."""
    return np.ones(1 << 18, np.float32)


def many_arrays() -> dict[str, NDArray[np.float32]]:
    """Return as many as the parameters of a model."""
    return {f"layer{index}": np.ones(256, np.float32) for index in range(ARRAYS)}


class _Recorded:
    """An operation, as the flight record sees it."""

    place = (an_array.__code__, 1)

    def flight_fields(self) -> dict[str, object]:
        return {"op": "all_reduce", "name": "all_reduce"}


def measure_flight(sampling: Sampling) -> Times:
    """Time to put an operation into the flight record when it is issued, and again when it ends."""
    memory = mmap(-1, file_bytes(1))
    flight = Writer(memory, [0], {}).rank(0, Recorder(0))
    issued, carried, operation = flight.issued, flight.carried, _Recorded()
    known = Known()
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        begun_ns = perf_counter_ns()
        for seq in range(_SPANS):
            carried(issued(operation, known, "call", seq, begun_ns), begun_ns, begun_ns, None)
        samples.append((perf_counter_ns() - begun_ns) / _SPANS)
    return Times.of(samples[sampling.warmup :])


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
            info: RawCollective = (meeting, start_ns, 0, code, 1, 0)
            recorder.append(("comm", "comm", "all_reduce", start_ns, end_ns, info))
        samples.append((perf_counter_ns() - begun_ns) / _SPANS)
    return Times.of(samples[sampling.warmup :])
