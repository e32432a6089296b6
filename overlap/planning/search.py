"""Search for the best layout: simulates only layouts that could win, and says why it leaves out the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from time import perf_counter
from typing import cast

from topology import Cluster, TopologyError

from .. import Virtual
from ..errors import OverlapError, UsageError
from ..parallel.schedules import FAMILIES
from .bound import bound_s
from .device import Device
from .estimates import Estimate, estimate
from .layout import CHECKPOINTING, ORDERS, Layout
from .memory import memory_of
from .model import Model

_BUCKET_SIZES_BYTES = (25 << 20, 128 << 20, 512 << 20)  # bytes: torch's default, ours, and about all of a stage

FREE: Mapping[str, Callable[[int], Sequence[object]]] = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep"), lambda ranks: _divisors(ranks)),
    "micro_batch": lambda ranks: (1, 2, 4, 8),
    "bucket_bytes": lambda ranks: _BUCKET_SIZES_BYTES,
    "order": lambda ranks: ORDERS,
    "schedule": lambda ranks: [name for name, of in FAMILIES.items() if of.chunks == 1 and name != "gpipe"],
    "zero": lambda ranks: (0, 1, 2, 3),
    "checkpointing": lambda ranks: CHECKPOINTING,
}
"""Figures that can be searched for, with the values to try on a number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that fits model, cluster and memory, with a lower bound of its step."""

    layout: Layout  # The layout
    bound_s: float  # Lower bound of its step, in seconds
    near: bool = False  # Whether that bound includes collectives


@dataclass(slots=True, kw_only=True)
class SearchResult:
    """Results of a search, complete at every moment, also after an interrupt or at the end of its time."""

    tried: int = 0  # Number of layouts
    best: Estimate | None = None  # The one with the shortest step
    simulated: list[tuple[Layout, float]] = field(default_factory=list)  # Steps in seconds, of all that were simulated
    # Layouts that were not simulated, by reason.
    left_out: dict[str, list[Layout]] = field(default_factory=dict)
    complete: bool = False  # Whether the search has ended
    bound_s: float = 0.0  # Least bound of the layouts that no time was left for, in seconds; 0: none

    def leave_out(self, layout: Layout, why: str) -> None:
        """Note a layout that is not simulated, with the reason."""
        self.left_out.setdefault(why, []).append(layout)


OUT_OF_MEMORY = "out of memory"
CANNOT_WIN = "at least as slow as the best, by a lower bound"
NO_TIME = "no time was left to simulate them"
FAR = "tp: ranks of several scale-up domains; --tp N insists"
"""Reason to leave out layouts whose tensor parallel ranks would exchange every layer's sums over the network."""


def candidates(
    model: Model,
    like: Layout,
    names: Sequence[str],
    cluster: Cluster,
    virtual: Virtual,
    result: SearchResult,
    *,
    device: Device | None = None,
) -> list[Candidate]:
    """Return the layouts that fit model, cluster and memory, sorted by their lower bounds.

    Args:
        model: The trained model.
        like: Figures that are not searched for.
        names: Figures to search for, some of `FREE`.
        cluster: The machines.
        virtual: The assumptions.
        result: Takes the layouts that are left out, and why.
        device: Measured rates of computes, as in `estimate`.

    Raises:
        UsageError: If a name cannot be searched for.
    """
    fits: list[tuple[float, int, Layout]] = []
    available = cluster.memory_bytes()
    domain = cluster.servers * cluster.ranks_per_node  # joined by wires faster than the network
    for number, layout in enumerate(_searched_layouts(like, names, cluster, result)):
        if "tp" in names and layout.tp > domain:
            result.leave_out(layout, FAR)
            continue
        try:
            layout.check(model)
            if available is not None and memory_of(model, layout).total > available:
                result.leave_out(layout, OUT_OF_MEMORY)
                continue
            fits.append((bound_s(model, layout, cluster, virtual, planned=False, device=device), number, layout))
        except (UsageError, TopologyError) as error:
            result.leave_out(layout, _summarize_error(error))
    return [Candidate(layout=layout, bound_s=at_least_s) for at_least_s, _, layout in sorted(fits, key=lambda k: k[:2])]


def _searched_layouts(like: Layout, names: Sequence[str], cluster: Cluster, result: SearchResult) -> Iterator[Layout]:
    """Yield the layouts that use every rank, of all values of the searched figures; equal orders come once."""
    for name in names:
        if name not in FREE:
            raise UsageError(f"--search: {name!r} cannot be searched for; known are {', '.join(FREE)}")
    ranks, tried = cluster.world_size, set()
    for values in product(*(FREE[name](ranks) for name in names)):
        figures = dict(zip(names, values, strict=True))
        tp, pp, cp, dp = (cast(int, figures.get(name, getattr(like, name))) for name in ("tp", "pp", "cp", "dp"))
        if tp * pp * cp * dp != ranks:
            continue
        blocks = {"pp": pp, "tp": tp, "dp": dp * cp}
        order = str(figures.get("order", like.order))
        split_axes = tuple(block for block in order.split(".") if blocks[block] > 1)
        key = tuple(value for name, value in figures.items() if name != "order"), split_axes
        if key in tried:
            continue
        tried.add(key)
        result.tried += 1
        try:
            yield replace(like, **figures)  # type: ignore[arg-type]
        except UsageError as error:
            result.leave_out(like, _summarize_error(error))


def search(
    model: Model,
    ordered: Sequence[Candidate],
    cluster: Cluster,
    virtual: Virtual,
    result: SearchResult,
    *,
    algorithm: str | None = None,
    on_candidate: Callable[[int, Candidate], None] = lambda number, candidate: None,
    device: Device | None = None,
    within_s: float = inf,
    clock: Callable[[], float] = perf_counter,
) -> None:
    """Simulate candidates in the order of their bounds, until no remaining one can win.

    The first candidate gets a nearer bound and returns to the queue; a first candidate with a near bound is simulated.

    Args:
        model: The trained model.
        ordered: As `candidates` returns them.
        cluster: The machines.
        virtual: The assumptions.
        result: Takes the results, each as soon as it is known.
        algorithm: The only algorithm to use; by default any.
        on_candidate: Called before each simulation.
        device: Measured rates of computes, as in `estimate`.
        within_s: Seconds after which no further simulation begins, and neither does one that would end after them if
            it took as long as the longest so far. The first one is made in any case.
        clock: Clock, in seconds.
    """
    begun_s, longest_s = clock(), 0.0
    waiting = [(candidate.bound_s, number, candidate) for number, candidate in enumerate(ordered)]
    heapify(waiting)
    while waiting and (result.best is None or waiting[0][0] < result.best.step_s):
        _, number, first = heappop(waiting)
        try:
            if not first.near:
                nearer_s = max(first.bound_s, bound_s(model, first.layout, cluster, virtual, device=device))
                heappush(waiting, (nearer_s, number, replace(first, bound_s=nearer_s, near=True)))
                continue
            if result.best is not None and clock() + longest_s > begun_s + within_s:
                heappush(waiting, (first.bound_s, number, first))
                break
            on_candidate(len(result.simulated), first)
            started_s = clock()
            step = estimate(model, first.layout, cluster, virtual, algorithm=algorithm, device=device)
            longest_s = max(longest_s, clock() - started_s)
        except (OverlapError, TopologyError) as error:
            result.leave_out(first.layout, _summarize_error(error))
            continue
        result.simulated.append((first.layout, step.step_s))
        if result.best is None or step.step_s < result.best.step_s:
            result.best = step
    could_win = [candidate for candidate in waiting if result.best is None or candidate[0] < result.best.step_s]
    result.bound_s = min((bound for bound, _, _ in could_win), default=0.0)
    for bound, _, rest in waiting:
        result.leave_out(rest.layout, NO_TIME if result.best is None or bound < result.best.step_s else CANNOT_WIN)
    result.complete = not could_win


def _summarize_error(error: Exception) -> str:
    """Return the violated rule, or the figure and the expectation, without the value: the same for like mistakes."""
    rule = re.search(r"rule ([\w-]+)", str(error)) if isinstance(error, TopologyError) else None
    if rule is not None:
        return f"illegal groups, by rule {rule[1]}"
    return re.split(r", got |; got | \(", str(error))[0]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]
