"""Epochs: with `--survive`, each world between two losses of processes; and memory of a rank that outlives them."""

from dataclasses import dataclass, field
from typing import Any, Protocol


class Survivor(Protocol):
    """A model, or other state in memory, that goes on after the loss of a process."""

    def report(self) -> int:
        """Return the last step that all ranks are known to have prepared; none is applied until `advance`."""

    def advance(self, step: int) -> None:
        """Apply the prepared steps of this rank up to `step`, which all ranks have prepared."""


@dataclass(slots=True, kw_only=True)
class Epoch:
    """The present epoch, and memory of this rank that outlives it: `rank.epoch`.

    With `--survive`, after the loss of a process the others join in a new world, the next epoch, and call `main` again.
    """

    survives: bool = False  # Whether another epoch follows the loss of a process
    number: int = 0  # 0 at first, then the number of losses so far that have ended an epoch
    step: int = 0  # The last step that is applied on all ranks: training goes on after it
    # Processes of this world, by their numbers in the first one; empty without `--survive`.
    members: tuple[int, ...] = ()
    # Values that outlive the epoch on this rank, by names of the program.
    memory: dict[str, Any] = field(default_factory=dict)
    # The model; after a loss the ranks agree on the step from which it goes on.
    survivor: Survivor | None = None

    def enter(self, number: int, step: int, members: tuple[int, ...]) -> None:
        """Enter the next epoch, and let the model apply its steps up to the one from which all ranks go on.

        Args:
            number: Number of the epoch.
            step: The last step that is applied on all ranks.
            members: Processes of the epoch, by their numbers in the first one.
        """
        self.number, self.step, self.members = number, step, members
        if self.survivor is not None:
            self.survivor.advance(step)
