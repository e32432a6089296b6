"""Timelines of runs: recording, measuring, drawing and replaying spans, and trace files.

In the order data flows: `recording` records what a rank does; `span` is one interval of it, `columnar` many of them as
numpy columns, and `spans` the timeline of a run. `measure/` computes figures from spans, `files/` turns spans into
bytes and back, `draw/` turns figures into pictures, and `replay/` runs a recorded run again with something changed.
`why/` says in one sentence why a job is slow.
`ranklist` reads and writes lists of ranks.

All of it is pure. Importing this package loads the recording only: every program pays for that, few look at a timeline.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .recording import Recorder
from .span import CollectiveInfo, Span
from .spans import Timeline

if TYPE_CHECKING:
    from .draw.view import TimelineView
    from .files.merge import merged
    from .files.tracefile import read_trace, write_trace
    from .measure.metrics import Breakdown, breakdowns, median_step
    from .measure.reasons import Cause, causes
    from .measure.stragglers import Arrivals, arrivals, straggler
    from .measure.verdict import Verdict, verdict_of

__all__ = [
    "Arrivals",
    "Breakdown",
    "Cause",
    "CollectiveInfo",
    "Recorder",
    "Span",
    "Timeline",
    "TimelineView",
    "Verdict",
    "arrivals",
    "breakdowns",
    "causes",
    "median_step",
    "merged",
    "read_trace",
    "straggler",
    "verdict_of",
    "write_trace",
]

_LOADED_WHEN_USED = {
    "Arrivals": "measure.stragglers",
    "Breakdown": "measure.metrics",
    "Cause": "measure.reasons",
    "TimelineView": "draw.view",
    "Verdict": "measure.verdict",
    "arrivals": "measure.stragglers",
    "breakdowns": "measure.metrics",
    "causes": "measure.reasons",
    "median_step": "measure.metrics",
    "merged": "files.merge",
    "read_trace": "files.tracefile",
    "straggler": "measure.stragglers",
    "verdict_of": "measure.verdict",
    "write_trace": "files.tracefile",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LOADED_WHEN_USED[name]}", __name__), name)
