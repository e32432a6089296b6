"""The machine of a trace, as the planner models it; and operations that become another algorithm on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topology import TopologyError
from topology import cluster as machine_called

from ...collectives.generators import GENERATORS
from ...cost.select import DIRECT, Plan, plan
from ...errors import ScheduleError, UsageError
from ..span import CollectiveInfo
from ..spans import Timeline
from .graph import Graph
from .transfers import take_turns, transfers_by_stream


@dataclass(frozen=True, slots=True)
class OperationPrice:
    """Price of an operation: alone, and behind another of its stream, where only its own bytes count."""

    alone_s: float
    behind_s: float


def is_known(name: str, world_size: int) -> bool:
    """Whether a machine of that name has room for so many ranks."""
    try:
        machine_called(name, ranks=world_size)
    except TopologyError:
        return False
    return True


class ReplayMachine:
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
            raise UsageError("the trace does not say on what machine it was recorded; record it with --cluster")
        try:
            self._cluster = machine_called(name, ranks=world_size)
        except TopologyError as error:
            raise UsageError(f"the machine of the trace is not known here: {error}") from error
        self._peer_direct = meta.get("peer direct") != "no"
        self._prices: dict[tuple[object, ...], OperationPrice | None] = {}

    def price(self, info: CollectiveInfo, algorithm: str | None, *, nbytes: int | None = None) -> OperationPrice | None:
        """Return the price of an operation by algorithm, or the best one, and bytes; None if it cannot be planned."""
        size = info.nbytes if nbytes is None else nbytes
        key = info.op, size, info.dtype, info.ranks, algorithm
        if key not in self._prices:
            found = self.plan_operation(info, algorithm, nbytes=size)
            self._prices[key] = None if found is None else _price_plan(found)
        return self._prices[key]

    @property
    def memory_ns_per_byte(self) -> float:
        """The time of a byte of a rank's memory; 0 where no figure is known."""
        rate = self._cluster.rank_memory_bytes_per_s()
        return 1e9 / rate if rate else 0.0

    def chooses(self, info: CollectiveInfo) -> bool:
        """Whether the algorithm of a recorded operation is the cheapest one on this machine."""
        best = self.plan_operation(info, None)
        return best is not None and best.algorithm == info.algorithm

    def plan_operation(self, info: CollectiveInfo, algorithm: str | None, *, nbytes: int | None = None) -> Plan | None:
        """Return the plan of an operation, with an algorithm or the best one; None if there is none."""
        size = info.nbytes if nbytes is None else nbytes
        if not info.ranks or (algorithm is not None and algorithm not in (DIRECT, *GENERATORS[info.op])):
            return None
        try:
            return plan(
                info.op, size, self._cluster, info.ranks, dtype=info.dtype or "uint8", algorithm=algorithm,
                peer_direct=self._peer_direct,
            )  # fmt: skip
        except (ScheduleError, TopologyError, UsageError):
            return None


def _price_plan(cheapest: Plan) -> OperationPrice | None:
    """Return the price of a plan: behind another operation, only its busiest wire counts; None if it uses no wire."""
    busy_s = max(cheapest.breakdown.wire_s, cheapest.busiest.busy_s if cheapest.busiest else 0.0)
    return OperationPrice(cheapest.predicted_s, min(busy_s, cheapest.predicted_s)) if busy_s else None


def use_algorithm(graph: Graph, algorithm: str) -> None:
    """Let every operation become an algorithm, wherever it exists.

    The measured time of a transfer is scaled by the prices of the two algorithms on the machine (`overlap plan`):
    alone, and behind another of its stream, when only wires count. Other causes of slowness stay in the time.

    Raises:
        UsageError: The machine is not known, or no operation could become the algorithm.
    """
    machine = ReplayMachine(graph.meta, graph.world_size)
    streams = transfers_by_stream(graph, GENERATORS)
    if not streams:
        raise UsageError(f"there are no operations that could become {algorithm!r}; leave this change out")
    unseen = take_turns(graph, streams)
    changed, supported = False, set[str]()
    for node in (node for nodes in streams.values() for node in nodes):
        info = node.info
        assert info is not None
        supported.add(info.algorithm)
        now, then = machine.price(info, info.algorithm), machine.price(info, algorithm)
        if info.algorithm == algorithm or now is None or then is None:
            continue
        behind_ns = node.work_ns * now.behind_s / now.alone_s if node in unseen else node.work_ns - node.hidden_ns
        node.work_ns *= then.alone_s / now.alone_s
        node.hidden_ns = max(node.work_ns - behind_ns * then.behind_s / now.behind_s, 0.0)
        changed = True
    if not changed:
        names = ", ".join(map(repr, sorted(supported)))
        raise UsageError(f"no operation could become {algorithm!r}; those recorded are {names}; leave this change out")


def best_algorithm(timeline: Timeline) -> str | None:
    """Return the cheapest algorithm for the operation that moved bytes longest; None if it had that algorithm."""
    longest: dict[tuple[str, int, tuple[int, ...], str], tuple[int, CollectiveInfo]] = {}
    for span in timeline.spans:
        if span.info is not None and span.info.op in GENERATORS and span.info.algorithm:
            info = span.info
            key = info.op, info.nbytes, info.ranks, info.algorithm
            longest[key] = longest.get(key, (0, info))[0] + info.transfer_ns, info
    if not longest:
        return None
    _, info = max(longest.values(), key=lambda each: each[0])
    try:
        best = ReplayMachine(timeline.meta, timeline.world_size).plan_operation(info, None)
    except UsageError:
        return None
    return None if best is None or best.algorithm == info.algorithm else best.algorithm
