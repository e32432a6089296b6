"""The short cut: ranks of one process read each other's memory, without messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from ...errors import ScheduleError
from ..schedule import Schedule
from .flat import PlanRequest
from .maxplus import CostBreakdown
from .option import Option, Price, Rejected

__all__ = ["ShortCut", "short_cut_options"]

# All inputs and all outputs, over the bytes of the whole vector: (ranks, pairs of a permute).
_TOUCHES: Mapping[str, Callable[[int, int], int]] = {
    "all_reduce": lambda p, _: 2 * p,
    "reduce_scatter": lambda p, _: p + 1,
    "all_gather": lambda p, _: p + 1,
    "all_to_all": lambda p, _: 2 * p,
    "broadcast": lambda p, _: p + 1,
    "reduce": lambda p, _: p + 1,
    "gather": lambda p, _: 2,
    "scatter": lambda p, _: 2,
    "permute": lambda _, pairs: 2 * pairs,
}


class ShortCut(Option):
    """Meet once; then every input is read and every output written once. No message, no table."""

    algorithm, detail, parts = "direct", "", ()

    def __init__(self, request: PlanRequest) -> None:
        told = request.geometry.cluster.machine.collectives.usual
        self._ranks = request.geometry.size
        self._meeting_s = told.meeting_s.value * self._ranks if told.meeting_s else 0.0
        self._bytes_per_s = told.memory_bytes_per_s.value if told.memory_bytes_per_s else inf
        cached = told.cached_bytes if told.cached_bytes_per_s else None
        self._cached_bytes = cached.value if cached else 0.0
        self._cached_bytes_per_s = told.cached_bytes_per_s.value if told.cached_bytes_per_s else inf
        self._touches = _TOUCHES[request.collective](self._ranks, len(request.pairs))

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`."""
        return Price(total_s=self._meeting_s + self._memory_s(nbytes))

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes."""
        return CostBreakdown(
            waiting_s=0.0,
            launch_s=self._meeting_s,
            start_s=0.0,
            latency_s=0.0,
            wire_s=0.0,
            memory_s=self._memory_s(nbytes),
            reduction_s=0.0,
        )

    def _memory_s(self, nbytes: float) -> float:
        cached = min(self._touches * nbytes, self._cached_bytes)
        return cached / self._cached_bytes_per_s + (self._touches * nbytes - cached) / self._bytes_per_s

    def schedule(self, slices: int = 1) -> Schedule:
        """Refuse: there are no transfers.

        Raises:
            ScheduleError: Always.
        """
        raise ScheduleError("the short cut through shared memory has no table of transfers")


def short_cut_options(request: PlanRequest) -> tuple[list[ShortCut], list[Rejected]]:
    """Return the short cut where all ranks of a group share memory, or why it does not apply."""
    g, why = request.geometry, None
    if not request.considers("direct"):
        return [], []
    if g.cluster.machine.devices is not None:
        why = "it is for ranks of one process, which share all memory"
    elif len(g.nodes) > 1:
        why = "its nodes share no memory"
    elif g.size < 2:
        why = "a rank alone meets nobody"
    return ([ShortCut(request)], []) if why is None else ([], [Rejected(algorithm="direct", why=why)])
