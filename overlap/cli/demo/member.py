"""One process of the demo among several: `overlap run -m overlap.cli.demo.member TASK`.

The process of rank 0 prints lines of JSON: the loss after each step, and at the end what was learnt.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from ...data import digits
from .model import windows
from .training import Lesson, Wires, compare

__all__ = ["Task", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What all processes do, as text for a command line.

    Attributes:
        wires: Where the ranks are, and what joins them.
        widths: The model's.
        steps: How many steps each model takes.
        trace: Where the timeline of all ranks goes.
    """

    wires: Wires
    widths: list[list[int]]
    steps: int
    trace: str

    def to_json(self) -> str:
        """Write it as one argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Read what `to_json` has written."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**fields | {"wires": Wires(**fields["wires"])})


def main(text: str) -> None:
    """Train, and tell."""
    task = Task.from_json(text)
    train, test = digits().split()
    lesson = Lesson(
        images=windows(train.images),
        labels=train.labels,
        test=test,
        steps=task.steps,
        widths=task.widths,
        progress=lambda loss: _tell({"loss": loss}),
    )
    run = compare(lesson, task.wires, trace=task.trace)
    if run is not None:
        _tell({"outcome": asdict(run.outcome)})


def _tell(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
