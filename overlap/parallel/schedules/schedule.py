"""A pipeline schedule: the actions of every rank in their order. Data, proved when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...errors import UsageError
from .action import Action, ActionKind
from .proof import peak_live, prove
from .timing import Durations, Timing, replay, time_grid


class PipelineSchedule:
    """For every rank of a pipeline, its actions in their order.

    Make one with `schedules.make(name, ...)`, from text, or from rows of your own. Rows that miss or repeat an action,
    or with which ranks wait for each other without end, make no schedule.

    Attributes:
        name: For messages.
        rows: The actions of every rank.
        ranks: How many ranks there are.
        stages: How many stages there are, over all ranks.
        microbatches: Into how many each batch is cut.
        owners: The rank of every stage.
        peak_live: For every rank, how many activations it holds at most, each of one microbatch at one stage: from its
            F to its B or W.

    Raises:
        ScheduleError: If the rows make no schedule; the message has all rows, and marks the place.
    """

    stages: int
    microbatches: int
    owners: tuple[int, ...]

    def __init__(self, name: str, rows: Iterable[Sequence[Action]]) -> None:
        self.name = name
        self.rows: tuple[tuple[Action, ...], ...] = tuple(tuple(row) for row in rows)
        self.ranks: int = len(self.rows)
        self.stages, self.microbatches, self.owners = prove(name, self.rows)
        self.peak_live: tuple[int, ...] = peak_live(self.rows)

    def __repr__(self) -> str:
        return (
            f"<PipelineSchedule {self.name}: {self.ranks} ranks, {self.stages} stages, "
            f"{self.microbatches} microbatches>"
        )

    def __str__(self) -> str:
        return "\n".join(self.grid())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineSchedule) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(self.rows)

    @property
    def splits_backward(self) -> bool:
        """Whether a stage computes the gradients of its inputs and of its weights apart (I and W)."""
        return any(action.kind is ActionKind.INPUT_GRADIENT for row in self.rows for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending.

        Raises:
            UsageError: If the schedule has no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise UsageError(
                f"stages_of: schedule {self.name!r} is for {self.ranks} ranks, from 0 to {self.ranks - 1}, got {rank}"
            )
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    def timing(self, durations: Durations | None = None) -> Timing:
        """Return when each action runs, and the idle time of ranks; F, I and W take one unit by default."""
        return replay(self.rows, self.owners, durations or Durations())

    def grid(self, durations: Durations | None = None, *, width: int | None = None) -> list[str]:
        """Return the lines of a drawing, ranks by time; the rest of lines longer than `width` characters goes below."""
        durations = durations or Durations()
        return time_grid(self.rows, self.timing(durations), durations, width=width)

    def text(self) -> str:
        """Return the text form: a line for each rank, its actions with commas, as PyTorch reads and writes them."""
        return "\n".join(",".join(map(str, row)) for row in self.rows) + "\n"

    @classmethod
    def parse(cls, text: str, *, name: str = "own") -> PipelineSchedule:
        """Read the text form; empty cells, which mean that a rank is idle there, are passed over.

        Raises:
            UsageError: If a cell is no action.
            ScheduleError: If the actions make no schedule.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        return cls(name, [[Action.parse(cell.strip()) for cell in line.split(",") if cell.strip()] for line in lines])
