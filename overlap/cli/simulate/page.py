"""Page of a simulated run: assumptions, figures, and a drawing of the median step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from topology import Cluster

from ...config import RunConfig
from ...simulation.compute_cost import Profile, short_dtype
from ...simulation.symmetry import AlikeBy
from ...timeline.draw.view import TimelineView
from ...timeline.spans import Timeline
from ...units import format_bytes, wrap_text
from ..output import field_lines as figure_lines
from .simulation import Shape, StepSummary

if TYPE_CHECKING:
    from rich.text import Text

_LISTED = 4  # shapes that are named


def page_lines(outcome: StepSummary, request: RunConfig, wall_s: float, width: int) -> list[str]:
    """Return the page of a simulated run: its assumptions, the times of its median step, and its communication.

    Args:
        outcome: Measures of the run.
        request: Its configuration.
        wall_s: Real time that the command has simulated for.
        width: Columns of the page.
    """
    row, field = outcome.longest, partial(figure_lines, width=width)
    step = f"the median one of {outcome.steps} (step {outcome.step})" if outcome.steps else "the whole run"
    ratio = "n/a" if row.overlap_ratio is None else f"{row.overlap_ratio:.1%}"
    return [
        *wrap_text(f"{_machine_text(request)}, {_ranks_text(outcome.world_size)}, virtual time", width, rest="  "),
        *field("assumed", "; ".join([*assumption_lines(request), *_dtype_warnings(outcome, request)])),
        *field("step time", f"{format_exact_ms(row.wall_ns)}, {step}, of rank {row.rank}, the longest"),
        *field("  compute", f"{format_exact_ms(row.compute_ns)}"),
        *field("  communication", f"{format_exact_ms(row.comm_ns)}"),
        *field("    hidden", f"{format_exact_ms(row.overlapped_ns)}, overlap ratio {ratio}"),
        *field("    exposed", f"{format_exact_ms(row.exposed_ns)}, {outcome.exposed_share:.1%} of the step"),
        *(field("  queued", f"{format_exact_ms(row.queued_ns)}") if row.queued_ns else []),
        *field("  idle", f"{format_exact_ms(row.idle_ns)}"),
        *field("extrapolated", extrapolation_text(outcome)),
        *field("simulated in", f"{wall_s:.2f} s"),
    ]


def _machine_text(request: RunConfig) -> str:
    """Return the name of the cluster, with its setting `lnc` if the chip has several."""
    cluster = request.cluster
    assert isinstance(cluster, Cluster)
    lnc = f" lnc={cluster.lnc}" if len(cluster.machine.chip.lnc) > 1 else ""
    return f"{cluster.name}{lnc}"


def assumption_lines(request: RunConfig) -> list[str]:
    """Return the assumptions of a run in words."""
    virtual = request.virtual
    assert virtual is not None
    rates = f"{virtual.efficiency:.4g} of the {virtual.dtype} peak and {virtual.memory_efficiency:.4g} of the memory's"
    profile = virtual.profile
    source = profile.source if isinstance(profile, Profile) else profile
    stated = f"what they state, or reach {rates} bandwidth"
    return [
        f"computes take what they took in {source}, others {stated}" if source else f"computes take {stated}",
        "Peer Direct" if virtual.peer_direct else "copies through the host",
        *([f"{request.algorithm} wherever it exists"] if request.algorithm else []),
        str(virtual.conditions),
        *([f"faults are planned by {virtual.faults}"] if virtual.faults else []),
        str(virtual.interference),
        *(["shapes only"] if virtual.shapes_only else []),
        *_alike_assumption(virtual.alike),
    ]


def _dtype_warnings(outcome: StepSummary, request: RunConfig) -> list[str]:
    """Return a warning if arrays have another dtype than the peak that computes are priced by."""
    assert request.virtual is not None
    peak = request.virtual.dtype
    others = sorted({shape.dtype for shape in outcome.shapes if "float" in shape.dtype} - {peak})
    if not outcome.rated or not others or short_dtype(peak) in map(short_dtype, others):
        return []
    return [f"arrays are {' and '.join(others)}: --dtype {others[-1]} takes the peak of that"]


def _alike_assumption(alike: AlikeBy) -> list[str]:
    """Return the assumption that ranks are alike in words, or nothing if every rank runs."""
    if not alike:
        return []
    blocks = "all ranks" if alike == 1 else f"ranks of each of {alike} blocks"
    who = "ranks of a class" if callable(alike) else blocks
    return [f"{who} behave alike, and two of them run for all"]


def shape_text(shape: Shape) -> str:
    """Write a shape: `all_reduce of 25 MiB bfloat16 on 64 ranks`."""
    dtype = f" {shape.dtype}" if shape.dtype else ""
    return f"{shape.op} of {format_bytes(shape.nbytes)}{dtype} on {_ranks_text(shape.ranks)}"


def _ranks_text(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def extrapolation_text(outcome: StepSummary) -> str:
    """Return the predictions of communication that lie outside published measurements, in words."""
    if not outcome.shapes:
        return "nothing: there is no communication"
    if not outcome.extrapolated:
        return "nothing: all communication lies within published measurements"
    named = ", ".join(map(shape_text, outcome.extrapolated[:_LISTED]))
    rest = len(outcome.extrapolated) - _LISTED
    more = f", and {rest} more" if rest > 0 else ""
    return f"{len(outcome.extrapolated)} of {len(outcome.shapes)} kinds of communication: {named}{more}"


def format_exact_ms(duration_ns: int) -> str:
    """Write a time to the nanosecond: `60.265170 ms`."""
    millis, nanos = divmod(duration_ns, 10**6)
    return f"{millis}.{nanos:06d} ms"


def draw_timelines(timeline: Timeline, outcome: StepSummary, *, width: int, ascii: bool, color: bool) -> Iterator[Text]:
    """Yield the lines of a picture of the median step, lane by lane, and of the verdict on that step.

    Args:
        timeline: The run.
        outcome: Measures of the run, with the median step.
        width: Columns of the picture.
        ascii: Whether to draw with plain characters.
        color: Whether to draw in colours.
    """
    from rich.text import Text

    view = TimelineView(timeline, step=outcome.step)
    lines = view.lines(width=width, ascii=ascii, color=color)
    # The view has two empty lines, around its table. The figures of this page replace the table.
    table_start, table_end = (number for number, line in enumerate(lines) if not line)
    for line in [*lines[:table_start], *lines[table_end:]]:
        yield Text.assemble(*line, no_wrap=True, overflow="crop")


_FIGURES = ("rank", "compute_ns", "comm_ns", "overlapped_ns", "exposed_ns", "queued_ns", "idle_ns", "overlap_ratio")


def json_document(outcome: StepSummary) -> dict[str, object]:
    """Return the figures of a run for `--json`: integers of nanoseconds, shares from 0 to 1 or null."""
    own = ("world_size", "step", "steps", "step_ns", "exposed_share")
    return {
        **{name: getattr(outcome, name) for name in own},
        **{name: getattr(outcome.longest, name) for name in _FIGURES},
        "communicated": list(map(asdict, outcome.shapes)),
        "extrapolated": list(map(asdict, outcome.extrapolated)),
    }
