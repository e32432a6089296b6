"""Timelines of runs: recording, measuring and drawing spans, and trace files.

In the order data flows: `recording` records what a rank does; `span` is one interval of that, `columnar` has many spans
as numpy columns, and `spans` the timeline of a run. `measure/` computes figures from spans, `files/` writes and reads
trace files, and `draw/` makes pictures.
`explain`, a package of its own, judges: in one sentence why a job is slow.

Importing this package loads only the recording, which every program needs; few programs look at a timeline.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .recording import Recorder
from .span import CollectiveInfo, Span
from .spans import Timeline

if TYPE_CHECKING:
    from .draw.view import TimelineView
    from .files.merge import merged
    from .files.reading import read_trace
    from .files.trace import write_trace
    from .measure.metrics import Breakdown, breakdowns
    from .measure.steps import median_step

__all__ = [
    "Breakdown",
    "CollectiveInfo",
    "Recorder",
    "Span",
    "Timeline",
    "TimelineView",
    "breakdowns",
    "median_step",
    "merged",
    "read_trace",
    "write_trace",
]

_LOADED_WHEN_USED = {
    "Breakdown": "measure.metrics",
    "TimelineView": "draw.view",
    "breakdowns": "measure.metrics",
    "median_step": "measure.steps",
    "merged": "files.merge",
    "read_trace": "files.reading",
    "write_trace": "files.trace",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LOADED_WHEN_USED[name]}", __name__), name)
