"""The collective libraries of machines' vendors, as records: which of our schedules they have, too.

A machine file refers to a file in `data/libraries/` by `[collectives.library] use = "neuronx"`, and may replace parts
of it; or it lists schedules itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .keys import Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The collective library of the machine's vendor. Predictions for its users use only schedules that it has."""

    source: str  # as in `Figure`
    confidence: Literal["A", "B", "C", "D", "E"]  # as in `Figure`
    algorithms: Texts  # names of our schedules that the library has, too
    operations: Texts = ()  # collectives for which `algorithms` is known; all collectives if empty
    name: str = "the machine's library"
    chosen: str = ""  # how the library chooses a schedule, in words
    wires: Texts = ()  # kinds of wires inside a node over which the library runs; any if empty

    def __post_init__(self) -> None:
        if not self.algorithms:
            raise ValueError("algorithms: expected names such as 'ring', found none")

    def lists_schedules_of(self, operation: str) -> bool:
        """Whether the library's schedules for a collective are known; `algorithms` lists them then."""
        return not self.operations or operation in self.operations

    def runs(self, operation: str, schedules: tuple[str, ...]) -> bool:
        """Whether the library is known to have a schedule for a collective.

        Args:
            operation: Name of the collective.
            schedules: Names of the schedules of all phases.
        """
        return self.lists_schedules_of(operation) and all(schedule in self.algorithms for schedule in schedules)
