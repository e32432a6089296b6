"""Copies of gradients that `overlap.parallel` makes, and that a change adds to a run: packed buckets, converted ones.

A gradient that fills a bucket alone is sent from where it is; several are packed first. A hook that narrows a bucket
reads and writes it before it is sent, and once more when it has come. Programs that call all_reduce themselves copy as
they like: nothing is added to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from ...defaults import FIRST_BUCKET_BYTES
from ...errors import UsageError
from .graph import Graph, Node, input_compute
from .machine import ReplayMachine
from .transfers import transfer_bytes

_COPY_PASSES = 2  # A copy reads each byte and writes it


def boundaries(graph: Graph, nodes: Sequence[Node], nbytes: int) -> list[int] | None:
    """Return the offsets at which buckets of `overlap.parallel` end that carry the bytes of some all-reduces.

    A bucket is full with the gradient that makes it `nbytes` or more, and the first one with a MiB: no gradient is cut.

    Returns:
        None where that is unknown: other programs made them, or gradients that share one would have to part.
    """
    each_ns = _ns_per_byte(graph)
    if any(
        not _packing_computes(node) or (transfer_bytes(node) > nbytes and _was_packed(node, each_ns)) for node in nodes
    ):
        return None
    ends, begin, offset = list[int](), 0, 0
    for node in nodes:
        offset += transfer_bytes(node)
        if offset - begin >= (nbytes if ends else min(FIRST_BUCKET_BYTES, nbytes)):
            ends.append(offset)
            begin = offset
    return ends if begin == offset else [*ends, offset]


def add_packing(graph: Graph, buckets: Iterable[Sequence[Node]]) -> None:
    """Let gradients be packed that travelled alone, and now share a bucket: the compute before the last one does it.

    Args:
        graph: Of the run, whose machine says how fast its memory is.
        buckets: The all-reduces that each bucket carries, in order.
    """
    each_ns = _ns_per_byte(graph)
    for nodes in buckets:
        alone = [node for node in nodes if not _was_packed(node, each_ns)] if len(nodes) > 1 else []
        nbytes = sum(map(transfer_bytes, alone))
        for packing in _packing_computes(nodes[-1]):
            packing.work_ns += _COPY_PASSES * nbytes * each_ns


def update_together(computes: Sequence[Node], buckets: Sequence[Sequence[Node]]) -> None:
    """Let one compute update a bucket's parameters once the bucket is there; nothing if their numbers differ.

    Args:
        computes: Of a rank in the step after. Each parameter that travelled alone had an update of its own; forward
            wants them in the opposite order of the gradients.
        buckets: Of each bucket the ends on that rank of the all-reduces that it carries, in order.
    """
    updates = sorted((node for node in computes if node.span.role == "update"), key=lambda node: node.span.start_ns)
    if len(updates) != sum(map(len, buckets)):
        return
    for ends in reversed(buckets):
        together, updates = updates[: len(ends)], updates[len(ends) :]
        for other in together[1:]:
            together[0].work_ns += other.work_ns
            other.work_ns = 0.0
        if len(ends) > 1:
            together[0].after.append((ends[-1], 0.0))


def add_conversions(graph: Graph, nodes: Iterable[Node]) -> None:
    """Add the computes that narrow gradients before they travel, and the delays that widen them afterwards."""
    each_ns, added = _ns_per_byte(graph), dict[Node, float]()
    for node in nodes:
        for packing in _packing_computes(node):
            packing.work_ns += _COPY_PASSES * transfer_bytes(node) * each_ns
            added[node] = _COPY_PASSES * transfer_bytes(node) * each_ns
    for end in graph.nodes:
        if end.kind == "end":
            end.after = [(each, delay_ns + added.get(each, 0.0)) for each, delay_ns in end.after]


def _packing_computes(node: Node) -> list[Node]:
    """Return the computes that packed an all-reduce's bytes, one of each rank; none if the program packed them."""
    inputs = [input_compute(each) for each, _ in node.after if each.kind == "arrival"]
    return [each for each in inputs if each is not None and each.span.role == "pack"]


def _was_packed(node: Node, each_ns: float) -> bool:
    """Whether gradients were copied into the bucket, as their packing computes took at least half a copy's time."""
    return any(
        2 * each.span.duration_ns >= _COPY_PASSES * transfer_bytes(node) * each_ns for each in _packing_computes(node)
    )


def _ns_per_byte(graph: Graph) -> float:
    """Return the nanoseconds that a byte of a rank's memory takes; 0.0 where the machine is unknown."""
    with suppress(UsageError):
        return ReplayMachine(graph.meta, graph.world_size).memory_ns_per_byte
    return 0.0
