"""Writer of tables: rows are added in blocks, as numpy arrays that broadcast against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .schedule import COLUMNS, Buffer, Op, Schedule, block_counts

Column: TypeAlias = NDArray[np.signedinteger] | int
Cells: TypeAlias = tuple[Buffer | NDArray[np.integer], Column]
"""Buffer and first slot of each row; numbers or arrays."""

_MARGINS = {"count": 1, "channel": 0, "group": -1}


class TableWriter:
    """Collects the rows of a table. Add rows in any order: `build` sorts them by step, local rows of a step first."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, NDArray[np.integer]]] = []

    def add_moves(
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
            op: MOVE overwrites the target, ADD reduces into it.
            margins: Further columns: `count` (default 1), `channel` (0), `group` (-1); see `Schedule`.
        """
        fixed = {"step": step, "op": int(op), "src": src, "dst": dst}
        cells = {"sbuf": source[0], "sslot": source[1], "dbuf": target[0], "dslot": target[1]}
        columns = {name: np.asarray(value) for name, value in {**fixed, **cells, **_MARGINS, **margins}.items()}
        shape = np.broadcast_shapes(*(column.shape for column in columns.values()))
        self._blocks.append({name: np.broadcast_to(column, shape) for name, column in columns.items()})

    def add_reductions(
        self, step: Column, src: Column, dst: Column, source: Cells, target: Cells, **margins: Column
    ) -> None:
        """Add rows that reduce `source` at `src` into `target` at `dst`; arguments as in `add_moves`."""
        self.add_moves(step, src, dst, source, target, op=Op.ADD, **margins)

    def extend(self, rows: Mapping[str, NDArray[np.integer]]) -> None:
        """Add rows given as all the columns of a table, by name."""
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
            slots_per_block: Slots of a block.
            scratch: Blocks of SCRATCH.
            root: Root of a rooted collective.
            pairs: (src, dst) pairs of a permute.
        """
        columns = {name: self._join_column(name, dtype) for name, dtype in COLUMNS.items()}
        order = _sort_indexes(columns["step"], columns["src"] != columns["dst"])
        if order is not None:
            columns = {name: column[order] for name, column in columns.items()}
        return Schedule(
            collective=collective,
            algorithm=algorithm,
            size=size,
            root=root,
            pairs=pairs,
            slots_per_block=slots_per_block,
            blocks=(*block_counts(collective, size), scratch),
            **columns,  # type: ignore[arg-type]
        )

    def _join_column(self, name: str, dtype: type[np.integer]) -> NDArray[np.integer]:
        """Join a column of all blocks, converted to `dtype`."""
        parts = [block[name] for block in self._blocks]
        column = np.empty(sum(part.size for part in parts), dtype)
        start = 0
        for part in parts:
            column[start : start + part.size].reshape(part.shape)[...] = part
            start += part.size
        return column


def _sort_indexes(step: NDArray[np.integer], remote: NDArray[np.bool_]) -> NDArray[np.intp] | None:
    """Return the indexes that sort rows by step, local rows of a step first; None if the rows are sorted already."""
    late = (step[1:] < step[:-1]) | ((step[1:] == step[:-1]) & (remote[1:] < remote[:-1]))
    return np.lexsort((remote, step)) if late.any() else None


def adjacent_runs(*ascending: NDArray[np.integer], same: tuple[NDArray[np.integer], ...]) -> NDArray[np.intp]:
    """Return the first row of each run: within a run, `ascending` columns grow by one and `same` columns are constant.

    adjacent_runs([4, 5, 7, 8], same=([0, 0, 0, 1],)) returns [0, 2, 3].

    Args:
        ascending: Columns that grow by one within a run.
        same: Columns that are constant within a run; at least one.
    """
    rows = len(same[0])
    continues_run = np.ones(max(rows - 1, 0), np.bool_)
    # Columns most likely to differ come first, so that the loop ends early in tables without runs.
    for column, grows in [*((column, False) for column in same), *((column, True) for column in ascending)]:
        if not continues_run.any():
            break
        continues_run &= np.diff(column) == 1 if grows else column[1:] == column[:-1]
    return np.flatnonzero(np.append(True, ~continues_run)[:rows])


def reverse_scatter(scatter: Schedule) -> Schedule:
    """Return a gather: the messages of a scatter in reverse order and direction, with IN and OUT exchanged.

    Cost: as many steps, messages and bytes as the scatter has.
    """
    local, turned = scatter.src == scatter.dst, np.array([Buffer.OUT, Buffer.IN, Buffer.SCRATCH], np.uint8)
    # Step of the scatter's last message, which becomes the first message of the gather.
    last = int(scatter.step[~local].max(initial=0))
    rows = {name: getattr(scatter, name) for name in COLUMNS}
    # Local rows get step 0: they copy blocks into place, which depends on no message.
    rows |= {"step": np.where(local, 0, last - scatter.step), "src": scatter.dst, "dst": scatter.src}
    rows |= {"sbuf": turned[scatter.dbuf], "sslot": scatter.dslot, "dbuf": turned[scatter.sbuf], "dslot": scatter.sslot}
    table = TableWriter()
    table.extend(rows)
    _, _, scratch = scatter.blocks
    return table.build("gather", scatter.algorithm, scatter.size, scratch=scratch, root=scatter.root)
