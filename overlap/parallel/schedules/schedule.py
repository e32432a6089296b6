"""The class of a pipeline schedule: the actions of every rank in their order, proved when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...errors import UsageError
from .action import Action, ActionKind
from .proof import peak_activations, prove_schedule
from .timing import Durations, Timing, draw_time_grid, replay_timing


class PipelineSchedule:
    """For every rank of a pipeline, its actions in their order.

    Make one with `schedules.make(name, ...)`, from text, or from your own rows. Rows in which an action is missing or
    repeated, or with which ranks wait for each other forever, are refused.

    Args:
        name: Name of the schedule, for messages.
        rows: The actions of every rank.

    Attributes:
        name: Name of the schedule, for messages.
        rows: The actions of every rank.
        ranks: Number of ranks.
        stages: Number of stages, over all ranks.
        microbatches: Number of microbatches that each batch is cut into.
        owners: The rank of every stage.
        peak_live: For each rank, the most activations that it holds at once, from F to B or W; those of one stage and
            microbatch count as 1.

    Raises:
        ScheduleError: The rows are no valid schedule; the message has all rows, and marks the action at fault.
    """

    stages: int
    microbatches: int
    owners: tuple[int, ...]

    def __init__(self, name: str, rows: Iterable[Sequence[Action]]) -> None:
        self.name = name
        self.rows: tuple[tuple[Action, ...], ...] = tuple(tuple(row) for row in rows)
        self.ranks: int = len(self.rows)
        self.stages, self.microbatches, self.owners = prove_schedule(name, self.rows)
        self.peak_live: tuple[int, ...] = peak_activations(self.rows)

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
        """Whether some stage computes the gradients of its inputs and of its weights separately (I and W)."""
        return any(action.kind is ActionKind.INPUT_GRADIENT for row in self.rows for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending.

        Raises:
            UsageError: The schedule has no such rank.
        """
        if not 0 <= rank < self.ranks:
            raise UsageError(
                f"stages_of: schedule {self.name!r} is for {self.ranks} ranks, from 0 to {self.ranks - 1}, got {rank}"
            )
        return tuple(stage for stage, owner in enumerate(self.owners) if owner == rank)

    def timing(self, durations: Durations | None = None) -> Timing:
        """Return when each action runs, and how long ranks are busy; F, I and W take one unit of time by default."""
        return replay_timing(self.rows, self.owners, durations or Durations())

    def grid(self, durations: Durations | None = None, *, width: int | None = None) -> list[str]:
        """Return the lines of a drawing: a row for each rank, a column for each unit of time; see `draw_time_grid`.

        Args:
            durations: Durations of actions; F, I and W take one unit by default.
            width: Characters in a line: a longer grid continues in further blocks below. None: one block.
        """
        durations = durations or Durations()
        return draw_time_grid(self.rows, self.timing(durations), durations, width=width)

    def text(self) -> str:
        """Return the text form that PyTorch reads and writes: a line for each rank, with its actions between commas."""
        return "\n".join(",".join(map(str, row)) for row in self.rows) + "\n"

    @classmethod
    def parse(cls, text: str, *, name: str = "own") -> PipelineSchedule:
        """Read the text form; empty cells between commas, where PyTorch shows idle time, are skipped.

        Args:
            text: A line for each rank, with its actions between commas.
            name: Name of the schedule, for messages.

        Raises:
            UsageError: A cell is no action.
            ScheduleError: The actions are no valid schedule.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        return cls(name, [[Action.parse(cell.strip()) for cell in line.split(",") if cell.strip()] for line in lines])
