"""Lines of a terminal that show the ranks of a running world: right at 80 columns, in any height from six lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..timeline.draw.folding import Fold, fold
from ..timeline.draw.theme import COMPUTE, EXPOSED, HIDDEN, WAITING
from ..timeline.measure.metrics import Breakdown
from ..units import figure, figure_unit, format_bytes
from .figures import RankFigures, WorldFigures

Line: TypeAlias = list[tuple[str, str]]
"""Pieces of text, each with a style of rich."""

_LINES_BESIDE_RANKS = 6  # title, sums, bytes, blank, head, legend
_GLYPHS = {False: "█▄░█ ", True: "#=~! "}  # compute, hidden, waiting, wire, idle
_DOING = 14
_LEAST_BAR = 6


def title(*, job: str, script: str, ranks: int, where: str, age_s: float) -> str:
    """Return the title: the program, its ranks and processes, its age and its job."""
    return f"{script or 'a program'}: {ranks} ranks in {where}, {_format_age(age_s)}; job {job}"


def brief(world: WorldFigures) -> str:
    """Return the figures of the world in one line, for outputs that cannot draw."""
    return "; ".join(filter(None, [_summarize_times(world), _name_latest_rank(world), _summarize_bytes(world)]))


def lines(world: WorldFigures, head: str, *, width: int, height: int, ascii: bool) -> list[Line]:
    """Draw bars of the time of ranks, first the ranks that others waited for most; alike ranks share a row.

    Args:
        world: The figures to draw.
        head: The title.
        width: Columns.
        height: Lines at most, six at least.
        ascii: Without block characters.
    """
    folds = fold([one.times for one in world.ranks], world.late_ns, room=max(height - _LINES_BESIDE_RANKS, 1))
    by_rank = {one.times.rank: one for one in world.ranks}
    label = max(len("rank"), *(len(each.label) for each in folds))
    bar = max((width - label - len(" 100%  100% 1000.0 ms 1023.9 MiB ") - _DOING) // 2, _LEAST_BAR)
    heads = f"{'rank':>{label}} {'compute':<{bar + 5}} {'communication':<{bar + 5}} {'a step':>9} {'in flight':>10} at"
    rows = [_draw_rank(each, by_rank[each.drawn], label, bar, ascii=ascii) for each in folds]
    late, moved = _name_latest_rank(world), _summarize_bytes(world)
    head = head if len(head) <= width else f"..{head[len(head) - width + 2 :]}"  # the job's name is at its end
    texts = [head, _summarize_times(world), *([late, moved] if late else [moved, ""]), heads]
    drawn = [[(text, "bold" if at == 0 else "")] for at, text in enumerate(texts)]
    return [_cut_line(line, width) for line in [*drawn, *rows, _draw_legend(ascii=ascii)]][:height]


def _draw_rank(fold: Fold, figures: RankFigures, label: int, bar: int, *, ascii: bool) -> Line:
    """Draw the row of a rank, or of ranks that are alike: bars of compute and communication, and its figures."""
    times, glyphs = figures.times, _GLYPHS[ascii]
    compute = _draw_bar(times, bar, [(times.compute_ns, glyphs[0], COMPUTE)])
    parts = [(times.overlapped_ns, glyphs[1], HIDDEN), (times.waiting_ns, glyphs[2], WAITING)]
    comm = _draw_bar(times, bar, [*parts, (times.wire_ns, glyphs[3], EXPOSED)])
    step = "" if figures.step_ns is None else _format_duration(figures.step_ns)
    flight = format_bytes(figures.in_flight_bytes) if figures.in_flight_bytes else ""
    return [
        (f"{fold.label:>{label}} ", ""),
        *compute,
        (f" {_format_percent(times.compute_ns, times)}", ""),
        (" ", ""),
        *comm,
        (f" {_format_percent(times.comm_ns, times)} {step:>9} {flight:>10} {figures.doing}", ""),
    ]


def _draw_bar(times: Breakdown, cells: int, parts: Sequence[tuple[int, str, str]]) -> Line:
    """Fill cells from the left; each part ends at the cell that is nearest to its end."""
    wall_ns, done_ns, drawn = max(times.wall_ns, 1), 0, 0
    pieces: Line = []
    for part_ns, glyph, style in parts:
        done_ns += part_ns
        upto = min((2 * done_ns * cells + wall_ns) // (2 * wall_ns), cells)
        pieces.append((glyph * (upto - drawn), style))
        drawn = upto
    return [*pieces, (" " * (cells - drawn), "")]


def _format_percent(part_ns: int, times: Breakdown) -> str:
    return f"{round(100 * part_ns / max(times.wall_ns, 1)):>3}%"


def _summarize_times(world: WorldFigures) -> str:
    """Return the step and the shares of compute, hidden and exposed communication, in one line."""
    step = "no step yet" if world.step is None else f"step {world.step}"
    took = "" if world.step_ns is None else f", {_format_duration(world.step_ns)}"
    comm, hidden = world.share(lambda row: row.comm_ns), world.share(lambda row: row.overlapped_ns)
    waits = f"{world.share(lambda row: row.waiting_ns):.0%} waiting, {world.share(lambda row: row.wire_ns):.0%} wire"
    overlap = f" hidden {hidden / comm:.0%}," if comm else ""
    compute, exposed = world.share(lambda row: row.compute_ns), world.share(lambda row: row.exposed_ns)
    return f"{step}{took}: compute {compute:.0%},{overlap} exposed {exposed:.0%}: {waits}"


def _name_latest_rank(world: WorldFigures) -> str:
    """Return a line on the rank that others waited for most; "" if waits are 1 % of the time or less."""
    rank = max(world.late_ns, key=lambda rank: (world.late_ns[rank], -rank), default=None)
    total_ns = sum(world.late_ns.values())
    if rank is None or not total_ns or not world.share(lambda row: row.waiting_ns) > 0.01:
        return ""
    doing = next((one.doing for one in world.ranks if one.times.rank == rank), "")
    return f"waited for: rank {rank}, {world.late_ns[rank] / total_ns:.0%} of all waiting" + (
        f"; now at {doing}" if doing else ""
    )


def _summarize_bytes(world: WorldFigures) -> str:
    """Return the bytes in a second over each medium, in one line."""
    if not world.bytes_per_s:
        return "no bytes moved"
    moved = [f"{format_bytes(round(rate))}/s {kind}" for kind, rate in sorted(world.bytes_per_s.items())]
    return "moved: " + ", ".join(moved)


def _draw_legend(*, ascii: bool) -> Line:
    """Draw the line that explains the colours and glyphs of the bars."""
    glyphs = _GLYPHS[ascii]
    return [
        (glyphs[0], COMPUTE), (" compute  ", ""), (glyphs[1], HIDDEN), (" hidden comm  ", ""),
        (glyphs[2], WAITING), (" waiting for a rank  ", ""), (glyphs[3], EXPOSED), (" on the wire", ""),
    ]  # fmt: skip


def _cut_line(line: Line, width: int) -> Line:
    """Cut a line to a width, without blanks at its end."""
    cut: Line = []
    for text, style in line:
        cut.append((text[:width], style))
        width -= len(cut[-1][0])
    while cut and not cut[-1][0].strip():
        cut.pop()
    return [*cut[:-1], (cut[-1][0].rstrip(), cut[-1][1])] if cut else []


def _format_duration(duration_ns: int) -> str:
    """Return a duration with its unit."""
    unit, unit_ns = figure_unit(duration_ns)
    return f"{figure(duration_ns, unit_ns)} {unit}"


def _format_age(age_s: float) -> str:
    """Return an age in hours and minutes, or in minutes and seconds."""
    minutes, seconds = divmod(int(age_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
