"""What may be different in a replay, as users write it: `bandwidth=2x`, `bucket_bytes=4MiB`, `compute 'x'=0.5x`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from ...cost.select import check_algorithm
from ...errors import UsageError
from ...units import format_bytes, parse_bytes
from ..span import Span
from .buckets import rebucket
from .graph import Graph, Node
from .machine import use_algorithm
from .streams import change_window, forward_first, part_streams
from .transfers import Fit, fits, kind_of

_FACTOR = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)x")
_COMPUTE = re.compile(r"compute(?:\s+'([^']*)'|\s+\"([^\"]*)\")?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that is different."""

    text: str  # As a user would write it
    what: str  # In words
    # Changes a graph; raises `UsageError` if there is nothing in it that it could change.
    apply: Callable[[Graph], None]


def parse_change(text: str) -> Change:
    """Read a change.

    Raises:
        UsageError: If it is none, listing what there is.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    compute = _COMPUTE.fullmatch(name)
    if equals and compute:
        return _compute(text, compute[1] or compute[2], _factor(text, value))
    if equals and name in _FACTORS:
        return _FACTORS[name](text, _factor(text, value))
    if equals and name == "bucket_bytes":
        return _buckets(text, parse_bytes(value, argument="--what-if: bucket_bytes"))
    if equals and name == "algorithm":
        return _algorithm(text, value)
    if equals and name == "window":
        return _window(text, value)
    if equals and name == "ranks":
        return _ranks(text, value)
    if (name, value) in _FIXED:
        what, apply = _FIXED[name, value]
        return Change(text=text, what=what, apply=lambda graph: apply(graph, text))
    raise UsageError(
        f"--what-if: {text!r} names nothing that can change; write bandwidth=2x, latency=0.5x, bytes=0.5x, "
        "compute=0.5x, compute 'NAME'=0.5x, bucket_bytes=4MiB, order=forward, algorithm=ring, ranks=64, "
        "stragglers=none, awaits=late, streams=apart, or window=4"
    )


def _factor(text: str, value: str) -> float:
    match = _FACTOR.fullmatch(value)
    if match is None:
        raise UsageError(f"--what-if: {text!r}: {value!r} is not a factor; write a number and x, as in 2x or 0.5x")
    return float(match[1])


# -- computes ------------------------------------------------------------------------------------------------------


def _computes(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.kind == "compute"]


def _compute(text: str, name: str | None, factor: float) -> Change:
    def apply(graph: Graph) -> None:
        chosen = [node for node in _computes(graph) if name is None or node.spans[0].name == name]
        if not chosen:
            known = sorted({node.spans[0].name for node in _computes(graph)})
            told = f"; there are {', '.join(map(repr, known[:8]))}" if known else ""
            raise UsageError(f"--what-if: {text!r}: no compute is called {name!r}{told}")
        for node in chosen:
            node.work_ns *= factor

    what = "all computes" if name is None else f"compute '{name}'"
    return Change(text=text, what=f"{what} take {factor:g} times as long", apply=apply)


def _even(graph: Graph, text: str) -> None:
    """Let no compute take longer than the same one does on half of the ranks; what those do not have takes nothing."""
    ranks = {node.ranks[0] for node in _computes(graph)}
    same: dict[tuple[object, ...], list[Node]] = {}
    numbers: dict[tuple[object, ...], int] = {}
    for node in sorted(_computes(graph), key=lambda node: node.spans[0].start_ns):
        of = _identity(node.spans[0])
        number = numbers[node.ranks[0], of] = numbers.get((node.ranks[0], of), -1) + 1
        same.setdefault((of, number), []).append(node)
    for nodes in same.values():
        works = [node.work_ns for node in nodes] + [0.0] * (len(ranks) - len(nodes))
        middle = median(works)
        for node in nodes:
            node.work_ns = min(node.work_ns, middle)


def _identity(span: Span) -> tuple[object, ...]:
    return span.name, span.call_site, span.lane, span.step


# -- programs ------------------------------------------------------------------------------------------------------


def _late(graph: Graph, text: str) -> None:
    """Let programs await communication at the end of a step only; computes still wait for what they need."""
    step_ends = {end for _, end, _ in graph.steps}
    for node in graph.nodes:
        if node.kind == "program" and node not in step_ends:
            node.after = [(each, delay) for each, delay in node.after if each.kind != "end"]
    ends: dict[tuple[int, int | None], list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "end":
            ends.setdefault((node.ranks[0], node.spans[0].step), []).append(node)
    for _, end, span in graph.steps:
        end.after += [(node, 0) for node in ends.get((span.rank, span.step), ())]


# -- wires ---------------------------------------------------------------------------------------------------------


def _transfers(graph: Graph) -> list[tuple[Node, Fit]]:
    found = fits(graph)
    transfers = [(node, found[kind_of(node)]) for node in graph.nodes if node.kind == "transfer"]
    if not transfers:
        raise UsageError("--what-if: there is no communication that it could change")
    return transfers


def _bandwidth(text: str, factor: float) -> Change:
    if not factor:
        raise UsageError(f"--what-if: {text!r}: nothing travels at 0 times the speed")
    what = f"wires carry {factor:g} times as much"
    return Change(text=text, what=what, apply=lambda graph: _scale(graph, latency=1.0, size=1 / factor))


def _bytes(text: str, factor: float) -> Change:
    what = f"operations carry {factor:g} times the bytes"
    return Change(text=text, what=what, apply=lambda graph: _scale(graph, latency=1.0, size=factor))


def _latency(text: str, factor: float) -> Change:
    what = f"what does not depend on the size takes {factor:g} times as long"
    return Change(text=text, what=what, apply=lambda graph: _scale(graph, latency=factor, size=1.0))


def _scale(graph: Graph, *, latency: float, size: float) -> None:
    for node, fit in _transfers(graph):
        latency_ns = min(fit.latency_ns, node.work_ns)
        node.work_ns = latency_ns * latency + (node.work_ns - latency_ns) * size


def _ranks(text: str, value: str) -> Change:
    if not value.isdecimal() or int(value) < 2:
        raise UsageError(f"--what-if: {text!r}: {value!r} is not a number of ranks from 2 on")
    wanted = int(value)

    def apply(graph: Graph) -> None:
        world = len({rank for node in graph.nodes for rank in node.ranks})
        for node, fit in _transfers(graph):
            here = len(node.ranks)
            if here != world or here < 2:
                continue  # a group of its own, such as tensor parallel ranks, stays as it is
            latency_ns = min(fit.latency_ns, node.work_ns)
            bytes_ratio = ((wanted - 1) / wanted) / ((here - 1) / here)
            node.work_ns = latency_ns * (wanted - 1) / (here - 1) + (node.work_ns - latency_ns) * bytes_ratio

    what = f"{wanted} ranks, each with as much to compute, joined in a ring of the same wires"
    return Change(text=text, what=what, apply=apply)


def _window(text: str, value: str) -> Change:
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"--what-if: {text!r}: {value!r} is not a number of operations from 1 on")
    what = f"streams work on {value} operations at once"
    return Change(text=text, what=what, apply=lambda graph: change_window(graph, int(value), text))


def _algorithm(text: str, algorithm: str) -> Change:
    check_algorithm(algorithm)
    what = f"every operation becomes {algorithm} where that exists"
    return Change(text=text, what=what, apply=lambda graph: use_algorithm(graph, algorithm, text))


def _buckets(text: str, nbytes: int) -> Change:
    if nbytes < 1:
        raise UsageError(f"--what-if: {text!r}: a bucket holds at least a byte")
    what = f"all-reduces of {format_bytes(nbytes)} in the order of the gradients"
    return Change(text=text, what=what, apply=lambda graph: rebucket(graph, nbytes, text))


_FACTORS: dict[str, Callable[[str, float], Change]] = {"bandwidth": _bandwidth, "bytes": _bytes, "latency": _latency}
_FIXED: dict[tuple[str, str], tuple[str, Callable[[Graph, str], None]]] = {
    ("stragglers", "none"): ("no rank computes longer than half of them do", _even),
    ("order", "forward"): ("gradients overtake those that the next forward pass needs later", forward_first),
    ("streams", "apart"): ("the operations of each line have a stream of their own", part_streams),
    ("awaits", "late"): ("programs await communication at the end of the step only", _late),
}


def applied(graph: Graph, changes: Iterable[Change]) -> None:
    """Change a graph in all these ways, one after the other."""
    for change in changes:
        change.apply(graph)
