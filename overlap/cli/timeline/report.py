"""Figures of a timeline as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ...timeline.measure.metrics import Breakdown, breakdowns
from ...timeline.measure.operations import operations
from ...timeline.measure.stragglers import arrivals
from ...timeline.measure.verdict import Verdict
from ...timeline.span import Span
from ...timeline.spans import Timeline

SCHEMA_VERSION = 3
"""Version of what `--json` prints; it rises when a field changes its meaning or goes."""


def report(timeline: Timeline, step: int | None, ranks: Sequence[int] | None, verdict: Verdict) -> dict[str, object]:
    """Return the figures that `--json` prints: integers of nanoseconds, ratios from 0 to 1 or null."""
    return {
        "clock": timeline.clock,
        "dropped": timeline.dropped,
        "meta": timeline.meta,
        "step": step,
        "steps": timeline.steps(),
        "world_size": timeline.world_size,
        "ranks": [_json_figures(row) for row in breakdowns(timeline, step=step, ranks=ranks)],
        "wires": [{"rank": span.rank, "at_ns": span.start_ns, "what": span.name} for span in wires(timeline, ranks)],
        "arrivals": [asdict(row) for row in arrivals(timeline, step=step)],
        "operations": [asdict(row) for row in operations(timeline, step=step, ranks=ranks)],
        "verdict": str(verdict),
        "causes": [asdict(cause) for cause in verdict.causes],
        "kept": [asdict(cause) for cause in verdict.kept],
    }


def wires(timeline: Timeline, ranks: Sequence[int] | None) -> list[Span]:
    """Return the events of connections: rails that were lost, and rails that came back."""
    return [
        span for span in timeline.chosen(timeline.columns.is_kind("wires")) if (ranks is None or span.rank in ranks)
    ]


_FIGURES = (
    *("rank", "wall_ns", "compute_ns", "comm_ns", "compute_only_ns", "overlapped_ns", "exposed_ns", "waiting_ns"),
    *("wire_ns", "transfer_ns", "queued_ns", "kept_ns", "copy_ns", "idle_ns", "overlap_ratio", "ideal_wall_ns"),
    "possible_gain_ns",
)


def _json_figures(row: Breakdown) -> dict[str, int | float | None]:
    return {name: getattr(row, name) for name in _FIGURES}
