"""One action of a rank in a pipeline schedule, such as "2F0", the text form of PyTorch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from ...errors import UsageError

_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


class ActionKind(StrEnum):
    """The kind of compute of one microbatch at one stage.

    Papers use different letters: the zero-bubble paper (arXiv 2401.10241) calls our I "B".
    """

    FORWARD = "F"
    BACKWARD = "B"  # I and W in one compute
    INPUT_GRADIENT = "I"  # gradient of the stage's input
    WEIGHT_GRADIENT = "W"  # gradients of the stage's weights


class Action(NamedTuple):
    """One compute of one microbatch at one stage."""

    stage: int  # From 0, counted over all ranks
    kind: ActionKind  # Kind of compute
    microbatch: int  # From 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form, such as "2F0": stage 2, forward, microbatch 0.

        Raises:
            UsageError: The text has another form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UsageError(
                f"text: {text!r} is no action; one is a stage, F, B, I or W, and a microbatch, such as 2F0"
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    def needs(self, last_stage: int) -> tuple[tuple[Action, ...], ...]:
        """Return the actions that must end before this one, as tuples of alternatives: one action of each tuple.

        At stage s, microbatch i: F(s, i) needs F(s-1, i). I(s, i) and B(s, i) need F(s, i), and either I(s+1, i) or
        B(s+1, i). W(s, i) needs I(s, i).

        Args:
            last_stage: Index of the last stage, whose backward needs no other stage.
        """
        stage, kind, i = self
        if kind is ActionKind.FORWARD:
            return () if stage == 0 else ((Action(stage - 1, kind, i),),)
        if kind is ActionKind.WEIGHT_GRADIENT:
            return ((Action(stage, ActionKind.INPUT_GRADIENT, i),),)
        own = (Action(stage, ActionKind.FORWARD, i),)
        if stage == last_stage:
            return (own,)
        return own, (Action(stage + 1, ActionKind.BACKWARD, i), Action(stage + 1, ActionKind.INPUT_GRADIENT, i))


Rows: TypeAlias = Sequence[Sequence[Action]]
"""For every rank, its actions in their order."""
