"""The comparison on several nodes: their processes are started, train, and tell; the timeline comes as a trace file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...timeline import read_trace
from ..children import hear, start
from .training import Lesson, Outcome, Run, Wires

__all__ = ["Task", "compare_on_nodes"]

MEMBER = "overlap.cli.demo.member"


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


def compare_on_nodes(lesson: Lesson, wires: Wires) -> Run:
    """Train both ways, in one process for each node, all of which read the digits themselves.

    Raises:
        OverlapError: If one of them fails.
    """
    options = ["--nnodes", str(wires.nodes), "--nproc-per-node", str(wires.ranks // wires.nodes)]
    widths = [list(block) for block in lesson.widths]
    outcome = None
    with TemporaryDirectory() as folder:
        trace = Path(folder, "demo.trace.json")
        task = Task(wires=wires, widths=widths, steps=lesson.steps, trace=str(trace))
        for told in hear([start(options, [MEMBER, task.to_json()])]):
            if "loss" in told:
                lesson.progress(told["loss"])
            else:
                outcome = told["outcome"]
        timeline = replace(read_trace(trace), meta={"script": "overlap demo"})
    assert outcome is not None, "who trains to the end tells what came out"
    digests = [(before, after) for before, after in outcome["digests"]]
    return Run(
        outcome=Outcome(digests=digests, right=outcome["right"]),
        tests=len(lesson.test),
        timeline=timeline,
        steps=lesson.steps,
    )
