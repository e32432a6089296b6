"""Buckets of another size: the bytes of a step's all-reduces, cut in other places."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from math import ceil
from typing import TypeAlias

from ...defaults import DEFAULT_WINDOW
from ...errors import UsageError
from ..why.verdict import MANY_STEP_CALLS, SMALL_CALL_BYTES
from .copies import add_packing, boundaries, update_together
from .graph import Graph, Node, input_compute, release_window_wait
from .machine import ReplayMachine
from .transfers import (
    Fit,
    fit_transfers,
    most_at_once,
    take_turns,
    transfer_bytes,
    transfer_kind,
    transfers_by_stream,
    window_ns,
)

_ComputeKind: TypeAlias = tuple[int, int | None, str]  # rank, step and name of computes
_RankStep: TypeAlias = tuple[int, int | None]  # of a rank
_Prices: TypeAlias = Callable[[int], tuple[float, float]]  # from bytes to work, and what of it another may hide


def rebucket(graph: Graph, nbytes: int) -> None:
    """Cut the all-reduces of each step, group and stream into buckets of `nbytes`, in the order in which they began.

    A bucket travels once all gradients in it exist; a gradient is there when the last bucket with a part of it is. The
    bytes of one all-reduce are taken to come evenly from the computes of one name since the all-reduce before it.

    Where `overlap.parallel` makes the buckets, gradients are not cut, and those that share a bucket are packed.

    Raises:
        UsageError: If there are no all-reduces.
    """
    take_turns(graph, transfers_by_stream(graph, ("all_reduce",)))
    fitting = fit_transfers(graph)
    series = bucket_series(graph)
    if not series:
        raise UsageError("there are no all-reduces that could be buckets; leave this change out")
    library_bounds = {key: boundaries(graph, nodes, nbytes) for key, nodes in series.items()}
    bounds = {key: library_bounds[key] or _even_ends(nodes, nbytes) for key, nodes in series.items()}
    series = {key: nodes for key, nodes in series.items() if bounds[key] != _current_ends(nodes)}
    if not series:
        raise UsageError("the all-reduces are buckets of that size already; try another size")
    old_transfers: set[Node] = set()
    new_transfers: list[Node] = []
    ends: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "end":
            ends.setdefault(node.after[0][0], []).append(node)
    makers = _GradientComputes(graph)
    counts: dict[_RankStep, tuple[int, int]] = {}
    computes = graph.computes()
    for series_key, nodes in series.items():
        by_bucket, step = _by_bucket(nodes, bounds[series_key]), nodes[0].span.step
        if library_bounds[series_key] is not None:
            add_packing(graph, by_bucket)
        if library_bounds[series_key] is not None and step is not None:
            for rank in nodes[0].ranks:
                bucket_ends = [
                    [end for node in bucket for end in ends[node] if end.ranks == (rank,)] for bucket in by_bucket
                ]
                update_together(computes.get((rank, step + 1), ()), bucket_ends)
        buckets = _cut_buckets(
            nodes, bounds[series_key], _bucket_prices(graph, nodes, fitting[transfer_kind(nodes[0])]), ends, makers
        )
        for rank in nodes[0].ranks:
            key = rank, nodes[0].span.step
            before, after = counts.get(key, (0, 0))
            counts[key] = before + len(nodes), after + len(buckets)
        new_transfers += buckets
        old_transfers.update(nodes)
    _shorten_issues(graph, old_transfers, counts)
    graph.recut = True
    graph.nodes = [node for node in graph.nodes if node not in old_transfers] + new_transfers


def bucket_series(graph: Graph) -> dict[tuple[object, ...], list[Node]]:
    """Return the all-reduces that could share buckets, in order: of a step, group, stream and dtype.

    Those of two lines can if one of them begins before one of the other has ended. A loss that is summed once the
    gradients have come is no gradient.
    """
    series: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        info = node.info if node.kind == "transfer" else None
        if info is not None and info.op == "all_reduce" and info.nbytes:
            key = node.span.step, info.group, node.ranks, node.span.lane, info.dtype
            series.setdefault(key, []).append(node)
    return {
        (*key, number): sorted(nodes, key=lambda node: (window_ns(node)[0], transfer_bytes(node)))
        for key, every in series.items()
        for number, nodes in enumerate(_separate_lines(every))
    }


def _separate_lines(nodes: Sequence[Node]) -> list[list[Node]]:
    """Divide operations by the line that issues them; lines whose operations overlap in time stay together."""
    related_lines: dict[str, set[str]] = {}  # by line, all that belong with it
    until: dict[str, int] = {}  # by line, when the last of its operations so far has ended
    for node in sorted(nodes, key=_issued_ns):
        line = _call_site(node)
        lines = related_lines.setdefault(line, {line})
        for other, end_ns in until.items():
            if end_ns > _issued_ns(node) and other not in lines:
                lines |= related_lines[other]
                related_lines.update(dict.fromkeys(lines, lines))
        until[line] = max(until.get(line, 0), window_ns(node)[1])
    parts: dict[int, list[Node]] = {}
    for node in nodes:
        parts.setdefault(id(related_lines[_call_site(node)]), []).append(node)
    return list(parts.values())


def _call_site(node: Node) -> str:
    return node.info.call_site if node.info else ""


def _issued_ns(node: Node) -> int:
    """Return when the first rank issued an operation."""
    return min(span.start_ns for span in node.spans)


def _even_ends(nodes: Sequence[Node], nbytes: int) -> list[int]:
    """Return the offsets at which buckets of `nbytes` end that carry the bytes of some operations."""
    total = sum(map(transfer_bytes, nodes))
    return [*range(nbytes, total, nbytes), total]


def _current_ends(nodes: Sequence[Node]) -> list[int]:
    """Return the offsets at which the operations end if each is a bucket of its own, as now."""
    return [*accumulate(map(transfer_bytes, nodes))]


def _shorten_issues(graph: Graph, old_transfers: Collection[Node], counts: Mapping[_RankStep, tuple[int, int]]) -> None:
    """Shorten the time that programs spend on many small operations, as far as there are fewer of them.

    That is the time in which the lines of the operations kept an event loop, and the time that passes before each
    operation, and before each compute that every operation has: those called at least as often in the step. The time
    that such computes take themselves stays, for they have as much to do in fewer calls.

    Args:
        graph: Holds all nodes.
        old_transfers: The operations before they were cut.
        counts: Number of operations of a rank in a step, before and now.
    """
    sizes: dict[_RankStep, list[int]] = {}
    for node in old_transfers:
        for rank in node.ranks:
            sizes.setdefault((rank, node.span.step), []).append(transfer_bytes(node))
    shares = {
        step: after / before
        for step, (before, after) in counts.items()
        if before >= MANY_STEP_CALLS and after < before and sum(sizes[step]) < SMALL_CALL_BYTES * before
    }
    sources: list[Node] = [
        arrival for node in old_transfers for arrival, _ in node.after
        if arrival.kind == "arrival" and _rank_step(arrival) in shares
    ]  # fmt: skip
    for step, computes in graph.computes().items():
        if step in shares:
            often = Counter(node.span.name for node in computes)
            sources += [node for node in computes if often[node.span.name] >= counts[step][0]]
    issues = {node.after[0][0]: shares[_rank_step(node)] for node in sources}
    places = {
        site: shares[_rank_step(node)]
        for node in sources
        if (site := node.info.call_site if node.info else node.span.call_site)
    }
    for node in sources:
        _scale_delays(node, shares[_rank_step(node)])
    for issue, share in issues.items():
        if any(before in issues for before, _ in issue.after):
            _scale_delays(issue, share)
    for loop in graph.kept_loops():
        loop.work_ns *= places.get(loop.span.name, 1.0)


def _rank_step(node: Node) -> _RankStep:
    return node.ranks[0], node.span.step


def _scale_delays(node: Node, share: float) -> None:
    """Multiply the delays after all waits of a node by a factor."""
    node.after = [(before, delay_ns * share) for before, delay_ns in node.after]


def least_bytes(graph: Graph) -> int:
    """Return the bytes of the largest gradient that a run shows: no bucket can be smaller; 0 without all-reduces.

    Gradients that came from several computes are several. What came from one compute, or from the program, may be one
    array.
    """
    makers, least = _GradientComputes(graph), 0
    transfers = [node for node in graph.nodes if node.kind == "transfer" and node.info]
    for node in sorted(transfers, key=window_ns):
        if node.info and node.info.op == "all_reduce":
            arrival = next(each for each, _ in node.after if each.kind == "arrival")
            least = max(least, transfer_bytes(node) // len(makers.take(arrival)))
    return least


def _bucket_prices(graph: Graph, nodes: Sequence[Node], fit: Fit) -> _Prices:
    """Return the function from bytes to a bucket's work: fitted to measured sizes, or by the model of the machine."""
    info, hidden_share = nodes[0].info, _hidden_share(nodes)
    with suppress(UsageError):
        machine = ReplayMachine(graph.meta, graph.world_size)
        if fit.sizes == 1 and graph.latency_share is None and info and (recorded_price := machine.price(info, None)):
            alone_ns = fit.work_ns(info.nbytes)
            alone_price = _rescaled_price(recorded_price.alone_s, alone_ns, info.nbytes)
            behind_price = _rescaled_price(recorded_price.behind_s, (1 - hidden_share) * alone_ns, info.nbytes)
            if graph.virtual and machine.chooses(info):
                alone_price = behind_price = (
                    _seconds_to_ns  # the model's own: most transfers of a stream show what they took behind others
                )
            graph.modelled = True

            def modelled_price(nbytes: int) -> tuple[float, float]:
                """Return a bucket's work, and the part of it that another may hide, in nanoseconds by the model."""
                planned = machine.price(info, None, nbytes=nbytes) or recorded_price
                work_ns = alone_price(planned.alone_s)
                return work_ns, max(work_ns - behind_price(planned.behind_s), 0.0)

            return modelled_price
    return lambda nbytes: (fit.work_ns(nbytes), hidden_share * fit.work_ns(nbytes))


def _rescaled_price(planned_s: float, measured_ns: float, nbytes: int) -> Callable[[float], float]:
    """Return the function from planned seconds to nanoseconds as in this run, from the measured time of one size.

    Small operations take the same excess at any size; longer ones as many times their plan.
    """
    beyond_ns = measured_ns - planned_s * 1e9
    if nbytes < SMALL_CALL_BYTES and beyond_ns > 0:
        return lambda seconds: seconds * 1e9 + beyond_ns
    return lambda seconds: seconds * measured_ns / planned_s


def _seconds_to_ns(seconds: float) -> float:
    return seconds * 1e9


def _hidden_share(nodes: Sequence[Node]) -> float:
    """Return the part of the work of some transfers that others hide, from 0 to 1."""
    return sum(node.hidden_ns for node in nodes) / max(sum(node.work_ns for node in nodes), 1.0)


def _by_bucket(nodes: Sequence[Node], bounds: Sequence[int]) -> list[list[Node]]:
    """Return, for each bucket, the operations whose last byte is in it."""
    shared: list[list[Node]] = [[] for _ in bounds]
    for node, end in zip(nodes, _current_ends(nodes), strict=True):
        shared[bisect_left(bounds, end)].append(node)
    return shared


def _cut_buckets(
    nodes: Sequence[Node],
    bounds: Sequence[int],
    prices: _Prices,
    ends: Mapping[Node, Sequence[Node]],
    makers: _GradientComputes,
) -> list[Node]:
    """Return the transfers of new buckets: each waits for the gradients in it, and an operation ends with its last."""
    buckets = []
    for start, stop in pairwise((0, *bounds)):
        work_ns, hidden_ns = prices(stop - start)
        buckets.append(Node("transfer", work_ns, nodes[0].ranks, hidden_ns=hidden_ns))
        buckets[-1].lane = nodes[0].lane
    for bucket, before in zip(buckets[max(DEFAULT_WINDOW, most_at_once(nodes)) :], buckets, strict=False):
        bucket.after.append((before, 0))
    offset = 0
    for node in nodes:
        first, final = bisect_right(bounds, offset), bisect_left(bounds, offset + transfer_bytes(node))
        sources = [makers.take(each) if each.kind == "arrival" else [each] for each, _ in node.after]
        for arrival, _ in node.after:
            release_window_wait(arrival)  # or a bucket could wait for its own end
        for number in range(first, final + 1):
            buckets[number].spans += node.spans
            buckets[number].urgency = (*node.urgency, number)  # its last gradient's
            share = min((bounds[number] - offset) / max(transfer_bytes(node), 1), 1.0)
            whole = number == final
            buckets[number].after += node.after if whole else [(by[ceil(share * len(by)) - 1], 0.0) for by in sources]
        offset += transfer_bytes(node)
        for end in ends.get(node, ()):
            end.after[0] = (buckets[final], end.after[0][1])
    return buckets


class _GradientComputes:
    """Finds the computes that made the bytes of an all-reduce: those since the all-reduce before."""

    def __init__(self, graph: Graph) -> None:
        self._by_kind: dict[_ComputeKind, list[Node]] = {}  # the computes of a rank, step and name
        self._positions: dict[Node, int] = {}  # of each among those that are alike
        self._used_counts: dict[_ComputeKind, int] = {}  # how many of them made what earlier all-reduces carry
        for (rank, step), nodes in graph.computes().items():
            for node in nodes:
                alike = self._by_kind.setdefault((rank, step, node.span.name), [])
                self._positions[node] = len(alike)
                alike.append(node)

    def take(self, arrival: Node) -> list[Node]:
        """Return the computes since the last call that made an all-reduce's bytes on a rank, or else the arrival."""
        last = input_compute(arrival)
        if last is None:
            return [arrival]
        key = last.ranks[0], last.span.step, last.span.name
        first, until = self._used_counts.get(key, 0), self._positions[last] + 1
        self._used_counts[key] = until
        return self._by_kind[key][first:until] or [arrival]
