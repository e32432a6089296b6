"""Values between the stages of a pipeline: messages between ranks, or values that stay on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from ..runtime.derived import Checked
from ..runtime.future import Future
from ..runtime.group import Group
from ..timeline.span import RoleName
from .memory_work import users_frame
from .returned import check_boundary_value
from .schedules import Action, ActionKind, PipelineSchedule

if TYPE_CHECKING:
    from ..runtime.calls.shapes import Like
    from ..runtime.stream import Stream
    from .tree import Array

Boundary: TypeAlias = "Like | Mapping[str, Boundary] | tuple[Boundary, ...]"
"""Shape and dtype of the array that passes between two stages, or a tree of these."""


class StagePassing:
    """Passes the outputs and gradients of one batch between the stages of a pipeline.

    Args:
        group: The ranks of the pipeline.
        schedule: The schedule, which says on which rank each stage is.
        boundaries: Shape and dtype of a microbatch's output; item n is that between the stages n and n + 1.
        stream: Stream of the messages.
    """

    def __init__(
        self, group: Group, schedule: PipelineSchedule, boundaries: Sequence[Boundary], stream: str | Stream
    ) -> None:
        self._group, self._schedule, self._boundaries, self._stream = group, schedule, boundaries, stream
        # Values between two stages of this rank, by kind, stage that needs the value, and microbatch.
        self._local_values: dict[tuple[ActionKind, int, int], object] = {}

    def is_own_stage(self, stage: int) -> bool:
        """Whether a stage is on this rank, so that values for it stay here; False for a stage that does not exist."""
        return 0 <= stage < self._schedule.stages and self._schedule.owners[stage] == self._group.rank

    def receive_or_take(self, kind: ActionKind, stage: int, microbatch: int) -> object:
        """Return the input of an action: the future of a receive, or a value that was stored on this rank.

        A stored value is removed.

        Args:
            kind: Forward or backward.
            stage: Stage of the action.
            microbatch: Microbatch of the action.
        """
        if (kind, stage, microbatch) in self._local_values:
            return self._local_values.pop((kind, stage, microbatch))
        source = _source_stage(kind, stage)
        return self._group.recv(
            # Boundary n lies between the stages n and n + 1, whichever of the two the value goes to.
            cast("Like", self._boundaries[min(source, stage)]),
            self._schedule.owners[source],
            self._message_tag(kind, stage, microbatch),
            stream=self._stream,
            name=RoleName(f"{Action(source, kind, microbatch)} to {stage}", "stage"),
            call_site=users_frame(),
        )

    def send_or_store(self, kind: ActionKind, stage: int, microbatch: int, value: object) -> None:
        """Pass a value to the stage that needs it: send it to the rank of that stage, or store it here.

        A value for a stage before the first or after the last is dropped.

        Args:
            kind: Forward or backward.
            stage: Stage that needs the value.
            microbatch: Microbatch of the action.
            value: An array or a tree of arrays, or a future of either.
        """
        if self.is_own_stage(stage):
            self._local_values[kind, stage, microbatch] = value
        elif 0 <= stage < self._schedule.stages:
            self._group.send(
                cast("Array", self._check_boundary(kind, stage, value)),
                self._schedule.owners[stage],
                self._message_tag(kind, stage, microbatch),
                stream=self._stream,
                name=RoleName(f"{Action(_source_stage(kind, stage), kind, microbatch)} to {stage}", "stage"),
                call_site=users_frame(),
            )

    def _check_boundary(self, kind: ActionKind, stage: int, value: object) -> object:
        """Return a future of the same array that fails unless the array is like the boundary at `stage`.

        Trees, and values that are not futures, are returned without a check.
        """
        source = _source_stage(kind, stage)
        like = self._boundaries[min(source, stage)]
        # (shape, dtype) describes one array. A tuple whose last item is a dict, list or tuple describes a tree.
        if not isinstance(value, Future) or not isinstance(like, tuple) or isinstance(like[-1], (dict, list, tuple)):
            return value
        shape, dtype = cast("tuple[int | Sequence[int], Any]", like)
        sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        return Checked(value, partial(check_boundary_value, kind is ActionKind.FORWARD, source, sizes, np.dtype(dtype)))

    def _message_tag(self, kind: ActionKind, stage: int, microbatch: int) -> int:
        """Return a tag that no other message of the batch has: ranks may issue their messages in any order."""
        return (microbatch * self._schedule.stages + stage) * 2 + (kind is ActionKind.BACKWARD)


def _source_stage(kind: ActionKind, stage: int) -> int:
    """Return the stage whose output is the input of an action: the one before in forward, the next in backward."""
    return stage - 1 if kind is ActionKind.FORWARD else stage + 1
