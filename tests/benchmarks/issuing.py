"""What it costs to issue: a collective, alone and behind thousands, a compute, and the records that tell of one."""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from mmap import mmap
from threading import Event
from time import perf_counter_ns
from typing import Any

import numpy as np
import trio
from numpy.typing import NDArray

from overlap import Future, Rank, run
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


def measure(program: Callable[..., Awaitable[list[int]]], sampling: Sampling, *args: object, ranks: int = 2) -> Times:
    """Run a program on ranks, and return the times that it returns on rank 0."""
    with setting_environment(RunConfig()):
        return Times.of_samples(run(program, sampling, *args, ranks=ranks)[0])


def _time_calls(
    issue: Callable[[Any], Future[Any]], arguments: Iterable[object]
) -> tuple[list[int], list[Future[Any]]]:
    """Issue an operation of each argument; return the nanoseconds of each call, and the futures."""
    samples, futures = [], []
    for argument in arguments:
        begun_ns = perf_counter_ns()
        future = issue(argument)
        samples.append(perf_counter_ns() - begun_ns)
        futures.append(future)
    return samples, futures


def _pairs(count: int) -> Iterator[NDArray[np.float32]]:
    """Yield so many arrays of 8 bytes."""
    return (np.ones(2, np.float32) for _ in range(count))


async def issue(rank: Rank, sampling: Sampling) -> list[int]:
    """Time until `all_reduce()` of 8 bytes returns."""
    arrays, samples = [*_pairs(_IN_FLIGHT)], []
    for _ in range((sampling.warmup + sampling.iters) * 10):
        taken, futures = _time_calls(rank.all_reduce, arrays)
        samples += taken
        for future in futures:
            await future
    return samples[sampling.warmup * 10 * _IN_FLIGHT :]


async def issue_behind(rank: Rank, sampling: Sampling, issued: trio.Event) -> list[int]:
    """Time until `all_reduce()` returns while thousands wait for the other rank, each of an array of its own."""
    if rank.rank == 1:
        await issued.wait()
    samples, futures = _time_calls(
        rank.all_reduce, _pairs(UNFINISHED + (sampling.warmup + sampling.iters) * _IN_FLIGHT)
    )
    issued.set()
    for future in futures:
        await future
    return samples[UNFINISHED + sampling.warmup * _IN_FLIGHT :]


async def issue_in_a_thread(rank: Rank, sampling: Sampling) -> list[int]:
    """Time until `all_reduce()` of 8 bytes returns in the compute thread of a rank."""

    def issue_all() -> list[int]:
        samples, futures = _time_calls(rank.all_reduce, [*_pairs(_IN_FLIGHT)])
        for future in futures:
            future.result(timeout=_PATIENCE_S)
        return samples

    rounds = [await rank.compute(issue_all) for _ in range(sampling.warmup + sampling.iters)]
    return [*chain.from_iterable(rounds[sampling.warmup :])]


async def compute(rank: Rank, sampling: Sampling, argument: Callable[[], object]) -> list[int]:
    """Time until `rank.compute(fn, argument)` returns, while the compute stream is busy with something else."""
    samples: list[int] = []
    for _ in range(sampling.warmup + sampling.iters):
        busy, arguments = Event(), [argument() for _ in range(_IN_FLIGHT)]
        rank.compute(busy.wait, _PATIENCE_S)
        taken, futures = _time_calls(partial(rank.compute, _nothing), arguments)
        samples += taken
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
    flight = Writer(memory, [0], {}).begin_rank(0, Recorder(0))
    issued, carried, operation = flight.record_issue, flight.record_success, _Recorded()
    known = Known()
    samples = []
    for _ in range(sampling.warmup + sampling.iters):
        begun_ns = perf_counter_ns()
        for seq in range(_SPANS):
            carried(issued(operation, known, "call", seq, begun_ns), begun_ns, begun_ns, None)
        samples.append((perf_counter_ns() - begun_ns) / _SPANS)
    return Times.of_samples(samples[sampling.warmup :])


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
    return Times.of_samples(samples[sampling.warmup :])
