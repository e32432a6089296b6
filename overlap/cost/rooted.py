"""Rooted collectives in two phases: a broadcast scatters and gathers, a reduce goes the other way; over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..collectives.generators import generate
from ..collectives.generators.scattered import SCATTERS, handing_steps
from ..collectives.placement import Placement
from ..collectives.schedule import Schedule
from ..collectives.slicing import pipelined
from .flat import WIDE, PlanRequest, expanded, fitted, rings_of, too_wide
from .option import Part, Rejected
from .parameters import Parameters
from .phased import Phased
from .placed import on
from .rounds import Rounds

_GATHERS = ("mesh", "rdh", "kangaring", "multi_ring", "ring", "swing", "bucket")
_NAMES = {"broadcast": "scatter_all_gather", "reduce": "reduce_scatter_gather"}


def rooted_options(
    request: PlanRequest, placement: Placement, parameters: Parameters
) -> tuple[list[Phased], list[Rejected]]:
    """Compose every way to hand out with every way to gather.

    Phases are costed as if each were a collective of its own, and pieces of the data go through them one after another,
    as far as the wires that phases share allow. That a rank which has handed something on need not get it again makes
    the table a little faster.

    Returns:
        All combinations, or why there are none.
    """
    algorithm = _NAMES.get(request.collective)
    if algorithm is None or not request.considers(algorithm):
        return [], []
    if too_wide(request):
        return [], [Rejected(algorithm=algorithm, why=WIDE)]
    if request.geometry.size < 2:
        return [], [Rejected(algorithm=algorithm, why="a rank alone has nobody to hand anything to")]
    figures, backwards = replace(parameters, launch_s=0.0), algorithm == "reduce_scatter_gather"
    ends = _parts("gather" if backwards else "scatter", SCATTERS, request, placement, figures)
    wide = _parts("reduce_scatter" if backwards else "all_gather", _GATHERS, request, placement, figures)
    options = []
    for gather, spread in wide.items():
        for scatter, end in ends.items():
            parts, detail = (
                ((spread, end), f"{gather}, {scatter}") if backwards else ((end, spread), f"{scatter}, {gather}")
            )
            make = partial(_make, request, algorithm, gather, scatter)
            options.append(Phased(algorithm, detail, parts, parameters, make, most_slices=parameters.most_slices))
    return options, []


def _parts(
    collective: str, algorithms: Sequence[str], request: PlanRequest, placement: Placement, parameters: Parameters
) -> dict[str, Part]:
    """Put a phase on the machine, with each algorithm that applies."""
    found = {}
    for algorithm in algorithms:
        phase = expanded(replace(request, collective=collective), algorithm)
        if not isinstance(phase, Rejected):
            asked = _begun(phase.rounds, collective, request.root)
            found[algorithm] = Part(on(placement, asked, parameters=parameters))
    return found


def _begun(asked: Rounds, collective: str, root: int) -> Rounds:
    """Return what a phase asks for, with what ranks do first: a second phase finds all in place."""
    if collective == "scatter":
        return asked.while_copying(root)
    return asked if collective == "reduce_scatter" else asked.continued()


def _make(request: PlanRequest, algorithm: str, gather: str, scatter: str, slices: int) -> Schedule:
    g = request.geometry
    whole = generate(
        request.collective,
        algorithm,
        g.size,
        root=request.root,
        gather=gather,
        scatter=scatter,
        gather_options=fitted(gather, g)[1],
        rings=rings_of(scatter, g),
    )
    handing = handing_steps(g.size, scatter, request.root, rings_of(scatter, g))
    return pipelined(whole, [0, whole.steps - handing if request.collective == "reduce" else handing], slices)
