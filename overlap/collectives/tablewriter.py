"""Tables in the making: blocks of rows given as numpy arrays that broadcast against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .schedule import COLUMNS, Buffer, Op, Schedule, layout

Column: TypeAlias = NDArray[np.signedinteger] | int
Cells: TypeAlias = tuple[Buffer | NDArray[np.integer], Column]

_MARGINS = {"count": 1, "channel": 0, "group": -1}


class TableWriter:
    """Rows in the making. Blocks may be added in any order; `build` sorts them by step, local rows first."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, NDArray[np.integer]]] = []

    def move(
        self, step: Column, src: Column, dst: Column, source: Cells, target: Cells, *, op: Op = Op.MOVE,
        **margins: Column,
    ) -> None:  # fmt: skip
        """Add rows that overwrite `target` at `dst` with `source` at `src`.

        Args:
            step: Logical time. Like all columns, an array or a number; arrays broadcast against each other.
            src: Rank that reads.
            dst: Rank that writes.
            source: Buffer and first slot read.
            target: Buffer and first slot written.
            op: Whether the rows overwrite, or reduce.
            margins: `count` (default 1), `channel` (0), `group` (-1).
        """
        fixed = {"step": step, "op": int(op), "src": src, "dst": dst}
        cells = {"sbuf": source[0], "sslot": source[1], "dbuf": target[0], "dslot": target[1]}
        columns = {name: np.asarray(value) for name, value in {**fixed, **cells, **_MARGINS, **margins}.items()}
        shape = np.broadcast_shapes(*(column.shape for column in columns.values()))
        self._blocks.append({name: np.broadcast_to(column, shape) for name, column in columns.items()})

    def add(self, step: Column, src: Column, dst: Column, source: Cells, target: Cells, **margins: Column) -> None:
        """Add rows that reduce `source` at `src` into `target` at `dst`; arguments as in `move`."""
        self.move(step, src, dst, source, target, op=Op.ADD, **margins)

    def extend(self, rows: Mapping[str, NDArray[np.integer]]) -> None:
        """Add rows given as the columns of a table."""
        self._blocks.append({name: np.asarray(rows[name]) for name in COLUMNS})

    def build(
        self,
        collective: str,
        algorithm: str,
        size: int,
        *,
        slots_per_block: int = 1,
        scratch: int = 0,
        root: int = 0,
        pairs: tuple[tuple[int, int], ...] = (),
    ) -> Schedule:
        """Return the schedule of all rows so far.

        Args:
            collective: Collective to compute.
            algorithm: Name of the generator.
            size: Ranks in the group.
            slots_per_block: k.
            scratch: Blocks of SCRATCH.
            root: Root of a rooted collective.
            pairs: (src, dst) pairs of a permute.
        """
        columns = {name: self._column(name, dtype) for name, dtype in COLUMNS.items()}
        order = _order(columns["step"], columns["src"] != columns["dst"])
        if order is not None:
            columns = {name: column[order] for name, column in columns.items()}
        return Schedule(
            collective=collective,
            algorithm=algorithm,
            size=size,
            root=root,
            pairs=pairs,
            slots_per_block=slots_per_block,
            blocks=(*layout(collective, size), scratch),
            **columns,  # type: ignore[arg-type]
        )

    def _column(self, name: str, dtype: type[np.integer]) -> NDArray[np.integer]:
        parts = [block[name] for block in self._blocks]
        column = np.empty(sum(part.size for part in parts), dtype)
        start = 0
        for part in parts:
            column[start : start + part.size].reshape(part.shape)[...] = part
            start += part.size
        return column


def _order(step: NDArray[np.integer], remote: NDArray[np.bool_]) -> NDArray[np.intp] | None:
    """Return the stable order by step and phase, or None if the rows have it already."""
    late = (step[1:] < step[:-1]) | ((step[1:] == step[:-1]) & (remote[1:] < remote[:-1]))
    return np.lexsort((remote, step)) if late.any() else None


def adjacent_runs(*ascending: NDArray[np.integer], same: tuple[NDArray[np.integer], ...]) -> NDArray[np.intp]:
    """Return the first rows of runs: each `ascending` column grows by one, each `same` column is constant."""
    # The columns most likely to differ come first, so that tables without runs are done soon.
    continues_run = same[0][1:] == same[0][:-1]
    for column in same[1:]:
        if not continues_run.any():
            break
        continues_run &= column[1:] == column[:-1]
    for column in ascending:
        if not continues_run.any():
            break
        continues_run &= column[1:] - column[:-1] == 1
    return np.flatnonzero(np.concatenate([np.ones(min(len(same[0]), 1), np.bool_), ~continues_run]))


def reverse_scatter(scatter: Schedule) -> Schedule:
    """Return a gather: the messages of a scatter in reverse order and direction, with IN and OUT exchanged.

    Cost: as many steps, messages and bytes as the scatter has.
    """
    local, turned = scatter.src == scatter.dst, np.array([Buffer.OUT, Buffer.IN, Buffer.SCRATCH], np.uint8)
    last = int(scatter.step[~local].max(initial=0))
    rows = {name: getattr(scatter, name) for name in COLUMNS}
    rows |= {"step": np.where(local, 0, last - scatter.step), "src": scatter.dst, "dst": scatter.src}
    rows |= {"sbuf": turned[scatter.dbuf], "sslot": scatter.dslot, "dbuf": turned[scatter.sbuf], "dslot": scatter.sslot}
    table = TableWriter()
    table.extend(rows)
    return table.build("gather", scatter.algorithm, scatter.size, scratch=scatter.blocks[2], root=scatter.root)
