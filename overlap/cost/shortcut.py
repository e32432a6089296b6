"""Short cut through the memory of one process, without messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .clocks import CostBreakdown
from .flat import PlanRequest
from .option import Formula, Rejected

# By collective: function (ranks, pairs of a permute) -> bytes of all inputs and outputs, in bytes of the whole vector.
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
_REFUSAL = "the short cut through shared memory has no table of transfers; plan with programs_only=True"


def short_cut_options(request: PlanRequest) -> tuple[list[Formula], list[Rejected]]:
    """Return the short cut through shared memory as the only option, or the reason why it does not apply.

    It needs a group whose ranks all share memory. Both lists are empty if the request excludes it.
    """
    if not request.considers("direct"):
        return [], []
    g, why = request.geometry, None
    # On a machine with any number of devices, such as "local", a node is a process: its ranks share memory.
    if g.cluster.machine.devices is not None:
        why = "it is for ranks of one process, which share all memory"
    elif g.size < 2:
        why = "a single rank meets no other"
    elif len(g.nodes) > 1:
        why = "its nodes share no memory"
    if why is not None:
        return [], [Rejected(algorithm="direct", why=why)]
    return [_direct_option(request)], []


def _direct_option(request: PlanRequest) -> Formula:
    """Return the option "direct": all ranks meet, then each input is read once and each output written once."""
    overheads, size = request.geometry.cluster.machine.collectives.usual, request.geometry.size
    meeting_s = overheads.meeting_s.value * size if overheads.meeting_s else 0.0
    touches = _TOUCHES[request.collective](size, len(request.pairs))
    s_per_byte = 1 / overheads.memory_bytes_per_s.value if overheads.memory_bytes_per_s else 0.0

    def compute_terms(nbytes: float) -> CostBreakdown:
        return CostBreakdown(launch_s=meeting_s, memory_s=touches * nbytes * s_per_byte)

    return Formula("direct", "", compute_terms, _REFUSAL)
