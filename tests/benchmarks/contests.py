"""All-reduces on our ranks, and right after them on those of other libraries, or copies of as many bytes."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from overlap.cli.bench.cases import NAMES, Case
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import Sampling, Times
from overlap.units import format_bytes, format_ns
from tests.benchmarks.versus.assignment import AssignmentInTurn
from tests.benchmarks.versus.contenders import Contender, ContenderResult, ContenderUnavailableError, measure_contender
from tests.benchmarks.versus.layout import ProcessLayout, measure_cases

from .figures import Figure, as_fast_as, time_of

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """An all-reduce in place on our ranks, and right after them on those of other libraries.

    Attributes:
        ranks: Size of the world; a library has a process for each.
        layout: Where ours are.
        aims: For each size in bytes, how many times as fast as each library, at least.
    """

    ranks: int
    layout: ProcessLayout
    aims: Mapping[int, Mapping[str, float]]

    def cases(self) -> list[Case]:
        """Return the rows."""
        return [_case(self.ranks, nbytes) for nbytes in self.aims]

    def describe(self, nbytes: int) -> str:
        """Say what is reduced between whom."""
        if self.layout.processes == 1:
            return f"{format_bytes(nbytes)}, {self.ranks} ranks"
        wires = "TCP" if self.layout.tcp else "Unix"
        each = self.ranks // self.layout.processes
        return f"{format_bytes(nbytes)}, {self.layout.processes} nodes x {each}, {wires}"

    def name(self, nbytes: int) -> str:
        """Return a stable name."""
        name = f"all_reduce/{nbytes}/{self.ranks}"
        return (
            name
            if self.layout.processes == 1
            else f"{name}/{self.layout.processes}_{'tcp' if self.layout.tcp else 'unix'}"
        )


_ONE, _TWO, _TWO_TCP = (
    ProcessLayout(),
    ProcessLayout(processes=2, transport="efa"),
    ProcessLayout(processes=2, tcp=True),
)

CONTESTS = (
    Contest(ranks=2, layout=_ONE, aims={MIB: {"gloo": 5.0, "mpi": 1.0}, 64 * MIB: {"gloo": 5.0, "mpi": 3.0}}),
    Contest(ranks=4, layout=_ONE, aims={64 * MIB: {"gloo": 5.0, "mpi": 3.0}}),
    Contest(ranks=2, layout=_TWO, aims={8: {"gloo": 2.0}, 64 * MIB: {"gloo": 1.7}}),
    Contest(ranks=2, layout=_TWO_TCP, aims={64 * MIB: {"gloo": 1.2}}),
    Contest(ranks=4, layout=_TWO, aims={64 * MIB: {"gloo": 2.0}}),
)

LATENCY_AIMS_NS = {2: 30e3, 8: 60e3}  # ranks: 8 bytes, at most
COPIES_AIM = 0.85  # of the memory bandwidth that copies of two threads reach
COPYING_THREADS = 2


def figures(sampling: Sampling, contenders: Sequence[Contender]) -> Iterator[Figure | str]:
    """Measure one after the other; text is a remark, such as that a library is not installed."""
    for ranks, aim_ns in LATENCY_AIMS_NS.items():
        [row] = measure_cases([_case(ranks, 8)], sampling, _ONE)
        yield _ours(f"all_reduce/8/{ranks}", f"8 B, {ranks} ranks", row, aim_ns)
    for ranks in (2, 4):
        yield from _beside_copies(ranks, 64 * MIB, sampling)
    for contest in CONTESTS:
        yield from _held(contest, sampling, contenders)


def _beside_copies(ranks: int, nbytes: int, sampling: Sampling) -> Iterator[Figure]:
    """Measure all-reduces, and after each as many bytes read and written by copies: the input of every rank."""
    for place, in_place in (("into other arrays", False), ("in place", True)):
        name, text = (
            f"all_reduce/{nbytes}/{ranks}/{'in' if in_place else 'out'}",
            f"{format_bytes(nbytes)}, {ranks} ranks",
        )
        [row] = measure_cases([_case(ranks, nbytes, in_place=in_place)], sampling, _ONE)
        ours = _ours(name, f"{text}, {place}", row)
        copies = copy_times(ranks * nbytes, sampling)
        yield ours
        text = f"  as fast as {COPYING_THREADS} threads copy as much ({format_ns(copies.median_ns)})"
        yield as_fast_as(f"{name}/copies", text, copies, ours.times, COPIES_AIM)


def copy_times(nbytes: int, sampling: Sampling) -> Times:
    """Measure copies of `nbytes` from one place to another, each thread its share."""
    pairs = [np.ones((2, nbytes // COPYING_THREADS), np.uint8) for _ in range(COPYING_THREADS)]
    samples = []
    with ThreadPoolExecutor(COPYING_THREADS) as pool:
        for _ in range(sampling.warmup + sampling.iters):
            begun_ns = perf_counter_ns()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            samples.append(perf_counter_ns() - begun_ns)
    return Times.of_samples(samples[sampling.warmup :])


def _held(contest: Contest, sampling: Sampling, contenders: Sequence[Contender]) -> Iterator[Figure | str]:
    """Measure ours, then each library, never two at a time."""
    cases = contest.cases()
    sizes = [case.size_bytes for case in cases]
    rows = measure_cases(cases, sampling, contest.layout)
    ours = [_ours(contest.name(size), contest.describe(size), row) for size, row in zip(sizes, rows, strict=True)]
    yield from ours
    for contender in contenders:
        if not any(contender.name in aims for aims in contest.aims.values()):
            continue
        try:
            result = measure_contender(contender, AssignmentInTurn(cases=cases, sampling=sampling))
        except ContenderUnavailableError as missing:
            yield str(missing)
            continue
        for index, size in enumerate(sizes):
            yield _theirs(contest, size, result, index, ours[index])


def _case(ranks: int, nbytes: int, *, in_place: bool = True) -> Case:
    return Case(
        operation=NAMES["all_reduce"], ranks=ranks, count=nbytes // 4, dtype=np.dtype(np.float32), in_place=in_place
    )


def _ours(name: str, described: str, row: Result, aim_ns: float | None = None) -> Figure:
    return time_of(name, f"all_reduce, {described}", row.times, aim_ns, wrong=row.wrong or 0)


def _theirs(contest: Contest, size_bytes: int, result: ContenderResult, index: int, ours: Figure) -> Figure:
    times, aim = result.times[index], contest.aims[size_bytes].get(result.name)
    text = f"  {contest.describe(size_bytes)}: as fast as {result.name} ({format_ns(times.median_ns)})"
    return as_fast_as(f"{ours.name}/{result.name}", text, times, ours.times, aim, wrong=result.wrong[index])
