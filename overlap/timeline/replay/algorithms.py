"""Operations that become another algorithm: what was measured, times what the model of the machine says of the two."""

from __future__ import annotations

from ...collectives.generators import GENERATORS
from ...errors import UsageError
from ..span import CollectiveInfo
from ..spans import Timeline
from .graph import Graph
from .machine import Machine
from .turns import streams_of, take_turns


def use_algorithm(graph: Graph, algorithm: str, text: str) -> None:
    """Let every operation become an algorithm, wherever it exists.

    A transfer takes as many times longer as the model of the machine (`overlap plan`) says of the two algorithms:
    alone, and behind another of its stream, when only wires count. What else slowed it down does so still.

    Raises:
        UsageError: If there is no machine to ask, or no operation that could become it; `text` is what was asked for.
    """
    machine = Machine(graph.meta, graph.world_size, text)
    streams = streams_of(graph, GENERATORS)
    if not streams:
        raise UsageError(f"--what-if: {text!r}: there are no operations that could become {algorithm!r}")
    told = take_turns(graph, streams)
    changed, known = False, set[str]()
    for node in (node for nodes in streams.values() for node in nodes):
        info = node.spans[0].info
        assert info is not None
        known.add(info.algorithm)
        now, then = machine.taken(info, info.algorithm), machine.taken(info, algorithm)
        if info.algorithm == algorithm or now is None or then is None:
            continue
        behind_ns = node.work_ns - node.hidden_ns if node in told else node.work_ns * now.behind_s / now.alone_s
        node.work_ns *= then.alone_s / now.alone_s
        node.hidden_ns = max(node.work_ns - behind_ns * then.behind_s / now.behind_s, 0.0)
        changed = True
    if not changed:
        names = ", ".join(map(repr, sorted(known)))
        raise UsageError(f"--what-if: {text!r}: no operation could become {algorithm!r}; those recorded are {names}")


def best_algorithm(timeline: Timeline) -> str | None:
    """Return the algorithm that the model likes best for what moved bytes longest, if that became another one."""
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
        best = Machine(timeline.meta, timeline.world_size, "").planned(info, None)
    except UsageError:
        return None
    return None if best is None or best.algorithm == info.algorithm else best.algorithm
