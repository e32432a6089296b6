"""Changes that a replay can try, as users write them: `bandwidth=2x`, `bucket_bytes=4MiB`, `compute 'x'=0.5x`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ...cost.select import check_algorithm
from ...errors import UsageError
from ...units import format_bytes, parse_bytes
from .buckets import rebucket
from .copies import add_conversions
from .graph import Graph, Node
from .machine import is_known, use_algorithm
from .simulation import remove_wait
from .streams import change_window, forward_first, part_streams
from .transfers import Fit, fit_transfers, transfer_bytes, transfer_kind
from .updates import hold_ups, issue_late

_FACTOR = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)x")
_LOCAL_MACHINE = "local"
"""The machine of a trace that no model knows: this computer, whatever it is."""
_COMPUTE = re.compile(r"compute(?:\s+'([^']*)'|\s+\"([^\"]*)\")?")

Apply: TypeAlias = Callable[[Graph], None]
"""Changes a graph; raises `UsageError` if there is nothing in it that it could change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between a recorded run and its replay."""

    text: str  # text of the change, as a user writes it
    what: str  # In words
    apply: Apply


def parse_change(text: str) -> Change:
    """Return the change that a text such as `bandwidth=2x` names.

    Raises:
        UsageError: The text is none; the message lists the changes that there are.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    try:
        if equals and (compute := _COMPUTE.fullmatch(name)):
            description, apply = _scale_compute(compute[1] or compute[2], _parse_factor(value))
        elif equals and name in _VALUED:
            description, apply = _VALUED[name](value)
        elif (name, value) in _FIXED:
            description, apply = _FIXED[name, value]
        else:
            raise UsageError(
                "names nothing that can change; write bandwidth=2x, latency=0.5x, bytes=0.5x, compute=0.5x, "
                "compute 'NAME'=0.5x, bucket_bytes=4MiB, order=forward, algorithm=ring, ranks=64, stragglers=none, "
                "awaits=late, updates=late, barriers=none, loop=free, streams=apart, or window=4"
            )
    except UsageError as error:
        raise UsageError(f"--what-if: {text!r}: {error}") from None
    return Change(text=text, what=description, apply=apply)


def apply_changes(graph: Graph, changes: Iterable[Change]) -> None:
    """Change a graph in several ways: first the messages and their order, then the times that they take.

    Raises:
        UsageError: A change, which is named, finds nothing that it could change.
    """
    for change in sorted(changes, key=_change_order):
        try:
            change.apply(graph)
        except UsageError as error:
            raise UsageError(f"--what-if: {change.text!r}: {error}") from error


_FIRST = ("bucket_bytes", "streams", "window", "order", "algorithm")
"""Changes of messages, in the order in which they are made; each of them would undo a factor from before."""


def _change_order(change: Change) -> int:
    """Return the sort key of a change: changes of messages in the order of `_FIRST`, then all others."""
    name = change.text.partition("=")[0].strip()
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


def _parse_factor(value: str) -> float:
    """Return the factor that a text such as "0.5x" names; raise UsageError for other texts."""
    match = _FACTOR.fullmatch(value)
    if match is None:
        raise UsageError(f"{value!r} is not a factor; write a number and x, as in 2x or 0.5x")
    return float(match[1])


def _parse_count(value: str, noun: str, *, least: int) -> int:
    """Return a whole number from `least` on; raise UsageError, which calls it a number of `noun`, for other texts."""
    if not value.isdecimal() or int(value) < least:
        raise UsageError(f"{value!r} is not a number of {noun} from {least} on")
    return int(value)


# -- computes ------------------------------------------------------------------------------------------------------


def _compute_nodes(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.kind == "compute"]


def _scale_compute(name: str | None, factor: float) -> tuple[str, Apply]:
    """Return the change of computes of a name, or of all, by a factor, and before it its description."""

    def scale_computes(graph: Graph) -> None:
        """Multiply the work of the named computes; raise UsageError if there are none."""
        chosen = [node for node in _compute_nodes(graph) if name is None or node.span.name == name]
        if not chosen:
            known = sorted({node.span.name for node in _compute_nodes(graph)})
            known_names = f"; there are {', '.join(map(repr, known[:8]))}" if known else ""
            raise UsageError(f"no compute is called {name!r}{known_names}")
        for node in chosen:
            node.work_ns *= factor

    what = "all computes take" if name is None else f"compute '{name}' takes"
    return f"{what} {factor:g} times as long", scale_computes


def _level_computes(graph: Graph) -> None:
    """Give each rank that computes in a step the mean of the ranks' computing there, scaling each compute.

    Work is neither lost nor gained. Computes that kept an event loop stay: there, ranks of a process wait for each
    other's.
    """
    totals: dict[int | None, dict[int, float]] = {}
    nodes = [node for node in _compute_nodes(graph) if node.span.kind == "compute" and node.work_ns]
    for node in nodes:
        rank_totals, rank = totals.setdefault(node.span.step, {}), node.ranks[0]
        rank_totals[rank] = rank_totals.get(rank, 0.0) + node.work_ns
    for node in nodes:
        rank_totals = totals[node.span.step]
        node.work_ns *= sum(rank_totals.values()) / len(rank_totals) / rank_totals[node.ranks[0]]


# -- programs ------------------------------------------------------------------------------------------------------


def _await_late(graph: Graph) -> None:
    """Let programs await communication only at the end of a step; computes still wait for their inputs.

    A trace says of each operation whether its program waited for it; where it says so of none, what a program seems to
    have waited for counts.
    """
    last = {end for _, end, _ in graph.steps} | _kept_over_ends(graph)
    has_awaits = any(node.info and node.info.awaited_ns is not None for node in graph.nodes)
    ends: dict[tuple[int, int | None], list[Node]] = {}
    changed = False
    for node in graph.nodes:
        if node.kind == "program" and node not in last:
            late = [each for each, _ in node.after if each.kind == "end" and (_was_awaited(each) or not has_awaits)]
            node.after = [(each, delay) for each, delay in node.after if each not in late]
            changed |= bool(late)
        elif node.kind == "end":
            ends.setdefault((node.ranks[0], node.span.step), []).append(node)
    if not changed:
        held = hold_ups(graph)
        other = f"; '{held[0].name}' {held[0].clause}: see updates=late" if held else ""
        raise UsageError(
            f"programs await communication at the end of the step only already{other}; leave this change out"
        )
    for _, end, span in graph.steps:
        end.after += [(node, 0) for node in ends.get((span.rank, span.step), ())]


def _kept_over_ends(graph: Graph) -> set[Node]:
    """Return the instants at which programs began to keep their event loops in a turn that ended a step.

    What the program had waited for then, it awaited at the end of that step.
    """
    ends_ns: dict[int, list[int]] = {}
    for _, _, span in graph.steps:
        ends_ns.setdefault(span.rank, []).append(span.end_ns)
    return {
        loop.after[0][0]
        for loop in graph.kept_loops()
        for at_ns in ends_ns.get(loop.ranks[0], ())
        if loop.span.start_ns <= at_ns <= loop.span.end_ns
    }


def _was_awaited(end: Node) -> bool:
    return end.info is not None and end.info.awaited_ns is not None


def _free_loops(graph: Graph) -> None:
    """Let programs compute in parallel to their event loops: other ranks and transfers no longer wait for that."""
    loops = set(graph.kept_loops())
    if not loops:
        raise UsageError("no program kept an event loop; leave this change out")
    for node in graph.nodes:
        if node.kind == "transfer" or (node.kind == "program" and node.ranks):
            for loop in [each for each, _ in node.after if each in loops]:
                if node.kind == "transfer" or loop.ranks != node.ranks:
                    remove_wait(node, loop)


def _drop_barriers(graph: Graph) -> None:
    """Remove all waits for barriers; a step still ends when its operations have ended."""
    barriers = {node for node in graph.nodes if node.kind == "end" and node.info and node.info.op == "barrier"}
    if not barriers:
        raise UsageError("there are no barriers; leave this change out")
    for node in graph.nodes:
        for before in [each for each, _ in node.after if each in barriers]:
            remove_wait(node, before)
        node.likely = [each for each in node.likely if each not in barriers]


# -- wires ---------------------------------------------------------------------------------------------------------


def _fitted_transfers(graph: Graph) -> list[tuple[Node, Fit]]:
    """Return each transfer with the fit of its kind; raise UsageError if the graph has no transfers."""
    found = fit_transfers(graph)
    transfers = [(node, found[transfer_kind(node)]) for node in graph.nodes if node.kind == "transfer"]
    if not transfers:
        raise UsageError("there is no communication that it could change; leave this change out")
    return transfers


def _scale_transfers(graph: Graph, *, latency: float, size: float) -> None:
    """Multiply the latency part of each transfer's work by `latency`, and the part of its bytes by `size`."""
    for node, fit in _fitted_transfers(graph):
        alone_ns = fit.work_ns(transfer_bytes(node))
        share = fit.latency_ns / alone_ns if alone_ns else 1.0
        node.work_ns *= share * latency + (1 - share) * size


def _change_bandwidth(value: str) -> tuple[str, Apply]:
    """Return the change of bandwidth by a factor, and before it its description."""
    if not (factor := _parse_factor(value)):
        raise UsageError("nothing travels at 0 times the speed; give a factor above 0")
    return f"wires carry {factor:g} times as much", lambda graph: _scale_transfers(graph, latency=1.0, size=1 / factor)


def _change_bytes(value: str) -> tuple[str, Apply]:
    """Return the change of the bytes that operations carry, and before it its description."""
    factor = _parse_factor(value)

    def scale_bytes(graph: Graph) -> None:
        """Scale the bytes of all transfers; fewer bytes add the computes that convert the gradients of all-reduces."""
        if factor < 1:
            transfers = [node for node, _ in _fitted_transfers(graph)]
            add_conversions(graph, [node for node in transfers if node.info and node.info.op == "all_reduce"])
        _scale_transfers(graph, latency=1.0, size=factor)

    return f"operations carry {factor:g} times the bytes", scale_bytes


def _change_latency(value: str) -> tuple[str, Apply]:
    """Return the change of the latency of transfers by a factor, and before it its description."""
    factor = _parse_factor(value)
    what = f"what does not depend on the size takes {factor:g} times as long"
    return what, lambda graph: _scale_transfers(graph, latency=factor, size=1.0)


def _change_rank_count(value: str) -> tuple[str, Apply]:
    """Return the change to another number of ranks in a ring, and before it its description."""
    count = _parse_count(value, "ranks", least=2)

    def scale_ring(graph: Graph) -> None:
        """Scale transfers of the whole world to a ring of `count` ranks; raise UsageError on modelled machines."""
        world = len({rank for node in graph.nodes for rank in node.ranks})
        machine = graph.meta.get("cluster", _LOCAL_MACHINE)
        if machine != _LOCAL_MACHINE and is_known(machine, graph.world_size):
            line = _simulate_command(machine, graph.world_size, count, graph.meta.get("script", "SCRIPT"))
            raise UsageError(f"the trace is of {machine}, whose wires are no ring; run the program there: {line}")
        for node, fit in _fitted_transfers(graph):
            ring_size = len(node.ranks)
            if ring_size != world or ring_size < 2:
                continue  # a group of its own, such as tensor parallel ranks, stays as it is
            latency_ns = min(fit.latency_ns, node.work_ns)
            bytes_ratio = ((count - 1) / count) / ((ring_size - 1) / ring_size)
            node.work_ns = latency_ns * (count - 1) / (ring_size - 1) + (node.work_ns - latency_ns) * bytes_ratio

    return f"{count} ranks, each with as much to compute, joined in a ring of the same wires", scale_ring


def _simulate_command(machine: str, world_size: int, new_size: int, script: str) -> str:
    """Return the command that simulates a script on `new_size` ranks, with as many ranks per node as recorded."""
    kind, _, count = machine.partition(" x")
    if not count and is_known(machine, new_size):
        return f'overlap simulate --cluster "{machine}" --ranks {new_size} {script}'
    per = max(world_size // int(count), 1) if count.isdecimal() else world_size
    nodes, rest = divmod(new_size, per)
    ranks = f" --ranks {new_size}" if rest else ""
    several = f" x{nodes + bool(rest)}" if nodes + bool(rest) > 1 else ""
    return f'overlap simulate --cluster "{kind}{several}"{ranks} {script}'


def _change_stream_window(value: str) -> tuple[str, Apply]:
    """Return the change of the window of streams, and before it its description."""
    window = _parse_count(value, "operations", least=1)
    return f"streams work on {value} operations at once", lambda graph: change_window(graph, window)


def _change_algorithm(algorithm: str) -> tuple[str, Apply]:
    """Return the change of all operations to an algorithm, and before it its description."""
    check_algorithm(algorithm)
    what = f"every operation becomes {algorithm} where that exists"
    return what, lambda graph: use_algorithm(graph, algorithm)


def _change_buckets(value: str) -> tuple[str, Apply]:
    """Return the change of all-reduces to buckets of a size, and before it its description."""
    nbytes = parse_bytes(value, argument="bucket_bytes")
    if nbytes < 1:
        raise UsageError("a bucket holds at least a byte; give 1 or more")
    what = f"all-reduces of {format_bytes(nbytes)} in the order of the gradients"
    return what, lambda graph: rebucket(graph, nbytes)


_VALUED: dict[str, Callable[[str], tuple[str, Apply]]] = {
    "bandwidth": _change_bandwidth,
    "bytes": _change_bytes,
    "latency": _change_latency,
    "ranks": _change_rank_count,
    "window": _change_stream_window,
    "algorithm": _change_algorithm,
    "bucket_bytes": _change_buckets,
}
_FIXED: dict[tuple[str, str], tuple[str, Apply]] = {
    ("stragglers", "none"): ("the computes of a step are shared out evenly among its ranks", _level_computes),
    ("order", "forward"): ("gradients overtake those that the next forward pass needs later", forward_first),
    ("streams", "apart"): ("the operations of each line have a stream of their own", part_streams),
    ("loop", "free"): ("programs compute beside their event loop", _free_loops),
    ("barriers", "none"): ("no rank waits at a barrier", _drop_barriers),
    ("awaits", "late"): ("programs await communication at the end of the step only", _await_late),
    ("updates", "late"): ("computes that wait for a reduction run after those that need no result of them", issue_late),
}
