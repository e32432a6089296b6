"""The figures under the drawing: a table that folds to the width."""

from __future__ import annotations

from collections.abc import Sequence

from .axis import figure, figure_unit
from .folding import Fold
from .metrics import Breakdown

_TIMES = ("wall", "compute", "hidden", "hid%", "wait", "wire", "queued", "idle")


def table(rows: Sequence[tuple[Fold, Sequence[Breakdown]]], width: int) -> list[str]:
    """Return the lines of the table: of each row the means of its ranks.

    Wall is compute (of which some hides communication), waiting, bytes on the wire, queued and idle, added up. Columns
    that do not fit go into a second block under the first; those that are 0 for all are left out where they may be.
    """
    unit, unit_ns = figure_unit(max(row.wall_ns for _, ranks in rows for row in ranks))
    heads = [f"rank/{unit}", *_TIMES, "spread"]
    columns = [list(column) for column in zip(heads, *(_figures(*row, unit_ns) for row in rows), strict=True)]
    if not any(row.queued_ns for _, ranks in rows for row in ranks):
        columns.pop(heads.index("queued"))
    if all(len(one.ranks) == 1 for one, _ in rows):
        columns.pop()
    padded = [[text.rjust(max(map(len, column))) for text in column] for column in columns]
    lines: list[str] = []
    for block in _blocks(padded, width):
        lines += ["  ".join(texts) for texts in zip(padded[0], *block, strict=True)]
    return lines


def _figures(one: Fold, ranks: Sequence[Breakdown], unit_ns: int) -> list[str]:
    def mean(sum_ns: int) -> str:
        return figure(sum_ns / len(ranks), unit_ns)

    hidden_ns, comm_ns = (sum(getattr(row, name) for row in ranks) for name in ("overlapped_ns", "comm_ns"))
    return [
        one.label,
        mean(sum(row.wall_ns for row in ranks)),
        mean(sum(row.compute_ns for row in ranks)),
        mean(hidden_ns),
        f"{hidden_ns / comm_ns:.0%}" if comm_ns else "n/a",
        mean(sum(row.waiting_ns for row in ranks)),
        mean(sum(row.wire_ns for row in ranks)),
        mean(sum(row.queued_ns for row in ranks)),
        mean(sum(row.idle_ns - row.queued_ns for row in ranks)),
        f"{one.spread:.1%}" if len(ranks) > 1 else "",
    ]


def _blocks(padded: list[list[str]], width: int) -> list[list[list[str]]]:
    """Deal the columns after the first into blocks that fit beside a copy of the first."""
    blocks: list[list[list[str]]] = []
    room = 0
    for column in padded[1:]:
        needed = len(column[0]) + 2
        if not blocks or needed > room:
            blocks.append([])
            room = width - len(padded[0][0])
        blocks[-1].append(column)
        room -= needed
    return blocks
