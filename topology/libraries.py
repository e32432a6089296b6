"""Libraries of collectives that come with machines, as records: the schedules of ours that they have too.

A machine file names one of the files in `data/libraries/` by `[collectives.library] use = "neuronx"`, and the parts of
it that differ; or it lists schedules itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .keys import Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The machine's own library. No schedule that it lacks prices a measurement, or is promised to its users."""

    source: str  # as in a figure
    confidence: Literal["A", "B", "C", "D", "E"]  # as in a figure
    algorithms: Texts  # our schedules that it has too, in the names of plans
    operations: Texts = ()  # collectives that this list covers; all if empty
    name: str = "the machine's library"
    chosen: str = ""  # its way of choosing among them
    wires: Texts = ()  # kinds of wires inside nodes that it runs over; any if empty

    def __post_init__(self) -> None:
        if not self.algorithms:
            raise ValueError("algorithms: expected names such as 'ring', found none")

    def covers(self, operation: str) -> bool:
        """Whether the record covers the library's algorithms for an operation."""
        return not self.operations or operation in self.operations

    def runs(self, operation: str, schedules: tuple[str, ...]) -> bool:
        """Whether the library has a schedule of ours, given the names of its phases."""
        return self.covers(operation) and all(schedule in self.algorithms for schedule in schedules)
