"""Every speed that the project aims at, measured: `overlap bench all`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...units import format_bytes, format_ns
from .costs import COSTS, Cost
from .measure import measure
from .operations import NAMES, Case
from .peer import Spec
from .peers import Peer, PeerResult, PeerUnavailableError, measure_peer
from .sampling import Sampling, Times
from .table import ratio

__all__ = ["HEADING", "Figure", "cost_figure", "figures", "line", "verdict"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line: a time of ours, or how many times longer a peer takes.

    Attributes:
        name: A stable name.
        text: What it is.
        value: Nanoseconds, or the ratio.
        unit: "ns" or "ratio".
        aim: At most that many nanoseconds, or at least that ratio; None if the line is only for reference.
        times: Where it comes from: ours, or the peer's.
        wrong: Elements that were not as expected.
    """

    name: str
    text: str
    value: float
    unit: str
    aim: float | None
    times: Times
    wrong: int = 0

    @property
    def met(self) -> bool | None:
        """Whether the aim is reached."""
        if self.aim is None:
            return None
        return self.value >= self.aim if self.unit == "ratio" else self.value <= self.aim


BANDWIDTH_AIMS = {  # (ranks, bytes) of an all-reduce in place: how many times as fast as each peer, at least
    (2, MIB): {"gloo": 5.0, "mpi": 1.0},
    (2, 64 * MIB): {"gloo": 5.0, "mpi": 3.0},
    (4, 64 * MIB): {"gloo": 5.0, "mpi": 3.0},
}

LATENCY_AIMS_NS = {2: 30e3, 8: 60e3}  # ranks: 8 bytes, at most

COST_AIMS_NS = {
    "issue": 15e3,
    "span": 1e3,
    "import": 50e6,
    "startup": 0.5e9,
    "run": 1e9,
    "prove": 0.2e9,
    "prove/4096": 3e9,
    "compile": 50e6,
    "cost": 20e6,
    "cost/loads": 100e6,
    "look_up": 5e3,
}


def figures(sampling: Sampling, peers: Sequence[Peer]) -> Iterator[Figure | str]:
    """Measure one after the other; text is a remark, such as that a peer is not installed."""
    for cost in COSTS:
        if cost.in_all:
            yield cost_figure(cost, sampling)
    for ranks, aim_ns in LATENCY_AIMS_NS.items():
        yield _all_reduce(_case(ranks, 8), sampling, aim_ns)
    for ranks in dict.fromkeys(ranks for ranks, _ in BANDWIDTH_AIMS):
        yield from _against(ranks, sampling, peers)


def cost_figure(cost: Cost, sampling: Sampling) -> Figure:
    """Measure one cost of the library."""
    return _ours(cost.name, cost.text, cost.measure(sampling), COST_AIMS_NS[cost.name])


def _against(ranks: int, sampling: Sampling, peers: Sequence[Peer]) -> Iterator[Figure | str]:
    """Measure ours, then each peer, never two at a time."""
    cases = [_case(ranks, nbytes) for size, nbytes in BANDWIDTH_AIMS if size == ranks]
    ours = [_all_reduce(case, sampling, None) for case in cases]
    yield from ours
    for peer in peers:
        try:
            result = measure_peer(peer, Spec.of(cases, sampling))
        except PeerUnavailableError as missing:
            yield str(missing)
            continue
        for index, case in enumerate(cases):
            yield _peer_figure(case, result, index, ours[index])


def _case(ranks: int, nbytes: int) -> Case:
    return Case(
        operation=NAMES["all_reduce"], ranks=ranks, count=nbytes // 4, dtype=np.dtype(np.float32), in_place=True
    )


def _all_reduce(case: Case, sampling: Sampling, aim_ns: float | None) -> Figure:
    measured = measure(case, sampling)
    text = f"all_reduce, {_described(case)}"
    figure = _ours(f"all_reduce/{case.size_bytes}/{case.ranks}", text, measured.times, aim_ns)
    return replace(figure, wrong=measured.wrong or 0)


def _ours(name: str, text: str, times: Times, aim_ns: float | None) -> Figure:
    return Figure(name=name, text=text, value=times.median_ns, unit="ns", aim=aim_ns, times=times)


def _peer_figure(case: Case, result: PeerResult, index: int, ours: Figure) -> Figure:
    times = result.times[index]
    return Figure(
        name=f"{ours.name}/{result.name}",
        text=f"  {_described(case)}: as fast as {result.name} ({format_ns(times.median_ns)})",
        value=ratio(times, ours.times),
        unit="ratio",
        aim=BANDWIDTH_AIMS[case.ranks, case.size_bytes][result.name],
        times=times,
        wrong=result.wrong[index],
    )


def _described(case: Case) -> str:
    return f"{format_bytes(case.size_bytes)}, {case.ranks} ranks"


# -- text --------------------------------------------------------------------------------------------------------

HEADING = f"{'# figure':<44}{'median':>9}  {'p10 - p90':<19}{'aim':<10}".rstrip()


def line(figure: Figure) -> str:
    """Write one line of the table."""
    if figure.unit == "ratio":
        shown, spread = f"{figure.value:.2f}x", ""
        aim = "" if figure.aim is None else f">= {figure.aim:g}x"
    else:
        shown = format_ns(figure.value)
        spread = f"{format_ns(figure.times.p10_ns)} - {format_ns(figure.times.p90_ns)}"
        aim = "" if figure.aim is None else f"<= {format_ns(figure.aim)}"
    told = {None: "", True: "met", False: "missed"}[figure.met]
    return f"{figure.text:<44}{shown:>9}  {spread:<19}{aim:<10} {told}".rstrip()


def verdict(told: Sequence[Figure]) -> str:
    """Write the last line."""
    judged = [figure.met for figure in told if figure.met is not None]
    return f"# {sum(judged)} of {len(judged)} aims met"
