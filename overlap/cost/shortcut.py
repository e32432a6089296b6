"""Short cut through shared memory, without messages: in one process, or between processes of one host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from topology import Figure
from topology.figures import Overheads
from transports.common import PAYLOAD_BYTES

from ..defaults import COPIED_BYTES, SLICED_BYTES
from .flat import PlanRequest
from .option import Formula, FormulaTerms, Rejected

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


def _bytes_ratio(figures: Mapping[str, Callable[[int], float]], name: str, ranks: int, otherwise: float) -> float:
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
        self.handing_s = overheads.handing_s.value if overheads.handing_s else 0.0

    def time_s(self, touched: float, *, threads: bool) -> float:
        """Return the time of reads and writes, including the hand-over to threads."""
        cached, per_byte_s = self._caches[threads]
        near = min(touched, cached)
        return near * per_byte_s + (touched - near) * self._slow + (self.handing_s if threads else 0.0)


# Bytes of a vector from which the hand-over of its work to a thread counts.
_HANDED_BYTES = 1 << 20
_REFUSAL = "the short cut through shared memory has no table of transfers; plan with programs_only=True"


def _within_a_process(request: PlanRequest) -> Formula:
    """Return the option of ranks of one process: meet once; then every input is read and every output written once."""
    overheads = request.geometry.cluster.machine.collectives.usual
    p, pairs, name = request.geometry.size, len(request.pairs), request.collective
    piece_s = overheads.piece_s.value if overheads.piece_s else 0.0
    meeting_s = overheads.meeting_s.value * p if overheads.meeting_s else 0.0
    meeting_s += _PIECES[name](p, pairs) * piece_s
    touches, memory = _TOUCHES[name](p, pairs), _MemoryRates(overheads)
    inline_bytes = overheads.inline_bytes.value if overheads.inline_bytes else inf
    copies_s = (p - 1) * _per_byte(overheads.copied_bytes_per_s) if name == "all_reduce" else 0.0

    def terms(nbytes: float) -> FormulaTerms:
        memory_s = memory.time_s(touches * nbytes, threads=nbytes * p > inline_bytes) + copies_s * nbytes
        return FormulaTerms(launch_s=meeting_s, memory_s=memory_s)

    return Formula("direct", "", terms, _REFUSAL)


def _between_processes(request: PlanRequest, overheads: Overheads) -> Formula:
    """Return the option of processes of one host: arrive, read the inputs, and report; each rank on its own."""
    name, p, memory = request.collective, request.geometry.size, _MemoryRates(overheads)
    meeting_s, phase_s = (figure.value if figure else 0.0 for figure in (overheads.meeting_s, overheads.phase_s))
    crowd = max(1.0, p / overheads.cores.value) if overheads.cores else 1.0

    def terms(nbytes: float) -> FormulaTerms:
        """Return the time of meetings, one in each phase, and of reads and writes of memory; crowds slow down both."""
        sliced = name == "all_reduce" and (nbytes > COPIED_BYTES or (p > 2 and nbytes >= SLICED_BYTES))
        phases = 1 if name == "all_reduce" and nbytes <= PAYLOAD_BYTES else 2 + sliced
        given_bytes = _bytes_ratio(_GIVEN, name, p, 1.0) * nbytes
        taken_ratio = _bytes_ratio(_TAKEN, name, p, 2.0)
        if sliced:  # a rank reduces its own slice of all inputs, and then copies the other ranks' slices
            taken_ratio = (p + 1) / p + 2 * (p - 1) / p
        # Long inputs are read where they are; short ones are copied into shared memory first: a read and a write.
        touched = 2 * given_bytes + taken_ratio * nbytes
        if given_bytes > COPIED_BYTES:
            touched = _bytes_ratio(_ADDED, name, p, taken_ratio) * nbytes
        memory_s = memory.time_s(touched, threads=False) + (memory.handing_s if nbytes > _HANDED_BYTES else 0.0)
        return FormulaTerms(launch_s=crowd * (meeting_s + phases * phase_s), memory_s=crowd * memory_s)

    return Formula("direct", "processes of one host", terms, _REFUSAL)


def short_cut_options(request: PlanRequest) -> tuple[list[Formula], list[Rejected]]:
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
            return [_between_processes(request, between)], []
        why = "its nodes share no memory"
    return ([_within_a_process(request)], []) if why is None else ([], [Rejected(algorithm="direct", why=why)])
