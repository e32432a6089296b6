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
from ..why.verdict import LITTLE, OFTEN
from .copies import boundaries, pack, update_together
from .graph import Graph, Node, input_of, release
from .machine import ReplayMachine
from .transfers import Fit, fits, kind_of, most_at_once, nbytes_of, streams_of, take_turns, window_ns

_Alike: TypeAlias = tuple[int, int | None, str]  # rank, step and name of computes
_Step: TypeAlias = tuple[int, int | None]  # of a rank
_Prices: TypeAlias = Callable[[int], tuple[float, float]]  # from bytes to work, and what of it another may hide


def rebucket(graph: Graph, nbytes: int) -> None:
    """Cut the all-reduces of each step, group and stream into buckets of `nbytes`, in the order in which they began.

    A bucket travels once all gradients in it exist; a gradient is there when the last bucket with a part of it is. The
    bytes of one all-reduce are taken to come evenly from the computes of one name since the all-reduce before it.

    Where `overlap.parallel` makes the buckets, gradients are not cut, and those that share a bucket are packed.

    Raises:
        UsageError: If there are no all-reduces.
    """
    take_turns(graph, streams_of(graph, ("all_reduce",)))
    fitting = fits(graph)
    series = series_of(graph)
    if not series:
        raise UsageError("there are no all-reduces that could be buckets; leave this change out")
    ours = {key: boundaries(graph, nodes, nbytes) for key, nodes in series.items()}
    bounds = {key: ours[key] or _even(nodes, nbytes) for key, nodes in series.items()}
    series = {key: nodes for key, nodes in series.items() if bounds[key] != _ends_now(nodes)}
    if not series:
        raise UsageError("the all-reduces are buckets of that size already; try another size")
    gone: set[Node] = set()
    joined: list[Node] = []
    ends: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "end":
            ends.setdefault(node.after[0][0], []).append(node)
    makers = _Makers(graph)
    cut: dict[_Step, tuple[int, int]] = {}
    computes = graph.computes()
    for of_series, nodes in series.items():
        shared, step = _shared_out(nodes, bounds[of_series]), nodes[0].span.step
        if ours[of_series] is not None:
            pack(graph, shared)
        if ours[of_series] is not None and step is not None:
            for rank in nodes[0].ranks:
                there = [[end for node in each for end in ends[node] if end.ranks == (rank,)] for each in shared]
                update_together(computes.get((rank, step + 1), ()), there)
        buckets = _cut(nodes, bounds[of_series], _prices(graph, nodes, fitting[kind_of(nodes[0])]), ends, makers)
        for rank in nodes[0].ranks:
            of = rank, nodes[0].span.step
            before, after = cut.get(of, (0, 0))
            cut[of] = before + len(nodes), after + len(buckets)
        joined += buckets
        gone.update(nodes)
    _issue_less(graph, gone, cut)
    graph.recut = True
    graph.nodes = [node for node in graph.nodes if node not in gone] + joined


def series_of(graph: Graph) -> dict[tuple[object, ...], list[Node]]:
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
        (*key, number): sorted(nodes, key=lambda node: (window_ns(node)[0], nbytes_of(node)))
        for key, every in series.items()
        for number, nodes in enumerate(_of_lines(every))
    }


def _of_lines(nodes: Sequence[Node]) -> list[list[Node]]:
    """Part operations by the lines that issue them, except lines with several operations under way at one time."""
    beside: dict[str, set[str]] = {}  # by line, all that belong with it
    until: dict[str, int] = {}  # by line, when the last of its operations so far has ended
    for node in sorted(nodes, key=_issued_ns):
        line = _line(node)
        lines = beside.setdefault(line, {line})
        for other, end_ns in until.items():
            if end_ns > _issued_ns(node) and other not in lines:
                lines |= beside[other]
                beside.update(dict.fromkeys(lines, lines))
        until[line] = max(until.get(line, 0), window_ns(node)[1])
    parts: dict[int, list[Node]] = {}
    for node in nodes:
        parts.setdefault(id(beside[_line(node)]), []).append(node)
    return list(parts.values())


def _line(node: Node) -> str:
    return node.info.call_site if node.info else ""


def _issued_ns(node: Node) -> int:
    return min(span.start_ns for span in node.spans)


def _even(nodes: Sequence[Node], nbytes: int) -> list[int]:
    """Return where buckets of exactly `nbytes` end that carry the bytes of some operations, from their begin."""
    total = sum(map(nbytes_of, nodes))
    return [*range(nbytes, total, nbytes), total]


def _ends_now(nodes: Sequence[Node]) -> list[int]:
    return [*accumulate(map(nbytes_of, nodes))]


def _issue_less(graph: Graph, gone: Collection[Node], cut: Mapping[_Step, tuple[int, int]]) -> None:
    """Shorten the time that programs spend on many small operations, by as much as there are fewer of them.

    That is the time in which the lines of the operations kept an event loop, and the time that passes before each
    operation, and before each compute that every operation has: those called at least as often in the step. The time
    that such computes take themselves stays, for they have as much to do in fewer calls.

    Args:
        graph: Holds all nodes.
        gone: The operations before they were cut anew.
        cut: How many of them a rank had in a step, and how many it has now.
    """
    sizes: dict[_Step, list[int]] = {}
    for node in gone:
        for rank in node.ranks:
            sizes.setdefault((rank, node.span.step), []).append(nbytes_of(node))
    shares = {
        step: after / before
        for step, (before, after) in cut.items()
        if before >= OFTEN and after < before and sum(sizes[step]) < LITTLE * before
    }
    sources: list[Node] = [
        arrival for node in gone for arrival, _ in node.after
        if arrival.kind == "arrival" and _step_of(arrival) in shares
    ]  # fmt: skip
    for step, computes in graph.computes().items():
        if step in shares:
            often = Counter(node.span.name for node in computes)
            sources += [node for node in computes if often[node.span.name] >= cut[step][0]]
    issues = {node.after[0][0]: shares[_step_of(node)] for node in sources}
    places = {
        site: shares[_step_of(node)]
        for node in sources
        if (site := node.info.call_site if node.info else node.span.call_site)
    }
    for node in sources:
        _hasten(node, shares[_step_of(node)])
    for issue, share in issues.items():
        if any(before in issues for before, _ in issue.after):
            _hasten(issue, share)
    for loop in graph.kept_loops():
        loop.work_ns *= places.get(loop.span.name, 1.0)


def _step_of(node: Node) -> _Step:
    return node.ranks[0], node.span.step


def _hasten(node: Node, share: float) -> None:
    node.after = [(before, delay_ns * share) for before, delay_ns in node.after]


def least_bytes(graph: Graph) -> int:
    """Return the bytes of the largest gradient, as far as a run shows it: no bucket can be smaller.

    Gradients that came from several computes are several. What came from one compute, or from the program, may be one
    array.
    """
    makers, least = _Makers(graph), 0
    transfers = [node for node in graph.nodes if node.kind == "transfer" and node.info]
    for node in sorted(transfers, key=window_ns):
        if node.info and node.info.op == "all_reduce":
            arrival = next(each for each, _ in node.after if each.kind == "arrival")
            least = max(least, nbytes_of(node) // len(makers.of(arrival)))
    return least


def _prices(graph: Graph, nodes: Sequence[Node], fit: Fit) -> _Prices:
    """Return the prices of buckets: fitted to several measured sizes, or from the model of the machine."""
    info, hidden_share = nodes[0].info, _share(nodes)
    with suppress(UsageError):
        machine = ReplayMachine(graph.meta, graph.world_size)
        if fit.sizes == 1 and graph.latency_share is None and info and (seen := machine.taken(info, None)):
            alone_ns = fit.work_ns(info.nbytes)
            alone = _repriced(seen.alone_s, alone_ns, info.nbytes)
            behind = _repriced(seen.behind_s, (1 - hidden_share) * alone_ns, info.nbytes)
            if graph.virtual and machine.chooses(info):
                alone = behind = _in_ns  # the model's own: most transfers of a stream show what they took behind others
            graph.modelled = True

            def modelled(nbytes: int) -> tuple[float, float]:
                told = machine.taken(info, None, nbytes=nbytes) or seen
                work_ns = alone(told.alone_s)
                return work_ns, max(work_ns - behind(told.behind_s), 0.0)

            return modelled
    return lambda nbytes: (fit.work_ns(nbytes), hidden_share * fit.work_ns(nbytes))


def _repriced(planned_s: float, measured_ns: float, nbytes: int) -> Callable[[float], float]:
    """Return the function from a planned time to one as in this run, where one size took longer or less than planned.

    Small operations take the same excess at any size; longer ones as many times their plan.
    """
    beyond_ns = measured_ns - planned_s * 1e9
    if nbytes < LITTLE and beyond_ns > 0:
        return lambda seconds: seconds * 1e9 + beyond_ns
    return lambda seconds: seconds * measured_ns / planned_s


def _in_ns(seconds: float) -> float:
    return seconds * 1e9


def _share(nodes: Sequence[Node]) -> float:
    return sum(node.hidden_ns for node in nodes) / max(sum(node.work_ns for node in nodes), 1.0)


def _shared_out(nodes: Sequence[Node], bounds: Sequence[int]) -> list[list[Node]]:
    """Return the operations that end in each bucket."""
    shared: list[list[Node]] = [[] for _ in bounds]
    for node, end in zip(nodes, _ends_now(nodes), strict=True):
        shared[bisect_left(bounds, end)].append(node)
    return shared


def _cut(
    nodes: Sequence[Node], bounds: Sequence[int], prices: _Prices, ends: Mapping[Node, Sequence[Node]], makers: _Makers
) -> list[Node]:
    buckets = []
    for start, stop in pairwise((0, *bounds)):
        work_ns, hidden_ns = prices(stop - start)
        buckets.append(Node("transfer", work_ns, nodes[0].ranks, hidden_ns=hidden_ns))
        buckets[-1].lane = nodes[0].lane
    for bucket, before in zip(buckets[max(DEFAULT_WINDOW, most_at_once(nodes)) :], buckets, strict=False):
        bucket.after.append((before, 0))
    offset = 0
    for node in nodes:
        first, final = bisect_right(bounds, offset), bisect_left(bounds, offset + nbytes_of(node))
        sources = [makers.of(each) if each.kind == "arrival" else [each] for each, _ in node.after]
        for arrival, _ in node.after:
            release(arrival)  # or a bucket could wait for its own end
        for number in range(first, final + 1):
            buckets[number].spans += node.spans
            buckets[number].urgency = (*node.urgency, number)  # its last gradient's
            share = min((bounds[number] - offset) / max(nbytes_of(node), 1), 1.0)
            whole = number == final
            buckets[number].after += node.after if whole else [(by[ceil(share * len(by)) - 1], 0.0) for by in sources]
        offset += nbytes_of(node)
        for end in ends.get(node, ()):
            end.after[0] = (buckets[final], end.after[0][1])
    return buckets


class _Makers:
    """Finds the computes that have made the bytes of an all-reduce."""

    def __init__(self, graph: Graph) -> None:
        self._alike: dict[_Alike, list[Node]] = {}  # the computes of a rank, step and name
        self._places: dict[Node, int] = {}  # of each among those that are alike
        self._used: dict[_Alike, int] = {}  # how many of them made what earlier all-reduces carry
        for (rank, step), nodes in graph.computes().items():
            for node in nodes:
                alike = self._alike.setdefault((rank, step, node.span.name), [])
                self._places[node] = len(alike)
                alike.append(node)

    def of(self, arrival: Node) -> list[Node]:
        """Return the computes of an all-reduce on one rank, in their order; the arrival itself if none show."""
        last = input_of(arrival)
        if last is None:
            return [arrival]
        of = last.ranks[0], last.span.step, last.span.name
        first, until = self._used.get(of, 0), self._places[last] + 1
        self._used[of] = until
        return self._alike[of][first:until] or [arrival]
