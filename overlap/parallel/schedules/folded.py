"""Schedules whose stages go down the ranks and up again, like a V: rank r of p has the stages r and 2p-1-r.

So the first rank has the first stage and the last one, with the loss. The last rank has the two middle stages, and
needs no message between them.
"""

from __future__ import annotations

from collections import deque

from ...errors import UsageError
from .action import Action, ActionKind
from .schedule import PipelineSchedule

F, B, I, W = ActionKind  # noqa: E741


def zb_v(ranks: int, microbatches: int) -> PipelineSchedule:
    """1F1B over the V, with weight gradients where a rank would be idle (ZB-V, arXiv 2401.10241).

    If forward, input gradient and weight gradient take equal time, and there are at least 2 * ranks - 1 microbatches,
    no rank is idle between its first and its last action; over the whole step each rank is idle for the time of
    ranks - 1 actions. A rank holds up to 2 * ranks activations, each of one of its two stages: as much memory as the
    first rank of 1F1B, whose stages are twice as large.
    """
    return PipelineSchedule("zb-v", [_zb_v_row(rank, ranks, microbatches) for rank in range(ranks)])


def dualpipe_v(ranks: int, microbatches: int) -> PipelineSchedule:
    """DualPipe over the V: forwards of one microbatch paired with backwards of another (arXiv 2412.19437, cut in half).

    The forward and the backward of a pair run one after the other here, so that the messages of one travel while the
    other computes. If forward, input gradient and weight gradient take equal time, a rank is idle for the time of
    ranks - 1 actions. It holds up to 2 * ranks + 1 activations, each of one of its two stages.

    Raises:
        UsageError: There are fewer than 2 * ranks microbatches.
    """
    if microbatches < 2 * ranks:
        raise UsageError(f"microbatches: dualpipe-v takes at least {2 * ranks}, two for each rank; got {microbatches}")
    return PipelineSchedule("dualpipe-v", [_dualpipe_v_row(rank, ranks, microbatches) for rank in range(ranks)])


class _FoldedRow:
    """A rank's list of actions while it is made: each new action is of the next microbatch of that stage and kind.

    Args:
        rank: Rank of the row.
        ranks: Number of ranks of the pipeline.
        microbatches: Number of microbatches; actions of later ones are counted, but not appended.

    Attributes:
        down: The rank's stage on the way down the V.
        up: The rank's stage on the way up.
        actions: The actions so far.
    """

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.actions: list[Action] = []
        self._microbatches = microbatches
        self._counts: dict[tuple[int, ActionKind], int] = {}  # actions so far, by stage and kind
        self._delayed: deque[Action] = deque()  # weight gradients of split backwards

    def add_next_actions(self, stage: int, *kinds: ActionKind) -> None:
        """Append the action of the next microbatch, of each kind, at a stage; after the last microbatch, only count."""
        for kind in kinds:
            number = self.action_count(stage, kind)
            self._counts[stage, kind] = number + 1
            if number < self._microbatches:
                self.actions.append(Action(stage, kind, number))

    def action_count(self, stage: int, kind: ActionKind) -> int:
        """Return the number of actions of a kind at a stage so far, including those after the last microbatch."""
        return self._counts.get((stage, kind), 0)

    def add_backward(self, stage: int, *, split: bool) -> None:
        """Append the next backward of a stage: B, or with `split` I; `add_weight_gradients` appends its W later."""
        number = self.action_count(stage, B)
        self._counts[stage, B] = number + 1
        self.actions.append(Action(stage, I if split else B, number))
        if split:
            self._delayed.append(Action(stage, W, number))

    def add_weight_gradients(self, times: int = 1) -> None:
        """Append the W of the oldest `times` split backwards; there must be that many without one."""
        self.actions += [self._delayed.popleft() for _ in range(times)]


def _zb_v_row(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return a rank's row of ZB-V, as torch's ScheduleZBVZeroBubble makes it, for any number of microbatches.

    With fewer than 2 * ranks - 1 microbatches, it is the row for 2 * ranks - 1 without the actions of the others.
    """
    row, forwards = _FoldedRow(rank, ranks, microbatches), max(microbatches, 2 * ranks - 1)
    down, up, remaining_ranks = row.down, row.up, ranks - rank
    # Forwards until the first microbatch has come down and up to this rank, then both stages in turn.
    row.add_next_actions(down, *[F] * (2 * remaining_ranks - 1))
    for _ in range(rank):
        row.add_next_actions(up, F)
        row.add_next_actions(down, F)
    for _ in range(remaining_ranks):
        row.add_next_actions(up, F, I, W)
    # The steady state: one forward and one backward of either stage, as long as there are forwards.
    while min(row.action_count(down, F), row.action_count(up, F)) < forwards:
        row.add_next_actions(down, *[F] * (row.action_count(down, F) < forwards), I, W)
        row.add_next_actions(up, F, I, W)
    for _ in range(rank):
        row.add_next_actions(down, I)
        row.add_next_actions(up, I)
    for _ in range(remaining_ranks):
        row.add_next_actions(down, I, W)
    # The remaining weight gradients, for which no other action waits.
    row.add_next_actions(up, *[W] * (forwards - row.action_count(up, W)))
    row.add_next_actions(down, *[W] * (forwards - row.action_count(down, W)))
    return row.actions


def _dualpipe_v_row(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return a rank's row of DualPipe-V, in the eight phases of deepseek-ai/DualPipe (dualpipev.py).

    Each loop, and each call outside of loops, is one phase. There must be at least 2 * ranks microbatches.
    """
    row, ranks_below, turn = _FoldedRow(rank, ranks, microbatches), ranks - rank - 1, rank + 1
    down, up = row.down, row.up
    row.add_next_actions(down, *[F] * (2 * ranks_below))
    for _ in range(turn):
        row.add_next_actions(down, F)
        row.add_next_actions(up, F)
    for _ in range(ranks_below):
        row.add_backward(up, split=True)
        row.add_weight_gradients()
        row.add_next_actions(up, F)
    for _ in range(microbatches - 2 * ranks + turn):
        row.add_next_actions(down, F)
        row.add_backward(up, split=False)
        row.add_next_actions(up, F)
        row.add_backward(down, split=False)
    for _ in range(ranks_below):
        row.add_backward(up, split=False)
        row.add_next_actions(up, F)
        row.add_backward(down, split=False)
    for number in range(2 * turn):  # backwards of both stages in turn; in the second half W is delayed
        row.add_backward(down if number % 2 else up, split=number >= turn)
    for _ in range(ranks_below):
        row.add_weight_gradients()
        row.add_backward(down, split=True)
    row.add_weight_gradients(turn)
    return row.actions
