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
from .option import AlgorithmOption, Price, Rejected

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
# Parts of other ranks that are read or added one by one: (ranks, pairs). The smallest sums have a path of their own.
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
# Bytes that a rank gives to other processes, over the bytes of the whole vector, by ranks; and bytes that a rank with a
# result reads and writes for it, if inputs are in memory that all map. The system reads other inputs, and reads and
# writes each part before it is added.
_GIVEN: Mapping[str, Callable[[int], float]] = {"all_gather": lambda p: 1 / p, "gather": lambda p: 1 / p}
_TAKEN: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: p + 1,
    "reduce_scatter": lambda p: (p + 1) / p,
    "reduce": lambda p: p + 1,
    "scatter": lambda p: 2 / p,
}
_ADDED: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 7 * (p - 1) / p,  # its own slice, and then the other ranks' slices
    "reduce_scatter": lambda p: 5 * (p - 1) / p,
    "reduce": lambda p: 5 * (p - 1),
}
# Limits of native/collectives.c and of transports: bytes on the board, mapped, sliced, in threads.
_ON_BOARD_BYTES, _MAPPED_BYTES, _SLICED_BYTES, _INLINE_BYTES = 4 << 10, 1 << 20, 64 << 10, 1 << 20


def _share(figures: Mapping[str, Callable[[int], float]], name: str, ranks: int, otherwise: float) -> float:
    return figures[name](ranks) if name in figures else otherwise


def _per_byte(figure: Figure | None) -> float:
    return 1 / figure.value if figure else 0.0


class _MemoryRates:
    """Time of reads and writes: by one processor, and by threads on all of them."""

    def __init__(self, overheads: Overheads) -> None:
        self._slow = _per_byte(overheads.memory_bytes_per_s)
        cached = (
            (overheads.cached_bytes.value, _per_byte(overheads.cached_bytes_per_s))
            if overheads.cached_bytes
            else (0.0, 0.0)
        )
        spread = (
            (overheads.spread_bytes.value, _per_byte(overheads.spread_bytes_per_s))
            if overheads.spread_bytes
            else cached
        )
        self._caches = cached if overheads.cached_bytes_per_s else (0.0, 0.0), spread
        self._handing_s = overheads.handing_s.value if overheads.handing_s else 0.0

    def time_s(self, touched: float, *, threads: bool) -> float:
        """Return the time of reads and writes, including the hand-over to threads."""
        cached, per_byte_s = self._caches[threads]
        near = min(touched, cached)
        return near * per_byte_s + (touched - near) * self._slow + (self._handing_s if threads else 0.0)

    def alone_s(self, touched: float, *, handed: bool) -> float:
        """Return the time of one thread, with the hand-over of the work if `handed`."""
        return self.time_s(touched, threads=False) + (self._handing_s if handed else 0.0)


class _Cut(AlgorithmOption):
    """An option without messages and without a table."""

    tabled = False
    algorithm: str = "direct"
    detail: str = ""
    parts: tuple[()] = ()

    def price(self, nbytes: float, *, below_s: float = inf) -> Price:
        """Return the cost for a vector of `nbytes`."""
        return Price(total_s=self._meet_s(nbytes) + self._memory_s(nbytes))

    def breakdown(self, nbytes: float, slices: int) -> CostBreakdown:
        """Return the terms of the time."""
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
        """Return the time without bytes."""

    @abstractmethod
    def _memory_s(self, nbytes: float) -> float:
        """Return the time of the bytes."""

    def schedule(self, slices: int = 1) -> Schedule:
        """Refuse: there are no transfers.

        Raises:
            ScheduleError: Always.
        """
        raise ScheduleError(
            "the short cut through shared memory has no table of transfers; plan with programs_only=True"
        )


class ShortCut(_Cut):
    """Short cut inside a process: meet once; then every input is read and every output written once."""

    def __init__(self, request: PlanRequest) -> None:
        overheads = request.geometry.cluster.machine.collectives.usual
        p, pairs, name = request.geometry.size, len(request.pairs), request.collective
        piece_s = overheads.piece_s.value if overheads.piece_s else 0.0
        meeting_s = overheads.meeting_s.value * p if overheads.meeting_s else 0.0
        self._meeting_s = meeting_s + _PIECES[name](p, pairs) * piece_s
        self._touches, self._ranks, self._memory = _TOUCHES[name](p, pairs), p, _MemoryRates(overheads)
        self._inline_bytes = overheads.inline_bytes.value if overheads.inline_bytes else inf
        self._copies_s = (p - 1) * _per_byte(overheads.copied_bytes_per_s) if name == "all_reduce" else 0.0

    def _meet_s(self, nbytes: float) -> float:
        return self._meeting_s

    def _memory_s(self, nbytes: float) -> float:
        threads = nbytes * self._ranks > self._inline_bytes
        return self._memory.time_s(self._touches * nbytes, threads=threads) + self._copies_s * nbytes


class HostCut(_Cut):
    """Short cut between processes of one host: arrive, read the inputs, and report; each rank on its own."""

    detail = "processes of one host"

    def __init__(self, request: PlanRequest, overheads: Overheads) -> None:
        self._name, self._ranks, self._memory = request.collective, request.geometry.size, _MemoryRates(overheads)
        self._meeting_s, self._phase_s = (
            figure.value if figure else 0.0 for figure in (overheads.meeting_s, overheads.phase_s)
        )
        self._crowd = max(1.0, self._ranks / overheads.cores.value) if overheads.cores else 1.0

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
        why = "a single rank meets no other"
    elif len(g.nodes) > 1:
        if between is not None and between.shared_memory:
            return [HostCut(request, between)], []
        why = "its nodes share no memory"
    return ([ShortCut(request)], []) if why is None else ([], [Rejected(algorithm="direct", why=why)])
