"""Tables that the command prints of a timeline: operations, stragglers, the critical path, two runs."""

from __future__ import annotations

from collections.abc import Sequence

from ...timeline.measure.critical_path import PathLink
from ...timeline.measure.operations import Operations
from ...timeline.measure.stragglers import Straggler
from ...timeline.measure.verdict import Verdict
from ...units import columns, figure, figure_unit, format_bytes


def operations_table(rows: Sequence[Operations], *, ranks: int, width: int) -> list[str]:
    """Return the table of operations: for each of `ranks` ranks up to their number of calls, the rest for each call."""
    if not rows:
        return ["communication: none recorded"]
    unit, unit_ns = figure_unit(max(max(row.exposed_ns // ranks, row.transfer_ns // row.count) for row in rows))
    times = (f"exposed/{unit}", "wait", "calls", "transfer")
    heads = ("operation", "called at", *times, "size", "busGB/s", "queued", "algorithm")
    figures = [
        (
            row.op,
            row.call_site,
            figure(row.exposed_ns / ranks, unit_ns),
            figure(row.exposed_waiting_ns / ranks, unit_ns),
            f"{row.count / ranks:.4g}",
            figure(row.transfer_ns / row.count, unit_ns),
            format_bytes(row.nbytes // row.count),
            f"{row.busbw_bytes_per_s / 1e9:.3g}",
            figure(row.queued_ns / row.count, unit_ns),
            row.algorithm,
        )
        for row in rows
    ]
    return columns(heads, figures, width=width, words=[0, 1])


def stragglers_table(
    rows: Sequence[Straggler], *, width: int, partial: bool = False, rows_at_most: int = 10
) -> list[str]:
    """Return the table of the worst ranks; the others are counted.

    Args:
        rows: The ranks, worst first.
        width: Columns of the terminal.
        partial: Whether the trace has not all ranks, and does not tell when the others came.
        rows_at_most: How many ranks to show.
    """
    unit, unit_ns = figure_unit(max((max(row.exposed_ns, row.slow_ns) for row in rows), default=0))
    figures = [
        (
            str(row.arrivals.rank),
            f"{row.arrivals.last} of {row.arrivals.collectives}",
            figure(row.exposed_ns, unit_ns),
            figure(row.slow_ns, unit_ns),
            row.doing,
        )
        for row in rows[:rows_at_most]
        if 20 * max(row.exposed_ns, row.slow_ns) >= unit_ns
    ]
    if not figures and partial:
        return ["other ranks are not in the trace: it cannot tell who was waited for, or who was slow"]
    if not figures:
        return ["nobody was waited for, and nobody was slow"]
    heads = ("rank", "came last", f"waited for/{unit}", f"slow/{unit}", "it was at")
    rest = len(rows) - len(figures)
    lines = columns(heads, figures, width=width, words=[4])
    return lines + ([f"and {rest} others, for whom ranks waited less, or not at all"] if rest > 0 else [])


def critical_path_table(path: Sequence[PathLink], *, width: int, rows_at_most: int = 12) -> list[str]:
    """Return the table of the parts of the critical path, the longest first."""
    parts: dict[tuple[int, str], tuple[int, int]] = {}
    for link in path:
        ns, times = parts.get((link.rank, str(link)), (0, 0))
        parts[link.rank, str(link)] = ns + link.duration_ns, times + 1
    total_ns = sum(link.duration_ns for link in path)
    unit, unit_ns = figure_unit(total_ns)
    ordered = sorted(parts.items(), key=lambda item: (-item[1][0], item[0]))
    figures = [
        (what, str(rank), figure(ns, unit_ns), f"{ns / max(total_ns, 1):.0%}", str(times))
        for (rank, what), (ns, times) in ordered[:rows_at_most]
    ]
    lines = columns(("on the critical path", "rank", unit, "share", "times"), figures, width=width, words=[0])
    rest_ns = sum(ns for _, (ns, _) in ordered[rows_at_most:])
    return lines + ([f"and {len(ordered) - rows_at_most} more, {figure(rest_ns, unit_ns)} {unit}"] if rest_ns else [])


_SELDOM = ("event loop kept", "copies", "queued")
"""Rows that are left out where both runs have nothing of the kind."""
_ROWS = (
    ("compute", "compute_ns"),
    ("exposed", "exposed_ns"),
    ("  waiting for ranks", "waiting_ns"),
    ("  on the wire", "wire_ns"),
    ("event loop kept", "kept_ns"),
    ("copies", "copy_ns"),
    ("queued", "queued_ns"),
    ("idle", "idle_ns"),
    ("bytes moved for", "transfer_ns"),
)


def comparison_table(one: Verdict, other: Verdict, *, width: int) -> list[str]:
    """Return the table of two runs: the step and the means of the ranks of both, and the differences."""
    unit, unit_ns = figure_unit(max(one.wall_ns, other.wall_ns))
    pairs = [("step", float(one.wall_ns), float(other.wall_ns))]
    rows_of = [(text, _mean_ns(one, name), _mean_ns(other, name)) for text, name in _ROWS]
    pairs += [row for row in rows_of if row[0] not in _SELDOM or row[1] or row[2]]
    rows = [
        (
            text,
            figure(first, unit_ns),
            figure(second, unit_ns),
            _signed_figure(first - second, unit_ns),
            _percent_text(first, second),
        )
        for text, first, second in pairs
    ]
    return columns((f"mean of a rank/{unit}", "this", "against", "difference", ""), rows, width=width, words=[0])


def comparison_sentence(verdict: Verdict, base: Verdict) -> str:
    """Return one sentence on how much longer a run takes than another, and the part that differs most."""
    difference_ns = verdict.wall_ns - base.wall_ns
    unit, unit_ns = figure_unit(max(verdict.wall_ns, base.wall_ns))
    if not difference_ns:
        return f"both take {figure(verdict.wall_ns, unit_ns)} {unit}"
    parts = {
        text.strip(): _mean_ns(verdict, name) - _mean_ns(base, name)
        for text, name in _ROWS
        if text[0] == " " or text in _ALONE
    }
    most = max(parts, key=lambda text: parts[text] if difference_ns > 0 else -parts[text])
    return (
        f"{_signed_figure(difference_ns, unit_ns)} {unit} ({_percent_text(verdict.wall_ns, base.wall_ns)}) against "
        f"{figure(base.wall_ns, unit_ns)} {unit}, mostly {most}: {_signed_figure(parts[most], unit_ns)} {unit}"
    )


_ALONE = ("compute", "event loop kept", "copies", "queued", "idle")


def _mean_ns(verdict: Verdict, name: str) -> float:
    return float(getattr(verdict, name)) / max(verdict.ranks, 1)


def _signed_figure(ns: float, unit_ns: int) -> str:
    return f"{'-' if ns < 0 else '+'}{figure(abs(ns), unit_ns)}"


def _percent_text(first: float, second: float) -> str:
    return f"{100 * (first - second) / second:+.1f}%" if second else "n/a"
