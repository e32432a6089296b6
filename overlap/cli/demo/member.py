"""One process of the demo among several: `overlap run -m overlap.cli.demo.member TASK`.

The process of rank 0 prints lines of JSON: the loss after each step, and at the end what was learnt.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from ...data import digits
from .model import windows
from .nodes import Task
from .training import Lesson, compare

__all__ = ["main"]


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
