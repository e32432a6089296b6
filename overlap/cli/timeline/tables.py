"""Tables that the command prints of a timeline: operations, and the critical path."""

from __future__ import annotations

from collections.abc import Sequence

from ...timeline.measure.critical_path import PathLink
from ...timeline.measure.operations import Operations
from ...units import format_bytes, format_figure, format_table, table_unit


def operations_table(rows: Sequence[Operations], *, ranks: int, width: int) -> list[str]:
    """Return the table of operations; times and calls are means of the ranks, other figures means of the calls.

    Args:
        rows: Figures of the operations, summed over ranks.
        ranks: How many ranks.
        width: Columns of the table.
    """
    if not rows:
        return ["communication: none recorded"]
    unit, unit_ns = table_unit(max(max(row.exposed_ns // ranks, row.transfer_ns // row.count) for row in rows))
    times = (f"exposed/{unit}", "wait", "calls", "transfer")
    heads = ("operation", "called at", *times, "size", "busGB/s", "queued", "algorithm")
    figures = [
        (
            row.op,
            row.call_site,
            format_figure(row.exposed_ns / ranks, unit_ns),
            format_figure(row.exposed_waiting_ns / ranks, unit_ns),
            f"{row.count / ranks:.4g}",
            format_figure(row.transfer_ns / row.count, unit_ns),
            format_bytes(row.nbytes // row.count),
            f"{row.busbw_bytes_per_s / 1e9:.3g}",
            format_figure(row.queued_ns / row.count, unit_ns),
            row.algorithm,
        )
        for row in rows
    ]
    return format_table(heads, figures, width=width, words=[0, 1])


def critical_path_table(path: Sequence[PathLink], *, width: int, rows_at_most: int = 12) -> list[str]:
    """Return the table of the parts of the critical path, the longest first.

    Args:
        path: The path.
        width: Columns of the table.
        rows_at_most: How many parts get a row; a last line sums up the others.
    """
    parts: dict[tuple[int, str], tuple[int, int]] = {}
    for link in path:
        # links of one rank and one name are one part
        ns, times = parts.get((link.rank, str(link)), (0, 0))
        parts[link.rank, str(link)] = ns + link.duration_ns, times + 1
    total_ns = sum(link.duration_ns for link in path)
    unit, unit_ns = table_unit(total_ns)
    ordered = sorted(parts.items(), key=lambda item: (-item[1][0], item[0]))
    figures = [
        (what, str(rank), format_figure(ns, unit_ns), f"{ns / max(total_ns, 1):.0%}", str(times))
        for (rank, what), (ns, times) in ordered[:rows_at_most]
    ]
    lines = format_table(("on the critical path", "rank", unit, "share", "times"), figures, width=width, words=[0])
    rest_ns = sum(ns for _, (ns, _) in ordered[rows_at_most:])
    return lines + (
        [f"and {len(ordered) - rows_at_most} more, {format_figure(rest_ns, unit_ns)} {unit}"] if rest_ns else []
    )
