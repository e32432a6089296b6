"""Schedules of stages that go down the ranks and up again: rank r of p has the stages r and 2p-1-r, like a V.

So the first rank has the loss too, and no message leaves the rank at the turn.
"""

from __future__ import annotations

from collections import deque

from ...errors import UsageError
from .action import Action, ActionKind
from .schedule import PipelineSchedule

F, B, I, W = ActionKind  # noqa: E741


def zb_v(ranks: int, microbatches: int) -> PipelineSchedule:
    """1F1B over the V, with weight gradients where a rank would be idle (ZB-V, arXiv 2401.10241).

    Of F, I and W that take as long as each other, and m >= 2p-1, no rank is idle between its first action and its last;
    from the first start anywhere to the last end, each is for p-1 of them. A rank holds up to 2p activations of a
    stage, which is half of its part: as much as the first rank of 1F1B.
    """
    return PipelineSchedule("zb-v", [_zb_v_row(rank, ranks, microbatches) for rank in range(ranks)])


def dualpipe_v(ranks: int, microbatches: int) -> PipelineSchedule:
    """DualPipe over the V: forwards of one microbatch beside backwards of another (arXiv 2412.19437, cut in half).

    The forward and the backward of a pair follow each other here, so that the messages of one travel while the other
    computes. If F, I and W take equally long, a rank is idle for p-1 of these times. It holds up to 2p+1 activations of
    a stage.

    Raises:
        UsageError: If there are less than 2p microbatches.
    """
    if microbatches < 2 * ranks:
        raise UsageError(f"microbatches: dualpipe-v takes at least {2 * ranks}, two for each rank; got {microbatches}")
    return PipelineSchedule("dualpipe-v", [_dualpipe_v_row(rank, ranks, microbatches) for rank in range(ranks)])


class _FoldedRow:
    """The actions of a rank as they are appended: each the next microbatch of its kind and stage.

    Args:
        rank: Rank of the row.
        ranks: Ranks of the pipeline.
        most: Microbatches after which nothing is appended any more.
    """

    def __init__(self, rank: int, ranks: int, most: int) -> None:
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.actions: list[Action] = []
        self._most = most
        self._counts: dict[tuple[int, ActionKind], int] = {}
        self._delayed: deque[Action] = deque()  # weight gradients of split backwards

    def add_next(self, stage: int, *kinds: ActionKind) -> None:
        """Append the next microbatch of each kind at a stage; after the last one, only count."""
        for kind in kinds:
            number = self.count(stage, kind)
            self._counts[stage, kind] = number + 1
            if number < self._most:
                self.actions.append(Action(stage, kind, number))

    def count(self, stage: int, kind: ActionKind) -> int:
        """Return the number of actions of a kind at a stage so far, including those after the last microbatch."""
        return self._counts.get((stage, kind), 0)

    def add_backward(self, stage: int, *, split: bool) -> None:
        """Append the next backward of a stage; `add_weight_gradients` appends the second half of a split one later."""
        number = self.count(stage, B)
        self._counts[stage, B] = number + 1
        self.actions.append(Action(stage, I if split else B, number))
        if split:
            self._delayed.append(Action(stage, W, number))

    def add_weight_gradients(self, times: int = 1) -> None:
        """Append the oldest delayed weight gradients of split backwards."""
        self.actions += [self._delayed.popleft() for _ in range(times)]


def _zb_v_row(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return a rank's row of ZB-V, as torch's ScheduleZBVZeroBubble makes it, for any number of microbatches."""
    row, forwards = _FoldedRow(rank, ranks, microbatches), max(microbatches, 2 * ranks - 1)
    down, up, remaining_ranks = row.down, row.up, ranks - rank
    row.add_next(down, *[F] * (2 * remaining_ranks - 1))
    for _ in range(rank):
        row.add_next(up, F)
        row.add_next(down, F)
    for _ in range(remaining_ranks):
        row.add_next(up, F, I, W)
    while min(row.count(down, F), row.count(up, F)) < forwards:
        row.add_next(down, *[F] * (row.count(down, F) < forwards), I, W)
        row.add_next(up, F, I, W)
    for _ in range(rank):
        row.add_next(down, I)
        row.add_next(up, I)
    for _ in range(remaining_ranks):
        row.add_next(down, I, W)
    row.add_next(up, *[W] * (forwards - row.count(up, W)))
    row.add_next(down, *[W] * (forwards - row.count(down, W)))
    return row.actions


def _dualpipe_v_row(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return a rank's row of DualPipe-V, in the eight phases of deepseek-ai/DualPipe (dualpipev.py)."""
    row, ranks_below, turn = _FoldedRow(rank, ranks, microbatches), ranks - rank - 1, rank + 1
    down, up = row.down, row.up
    row.add_next(down, *[F] * (2 * ranks_below))
    for _ in range(turn):
        row.add_next(down, F)
        row.add_next(up, F)
    for _ in range(ranks_below):
        row.add_backward(up, split=True)
        row.add_weight_gradients()
        row.add_next(up, F)
    for _ in range(microbatches - 2 * ranks + turn):
        row.add_next(down, F)
        row.add_backward(up, split=False)
        row.add_next(up, F)
        row.add_backward(down, split=False)
    for _ in range(ranks_below):
        row.add_backward(up, split=False)
        row.add_next(up, F)
        row.add_backward(down, split=False)
    for number in range(2 * turn):  # the second half of them without weights' gradients, which follow later
        row.add_backward(down if number % 2 else up, split=number >= turn)
    for _ in range(ranks_below):
        row.add_weight_gradients()
        row.add_backward(down, split=True)
    row.add_weight_gradients(turn)
    return row.actions
