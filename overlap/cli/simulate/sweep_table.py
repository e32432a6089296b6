"""The rows of a sweep as text with a small plot, as CSV and as JSON. Pure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO
from textwrap import wrap

from .page import described
from .step_summary import StepSummary
from .sweep import SweepRow

_BAR = 24  # cells of the longest bar, where there is room
_BAR_HEADING = "step time"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_FIGURES = ("step_ns", "compute_ns", "comm_ns", "overlapped_ns", "exposed_ns", "idle_ns", "overlap_ratio",
            "exposed_share", "samples_per_s", "world_size")  # fmt: skip


def table(rows: Sequence[SweepRow], winner: SweepRow | None, *, width: int, ascii: bool = False) -> list[str]:
    """Return one line for each point under a header, the bars as long as the steps, and a line about the best one.

    Where `width` columns are too few, bars are shorter, and where not even their heading fits there are none.
    """
    names = list(rows[0].point.texts) if rows else []
    outcomes = [row.outcome for row in rows if row.outcome]
    throughput = any(outcome.samples_per_s is not None for outcome in outcomes)
    figures = ["ranks", "step ms", "exposed", "overlap", *(["samples/s"] if throughput else [])]
    kept = slice(1 if "ranks" in names else 0, None)  # what is swept has a column already
    header = [*names, *figures[kept]]
    cells = [[*row.point.texts.values(), *_cells(row.outcome, throughput=throughput)[kept]] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    longest_ns = max((outcome.step_ns for outcome in outcomes), default=0)
    room = width - 2 - sum(column + 2 for column in widths)
    bar = min(room, _BAR) if room >= len(_BAR_HEADING) else 0
    lines = [f"  {_aligned(header, widths)}" + (f"  {_BAR_HEADING}" if bar else "")]
    for row, texts in zip(rows, cells, strict=True):
        mark = "* " if row is winner else "  "
        if row.outcome is None:
            failed = f"{mark}{_aligned(texts[: len(names)], widths)}  failed: {row.error}"
            lines += wrap(failed, width, subsequent_indent="      ", break_on_hyphens=False)
        else:
            drawn = _bar(row.outcome.step_ns, longest_ns, cells=bar, ascii=ascii)
            lines.append(f"{mark}{_aligned(texts, widths)}  {drawn}".rstrip())
    return [*lines, *_best(winner)]


def _cells(outcome: StepSummary | None, *, throughput: bool) -> list[str]:
    if outcome is None:
        return [""] * (5 if throughput else 4)
    ratio = outcome.longest.overlap_ratio
    figures = [
        str(outcome.world_size),
        f"{outcome.step_ns / 1e6:.3f}",
        f"{outcome.exposed_share:.1%}",
        "n/a" if ratio is None else f"{ratio:.1%}",
    ]
    rate = outcome.samples_per_s
    return [*figures, *(["n/a" if rate is None else f"{rate:.2f}"] if throughput else [])]


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(texts, widths, strict=False))


def _bar(value_ns: int, longest_ns: int, *, cells: int, ascii: bool) -> str:
    """Draw a bar, the longest `cells` long; what is not nothing has at least an eighth of a cell."""
    eighths = -(-value_ns * cells * 8 // longest_ns) if longest_ns else 0
    if ascii:
        return "#" * -(-eighths // 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _best(winner: SweepRow | None) -> list[str]:
    if winner is None or winner.outcome is None:
        return []
    why = "shortest step" if winner.outcome.samples_per_s is None else "highest throughput"
    return [f"* {why}: {', '.join(f'{name}={text}' for name, text in winner.point.texts.items())}"]


def csv_text(rows: Sequence[SweepRow], winner: SweepRow | None) -> str:
    """Return the rows as CSV: the parameters, the figures as in JSON, whether a row is the best, its error."""
    out = StringIO()
    names = list(rows[0].point.texts) if rows else []
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *_FIGURES, "best", "error"])
    for row in rows:
        figures = described(row.outcome) if row.outcome else {}
        told = [figures.get(name) for name in _FIGURES]
        writer.writerow([*row.point.texts.values(), *told, int(row is winner), row.error])
    return out.getvalue()


def json_rows(rows: Sequence[SweepRow], winner: SweepRow | None) -> list[dict[str, object]]:
    """Return the rows as objects: parameters as text, figures as of a single simulation (null if it failed)."""
    return [
        {
            "parameters": dict(row.point.texts),
            "outcome": described(row.outcome) if row.outcome else None,
            "error": row.error,
            "best": row is winner,
            "wall_s": row.wall_s,
        }
        for row in rows
    ]
