"""The layout of a program that touches little of the SCRATCH that its table speaks of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ...collectives.program import Extent, Kind, Program
from ...collectives.schedule import Buffer
from .program_memory import Layout

Runs = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ThinLayout(Layout):
    """The same, but of SCRATCH only the slots `runs` exist, one behind the other; they are (first, stop) each."""

    runs: Runs

    def elements(self) -> int:
        """Return how many elements SCRATCH needs."""
        return sum(self._offset(stop) - self._offset(first) for first, stop in self.runs)

    def bounds(self, extent: Extent) -> tuple[int, int]:
        """Return the first element of an extent, and the one after its last."""
        start, stop = Layout.bounds(self, extent)
        if extent.buffer is not Buffer.SCRATCH:
            return start, stop
        at = bisect_right(self.runs, (extent.slot + 1, 0)) - 1
        before = sum(self._offset(stop) - self._offset(first) for first, stop in self.runs[:at])
        moved = before - self._offset(self.runs[at][0])
        return start + moved, stop + moved


def runs_touched(program: Program) -> Runs:
    """Return the slots of SCRATCH that a rank's program reads or writes, as (first, stop) of what lies together."""
    slots = sorted({slot for extent in _touched(program) for slot in range(extent.slot, extent.slot + extent.count)})
    runs: Runs = []
    for slot in slots:
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs


def _touched(program: Program) -> Iterator[Extent]:
    for queue in program.queues:
        for step in queue:
            mine = (step.src,) if step.kind is Kind.SEND else (step.dst, step.base)
            for extent in (*mine, step.src) if step.kind is Kind.LOCAL else mine:
                if extent is not None and extent.buffer is Buffer.SCRATCH:
                    yield extent
