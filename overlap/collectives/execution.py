"""Execution of a whole table on fingerprints, one phase at a time, for the proof."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .batch import Batch, cut_local_phases, expand_cells
from .explain import hazard_error, wrong_result_error
from .memory import Bases, BufferPiece, ReplayMemory, SlotLayout, Words
from .pattern import Ints
from .rules import Flags, check_rows
from .schedule import IN_RANK_ORDER, Buffer, Op, Schedule

# Cells handled between two looks at the table: their columns stay in the second-level cache.
_CHUNK_CELLS = 1 << 15


class Replay:
    """Carries out a schedule for all ranks, on several memories side by side, and checks each row for hazards.

    Args:
        schedule: Schedule to carry out.
        layout: Positions of the schedule's slots in memory.
        memories: Memories with the inputs of all ranks; `run` writes the results into them.
    """

    schedule: Schedule
    layout: SlotLayout
    memories: list[ReplayMemory]

    def __init__(self, schedule: Schedule, layout: SlotLayout, memories: list[ReplayMemory]) -> None:
        self.schedule, self.layout, self.memories = schedule, layout, memories
        # Last row that wrote each cell, plus 1.
        self._stamp = np.zeros(layout.cell_count(layout.shared), np.int32)
        # Step of the local rows that were checked last, and the cells that they read. Step -1: the last rows checked
        # were remote ones.
        self._local_reads: tuple[int, Ints] = (-1, np.empty(0, np.int64))

    def run(self, bounds: Ints) -> None:
        """Check and carry out all phases.

        Args:
            bounds: First row of each phase, then the number of rows.

        Raises:
            ScheduleError: At the first row that breaks a rule.
        """
        if not len(self.schedule):
            return
        bounds, cells = cut_local_phases(self.schedule, bounds)
        at = 0
        while at < len(bounds) - 1:
            upto = max(at + 1, int(np.searchsorted(cells, cells[at] + _CHUNK_CELLS, side="right")) - 1)
            self._run_phases(bounds[at : upto + 1])
            at = upto

    def _run_phases(self, bounds: Ints) -> None:
        """Check and carry out consecutive phases; `bounds` has the first row of each, then the end of the last."""
        check_rows(self.schedule, int(bounds[0]), int(bounds[-1]))
        batch = expand_cells(self.schedule, self.layout, bounds)
        for phase, first in enumerate(bounds[:-1].tolist()):
            self._run_phase(batch, slice(batch.ends[phase], batch.ends[phase + 1]), first)

    def _run_phase(self, batch: Batch, cells: slice, first: int) -> None:
        """Check and carry out one phase: the entries `cells` of `batch`, whose first row in the table is `first`.

        Several additions to one cell are carried out one after the other, in waves: each wave adds to a cell once.
        """
        waves = self._check_hazards(batch, cells, first)
        if waves is None:
            adds = np.flatnonzero(batch.add[cells])
            # No cell is written twice: one wave has all additions.
            waves = [adds] if len(adds) else []
        read, write, sbuf, dbuf = batch.read[cells], batch.write[cells], batch.sbuf[cells], batch.dbuf[cells]
        moves, lower = np.flatnonzero(~batch.add[cells]), batch.lower[cells]
        for memory in self.memories:
            source, target = (
                _to_memory_positions(read, sbuf, memory.bases),
                _to_memory_positions(write, dbuf, memory.bases),
            )
            if len(moves) == len(read):
                memory.move(source, target)
            elif len(moves):
                memory.move(source[moves], target[moves])
            for wave in waves:
                memory.add(source[wave], target[wave], lower[wave])

    def _check_hazards(self, batch: Batch, cells: slice, first: int) -> list[NDArray[np.intp]] | None:
        """Refuse hazards within a phase, with a `ScheduleError`. Arguments: see `_run_phase`.

        Returns None if no cell is written twice; otherwise the additions in waves, as indexes of entries of the phase.
        """
        stamp, waves, step, row = self._stamp, None, int(self.schedule.step[first]), batch.row[cells]
        read = _to_memory_positions(batch.read[cells], batch.sbuf[cells], self.layout.shared)
        write = _to_memory_positions(batch.write[cells], batch.dbuf[cells], self.layout.shared)
        stamp[write] = row + 1
        # After several writes to one cell only the last row's number is in its stamp.
        if (stamp[write] != row + 1).any():
            waves = self._split_into_waves(row, write)
        seen = stamp[read]
        # A row of this phase has stamped a cell that this phase reads. In shared memory a local row may copy a cell to
        # itself: that changes nothing.
        changed = (seen > first) & ((seen != row + 1) | (read != write))
        if changed.any():
            self._raise_if_bad(np.isin(write, read[changed]), row, "another row of its step reads")
        local_step, local_reads = self._local_reads
        is_local = bool(self.schedule.src[first] == self.schedule.dst[first])
        if local_step == step and not is_local and (stamp[local_reads] > first).any():
            self._raise_if_bad(np.isin(write, local_reads), row, "a local row of its step reads")
        if is_local:
            # A long phase of local rows was cut: collect the reads of all its parts.
            earlier_reads = local_reads if local_step == step else read[:0]
            self._local_reads = step, np.concatenate([earlier_reads, read[read != write]])
        else:
            self._local_reads = -1, read[:0]
        return waves

    def _split_into_waves(self, row: Ints, write: Ints) -> list[NDArray[np.intp]]:
        """Return the additions in waves: no wave writes a cell twice, and the writes to one cell keep their order.

        If rows 0, 1 and 2 add to cells 5, 5 and 7, the waves are [0, 2] and [1]. Raises `ScheduleError` if several rows
        write one cell, and they are not all ADDs of one group.
        """
        order = np.argsort(write, kind="stable")
        # Sorted by cell: whether an entry writes the same cell as the entry before it.
        again = np.append(False, write[order][1:] == write[order][:-1])
        group, op = self.schedule.group[row[order]], self.schedule.op[row[order]]
        together = (group[1:] == group[:-1]) & (group[1:] >= 0) & (op[1:] == Op.ADD) & (op[:-1] == Op.ADD)
        self._raise_if_bad(again & ~np.append(True, together), row[order], "another row of its step writes")
        firsts = np.flatnonzero(~again)
        # The n-th write of a cell is in wave n.
        nth = np.arange(len(write)) - np.repeat(firsts, np.diff(np.append(firsts, len(write))))
        adds = op == Op.ADD
        order, nth = order[adds], nth[adds]
        by_wave = np.argsort(nth, kind="stable")
        return np.split(order[by_wave], np.cumsum(np.bincount(nth))[:-1])

    def _raise_if_bad(self, bad: Flags, row: Ints, conflict: str) -> None:
        """Raise a `ScheduleError` for the first row with a bad cell, if any. `conflict` is the use by another row."""
        if bad.any():
            raise hazard_error(self.schedule, int(row[int(bad.argmax())]), conflict)

    def check_results(self) -> None:
        """Compare OUT of all ranks with the result that the collective defines.

        Raises:
            ScheduleError: If a rank's result is wrong, or differs between ranks in the last bit.
        """
        by_rank = self.schedule.algorithm in IN_RANK_ORDER
        firsts = [
            self._first_rank_result(memory) if memory.ordered and not by_rank else None for memory in self.memories
        ]
        faults: dict[int, tuple[int, int]] = {}
        for piece in self.layout.buffer_pieces(Buffer.OUT):
            for number, (memory, first) in enumerate(zip(self.memories, firsts, strict=True)):
                fault = None if number in faults else self._find_wrong_value(memory, first, piece)
                if fault is not None:
                    faults[number] = fault
        if faults:
            # The first memory's fault: a wrong sum explains more than a wrong order of operands.
            raise wrong_result_error(self.schedule, *faults[min(faults)])

    def _first_rank_result(self, memory: ReplayMemory) -> Words:
        """Return the OUT of rank 0, one value for each slot."""
        slot = np.arange(self.layout.lines, dtype=np.int32)
        values: Words = memory.values[memory.bases[Buffer.OUT] + self.layout.find_cells(np.zeros_like(slot), slot)]
        return values

    def _find_wrong_value(
        self, memory: ReplayMemory, first: Words | None, piece: BufferPiece
    ) -> tuple[int, int] | None:
        """Return the first (rank, slot) of a piece of OUT that holds a wrong value; None if all values are right.

        `first` is the result of rank 0, which all ranks must have; None: compare with the collective's definition.
        """
        start = memory.bases[Buffer.OUT] + piece.cells.start
        cells = slice(start, start + len(piece.rank))
        for index, fingerprint in enumerate(memory.prints):
            if first is not None:
                expected = first[piece.slot]
            else:
                find = fingerprint.fold_in_order if memory.ordered else fingerprint.expected_values
                expected = find(piece.rank, piece.slot)
            wrong = memory.cell_values(index)[cells] != expected
            if wrong.any():
                wrong &= piece.real
                if self.schedule.collective in ("reduce", "gather"):
                    # Only the root has a result.
                    wrong &= piece.rank == self.schedule.root
            if wrong.any():
                at = int(wrong.argmax())
                return int(piece.rank[at]), int(piece.slot[at])
        return None


def _to_memory_positions(cells: Ints, buffer: NDArray[np.uint8], bases: Bases) -> Ints:
    """Return positions in a whole memory of cells that count from the first cell of their buffers."""
    # Usually all cells are in one buffer, and have one base.
    alike = (buffer == buffer[0]).all()
    based: Ints = cells + (np.intp(bases[buffer[0]]) if alike else np.array(bases, np.intp)[buffer])
    return based
