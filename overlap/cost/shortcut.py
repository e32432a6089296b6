"""Short cut through shared memory, without messages: in one process, or between processes of one host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from math import inf

from topology import Figure
from topology.figures import Overheads

from ..collectives.schedule import Schedule
from ..errors import ScheduleError
from .flat import PlanRequest
from .maxplus import CostBreakdown
from .option import Option, Price, Rejected

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
# Parts of other ranks that are read or added one by one: (ranks, pairs). The smallest sums have a way of their own.
_PIECES: Mapping[str, Callable[[int, int], int]] = {
    "all_reduce": lambda p, _: 0,
    "reduce_scatter": lambda p, _: p * (p - 1),
    "all_gather": lambda p, _: p * p,
    "all_to_all": lambda p, _: p * p,
    "broadcast": lambda p, _: p,
    "reduce": lambda p, _: p - 1,
    "gather": lambda p, _: p,
    "scatter": lambda p, _: p,
    "permute": lambda _, pairs: pairs,
}
# What a rank between processes gives the others, over the bytes of the whole vector, by ranks; and what one that gets a
# result reads and writes for it, where inputs lie in memory that all map. Others are read by the system, which reads
# and writes each part before it is added.
_GIVEN: Mapping[str, Callable[[int], float]] = {"all_gather": lambda p: 1 / p, "gather": lambda p: 1 / p}
_TAKEN: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: p + 1,
    "reduce_scatter": lambda p: (p + 1) / p,
    "reduce": lambda p: p + 1,
    "scatter": lambda p: 2 / p,
}
_ADDED: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 7 * (p - 1) / p,  # a slice, and then the slices of the others
    "reduce_scatter": lambda p: 5 * (p - 1) / p,
    "reduce": lambda p: 5 * (p - 1),
}
# Of native/collectives.c of shared memory, and of transports: what is on the board, mapped, divided, handed to threads.
_ON_BOARD_BYTES, _MAPPED_BYTES, _SLICED_BYTES, _INLINE_BYTES = 4 << 10, 1 << 20, 64 << 10, 1 << 20


def _share(of: Mapping[str, Callable[[int], float]], name: str, ranks: int, otherwise: float) -> float:
    return of[name](ranks) if name in of else otherwise


def _per_byte(figure: Figure | None) -> float:
    return 1 / figure.value if figure else 0.0


class _Memory:
    """Time of reads and writes: by one processor, and by threads on all of them."""

    def __init__(self, told: Overheads) -> None:
        self._slow = _per_byte(told.memory_bytes_per_s)
        cached = (told.cached_bytes.value, _per_byte(told.cached_bytes_per_s)) if told.cached_bytes else (0.0, 0.0)
        spread = (told.spread_bytes.value, _per_byte(told.spread_bytes_per_s)) if told.spread_bytes else cached
        self._caches = cached if told.cached_bytes_per_s else (0.0, 0.0), spread
        self._handing_s = told.handing_s.value if told.handing_s else 0.0

    def time_s(self, touched: float, *, threads: bool) -> float:
        """Return the time of reads and writes, including the hand-over to threads."""
        most, per_byte_s = self._caches[threads]
        near = min(touched, most)
        return near * per_byte_s + (touched - near) * self._slow + (self._handing_s if threads else 0.0)

    def alone_s(self, touched: float, *, handed: bool) -> float:
        """Return the time of one thread, to which the work may have been handed over."""
        return self.time_s(touched, threads=False) + (self._handing_s if handed else 0.0)


class _Cut(Option):
    """No message, no table."""

    tabled = False
    algorithm: str = "direct"
    detail: str = ""
    parts: tuple[()] = ()

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`."""
        return Price(total_s=self._meet_s(nbytes) + self._memory_s(nbytes))

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return where the time goes."""
        return CostBreakdown(
            waiting_s=0.0,
            launch_s=self._meet_s(nbytes),
            start_s=0.0,
            latency_s=0.0,
            wire_s=0.0,
            memory_s=self._memory_s(nbytes),
            reduction_s=0.0,
        )

    @abstractmethod
    def _meet_s(self, nbytes: float) -> float:
        """Return how long it takes without bytes."""

    @abstractmethod
    def _memory_s(self, nbytes: float) -> float:
        """Return how long bytes take."""

    def schedule(self, slices: int = 1) -> Schedule:
        """Refuse: there are no transfers.

        Raises:
            ScheduleError: Always.
        """
        raise ScheduleError("the short cut through shared memory has no table of transfers")


class ShortCut(_Cut):
    """Inside a process: meet once; then every input is read and every output written once."""

    def __init__(self, request: PlanRequest) -> None:
        told = request.geometry.cluster.machine.collectives.usual
        p, pairs, name = request.geometry.size, len(request.pairs), request.collective
        piece_s = told.piece_s.value if told.piece_s else 0.0
        meeting_s = told.meeting_s.value * p if told.meeting_s else 0.0
        self._meeting_s = meeting_s + _PIECES[name](p, pairs) * piece_s
        self._touches, self._ranks, self._memory = _TOUCHES[name](p, pairs), p, _Memory(told)
        self._inline_bytes = told.inline_bytes.value if told.inline_bytes else inf
        self._copies_s = (p - 1) * _per_byte(told.copied_bytes_per_s) if name == "all_reduce" else 0.0

    def _meet_s(self, nbytes: float) -> float:
        return self._meeting_s

    def _memory_s(self, nbytes: float) -> float:
        threads = nbytes * self._ranks > self._inline_bytes
        return self._memory.time_s(self._touches * nbytes, threads=threads) + self._copies_s * nbytes


class HostCut(_Cut):
    """Between processes of one host: arrive, take what is needed, and tell the others; each rank on its own."""

    detail = "processes of one host"

    def __init__(self, request: PlanRequest, told: Overheads) -> None:
        self._name, self._ranks, self._memory = request.collective, request.geometry.size, _Memory(told)
        self._meeting_s, self._phase_s = (figure.value if figure else 0.0 for figure in (told.meeting_s, told.phase_s))
        self._crowd = max(1.0, self._ranks / told.cores.value) if told.cores else 1.0

    def _meet_s(self, nbytes: float) -> float:
        if self._name != "all_reduce":
            phases = 2
        elif nbytes <= _ON_BOARD_BYTES:
            phases = 1
        else:
            phases = 2 + self._sliced(nbytes)
        return self._crowd * (self._meeting_s + phases * self._phase_s)

    def _sliced(self, nbytes: float) -> bool:
        return nbytes > _MAPPED_BYTES or (self._ranks > 2 and nbytes >= _SLICED_BYTES)

    def _memory_s(self, nbytes: float) -> float:
        p, name = self._ranks, self._name
        given, taken = _share(_GIVEN, name, p, 1.0) * nbytes, _share(_TAKEN, name, p, 2.0)
        if name == "all_reduce" and self._sliced(nbytes):
            taken = (p + 1) / p + 2 * (p - 1) / p
        private = given > _MAPPED_BYTES
        touched = _share(_ADDED, name, p, taken) * nbytes if private else 2 * given + taken * nbytes
        return self._crowd * self._memory.alone_s(touched, handed=nbytes > _INLINE_BYTES)


def short_cut_options(request: PlanRequest) -> tuple[list[_Cut], list[Rejected]]:
    """Return the short cut where all ranks of a group share memory, or why it does not apply."""
    g, why = request.geometry, None
    between = g.cluster.machine.collectives.between_nodes
    if not request.considers("direct"):
        return [], []
    if g.cluster.machine.devices is not None:
        why = "it is for ranks of one process, which share all memory"
    elif g.size < 2:
        why = "a rank alone meets nobody"
    elif len(g.nodes) > 1:
        if between is not None and between.shared_memory:
            return [HostCut(request, between)], []
        why = "its nodes share no memory"
    return ([ShortCut(request)], []) if why is None else ([], [Rejected(algorithm="direct", why=why)])
