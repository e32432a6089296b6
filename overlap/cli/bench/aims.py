"""Every speed that the project aims at, measured: `overlap bench all`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...units import format_bytes, format_ns
from .costs import COSTS, Cost
from .layout import Layout
from .measure import Measurement
from .nodes import measure_rows
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """An all-reduce in place on our ranks, and right after them on those of peers.

    Attributes:
        ranks: Size of the world; a peer has a process for each.
        layout: Where ours are.
        aims: For each size in bytes, how many times as fast as each peer, at least.
    """

    ranks: int
    layout: Layout
    aims: Mapping[int, Mapping[str, float]]

    def cases(self) -> list[Case]:
        """Return the rows."""
        return [_case(self.ranks, nbytes) for nbytes in self.aims]

    def describe(self, nbytes: int) -> str:
        """Say what is reduced between whom."""
        if self.layout.nodes == 1:
            return f"{format_bytes(nbytes)}, {self.ranks} ranks"
        wires = "TCP" if self.layout.tcp else "Unix"
        each = self.ranks // self.layout.nodes
        return f"{format_bytes(nbytes)}, {self.layout.nodes} nodes x {each}, {wires}"

    def name(self, nbytes: int) -> str:
        """Return a stable name."""
        name = f"all_reduce/{nbytes}/{self.ranks}"
        return name if self.layout.nodes == 1 else f"{name}/{self.layout.nodes}_{'tcp' if self.layout.tcp else 'unix'}"


_ONE, _TWO, _TWO_TCP = Layout(), Layout(nodes=2), Layout(nodes=2, tcp=True)

CONTESTS = (
    Contest(ranks=2, layout=_ONE, aims={MIB: {"gloo": 5.0, "mpi": 1.0}, 64 * MIB: {"gloo": 5.0, "mpi": 3.0}}),
    Contest(ranks=4, layout=_ONE, aims={64 * MIB: {"gloo": 5.0, "mpi": 3.0}}),
    Contest(ranks=2, layout=_TWO, aims={8: {"gloo": 2.0}, 64 * MIB: {"gloo": 1.7}}),
    Contest(ranks=2, layout=_TWO_TCP, aims={64 * MIB: {"gloo": 1.2}}),
    Contest(ranks=4, layout=_TWO, aims={64 * MIB: {"gloo": 2.0}}),
)

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
        [row] = measure_rows([_case(ranks, 8)], sampling, Layout())
        yield _measured(f"all_reduce/8/{ranks}", f"8 B, {ranks} ranks", row, aim_ns)
    for contest in CONTESTS:
        yield from _held(contest, sampling, peers)


def cost_figure(cost: Cost, sampling: Sampling) -> Figure:
    """Measure one cost of the library."""
    return _ours(cost.name, cost.text, cost.measure(sampling), COST_AIMS_NS[cost.name])


def _held(contest: Contest, sampling: Sampling, peers: Sequence[Peer]) -> Iterator[Figure | str]:
    """Measure ours, then each peer, never two at a time."""
    cases = contest.cases()
    ours = [
        _measured(contest.name(row.case.size_bytes), contest.describe(row.case.size_bytes), row, None)
        for row in measure_rows(cases, sampling, contest.layout)
    ]
    yield from ours
    for peer in peers:
        if not any(peer.name in aims for aims in contest.aims.values()):
            continue
        try:
            result = measure_peer(peer, Spec.of(cases, sampling))
        except PeerUnavailableError as missing:
            yield str(missing)
            continue
        for index, case in enumerate(cases):
            yield _peer_figure(contest, case, result, index, ours[index])


def _case(ranks: int, nbytes: int) -> Case:
    return Case(
        operation=NAMES["all_reduce"], ranks=ranks, count=nbytes // 4, dtype=np.dtype(np.float32), in_place=True
    )


def _measured(name: str, described: str, row: Measurement, aim_ns: float | None) -> Figure:
    return replace(_ours(name, f"all_reduce, {described}", row.times, aim_ns), wrong=row.wrong or 0)


def _ours(name: str, text: str, times: Times, aim_ns: float | None) -> Figure:
    return Figure(name=name, text=text, value=times.median_ns, unit="ns", aim=aim_ns, times=times)


def _peer_figure(contest: Contest, case: Case, result: PeerResult, index: int, ours: Figure) -> Figure:
    times, nbytes = result.times[index], case.size_bytes
    return Figure(
        name=f"{ours.name}/{result.name}",
        text=f"  {contest.describe(nbytes)}: as fast as {result.name} ({format_ns(times.median_ns)})",
        value=ratio(times, ours.times),
        unit="ratio",
        aim=contest.aims[nbytes].get(result.name),
        times=times,
        wrong=result.wrong[index],
    )


# -- text --------------------------------------------------------------------------------------------------------

_WIDTH = 56

HEADING = f"{'# figure':<{_WIDTH}}{'median':>9}  {'p10 - p90':<19}{'aim':<10}".rstrip()


def line(figure: Figure) -> str:
    """Write one line of the table."""
    if figure.unit == "ratio":
        shown, spread = f"{figure.value:.2f}x", ""
        aim = "" if figure.aim is None else f">= {figure.aim:.3g}x"
    else:
        shown = format_ns(figure.value)
        spread = f"{format_ns(figure.times.p10_ns)} - {format_ns(figure.times.p90_ns)}"
        aim = "" if figure.aim is None else f"<= {format_ns(figure.aim)}"
    told = {None: "", True: "met", False: "missed"}[figure.met]
    return f"{figure.text:<{_WIDTH}}{shown:>9}  {spread:<19}{aim:<10} {told}".rstrip()


def verdict(told: Sequence[Figure]) -> str:
    """Write the last line."""
    judged = [figure.met for figure in told if figure.met is not None]
    return f"# {sum(judged)} of {len(judged)} aims met"
