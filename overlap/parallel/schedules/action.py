"""One thing a rank does in a pipeline schedule, and its text form, which is that of PyTorch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from ...errors import UsageError

_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


class ActionKind(StrEnum):
    """The kind of compute of one microbatch at one stage.

    Papers differ in their letters: the zero-bubble paper (arXiv 2401.10241) calls our I "B".
    """

    FORWARD = "F"
    BACKWARD = "B"  # I, then W, in one
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One microbatch at one stage."""

    stage: int  # From 0, over all ranks
    kind: ActionKind  # Kind of compute
    microbatch: int  # From 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form, such as "2F0": stage 2, forward of microbatch 0.

        Raises:
            UsageError: If the text is nothing of that kind.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UsageError(
                f"text: {text!r} is no action; one is a stage, F, B, I or W, and a microbatch, such as 2F0"
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    def needs(self, last_stage: int) -> tuple[tuple[Action, ...], ...]:
        """Return the actions that must be over before this one: of each tuple, one.

        F(s, i) needs F(s-1, i). I or B(s, i) needs F(s, i), and I or B(s+1, i). W(s, i) needs I(s, i). Nothing else
        orders stages.
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
"""The actions of every rank, in its order."""
