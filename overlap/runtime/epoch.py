"""Epoch of a world that goes on after losses, as one rank has it, with the memory that outlives the epoch."""

from dataclasses import dataclass, field
from typing import Any, Protocol


class Survivor(Protocol):
    """State in memory that goes on after a loss, such as a model."""

    def report(self) -> int:
        """Return the greatest step that all ranks have prepared; nothing is applied after this call."""

    def advance(self, step: int) -> None:
        """Apply the prepared steps of this rank, up to a step that all ranks have prepared."""


@dataclass(slots=True, kw_only=True)
class Epoch:
    """Epoch of a world, and the memory of a rank: `rank.epoch`.

    With `--survive` the processes that live meet again after a loss, and call `main` again, in a world of the next
    epoch.
    """

    survives: bool = False  # Whether another epoch follows the loss of a process
    number: int = 0  # 0 at first, then the number of losses so far that have ended an epoch
    step: int = 0  # The last step that is applied on all ranks: training goes on after it
    # Processes of this world, by their numbers in the first one; empty without `--survive`.
    members: tuple[int, ...] = ()
    # Values that outlive the epoch on this rank, by names of the program.
    memory: dict[str, Any] = field(default_factory=dict)
    # The model whose steps the ranks agree on.
    survivor: Survivor | None = None
