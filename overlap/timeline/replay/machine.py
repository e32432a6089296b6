"""The machine of a trace, as the planner models it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topology import TopologyError
from topology import cluster as machine_called

from ...cost.select import Plan, plan
from ...errors import ScheduleError, UsageError
from ..span import CollectiveInfo


@dataclass(frozen=True, slots=True)
class Taken:
    """Price of an operation: alone, and behind another of its stream, whose bytes hide all but its own bytes."""

    alone_s: float
    behind_s: float


class Machine:
    """The prices of operations on the machine of a trace.

    Args:
        meta: Of the timeline.
        world_size: Its ranks.

    Raises:
        UsageError: If the trace does not say what machine it was, or nobody here knows it.
    """

    def __init__(self, meta: Mapping[str, str], world_size: int) -> None:
        name = meta.get("cluster")
        if name is None:
            raise UsageError("the trace does not say on what machine it was recorded")
        try:
            self._cluster = machine_called(name, ranks=world_size)
        except TopologyError as error:
            raise UsageError(f"the machine of the trace is not known here: {error}") from error
        self._peer_direct = meta.get("peer direct") != "no"
        self._known: dict[tuple[object, ...], Taken | None] = {}

    def taken(self, info: CollectiveInfo, *, nbytes: int | None = None) -> Taken | None:
        """Return the price of an operation of a size; None if there is none."""
        size = info.nbytes if nbytes is None else nbytes
        key = info.op, size, info.dtype, info.ranks
        if key not in self._known:
            found = self._planned(info, size)
            self._known[key] = None if found is None else _taken(found)
        return self._known[key]

    @property
    def memory_ns_per_byte(self) -> float:
        """The time of a byte of a rank's memory; 0 where no figure is known."""
        rate = self._cluster.rank_memory_bytes_per_s()
        return 1e9 / rate if rate else 0.0

    def chooses(self, info: CollectiveInfo) -> bool:
        """Whether an operation had the algorithm that is the best."""
        best = self._planned(info, info.nbytes)
        return best is not None and best.algorithm == info.algorithm

    def _planned(self, info: CollectiveInfo, nbytes: int) -> Plan | None:
        if not info.ranks:
            return None
        try:
            return plan(
                info.op, nbytes, self._cluster, info.ranks, dtype=info.dtype or "uint8", peer_direct=self._peer_direct
            )
        except (ScheduleError, TopologyError, UsageError):
            return None


def _taken(found: Plan) -> Taken | None:
    """Behind another operation only wires count: its own path, or the wire that all operations need most."""
    busy_s = max(found.breakdown.wire_s, found.busiest.busy_s if found.busiest else 0.0)
    return Taken(found.predicted_s, min(busy_s, found.predicted_s)) if busy_s else None
