"""What happened when: spans, metrics, drawing, trace files.

In the order data flows: `recording` records, `span` is what one says, `columnar` keeps many, and `spans` all of a run;
`intervals` and `metrics` measure; `meetings` knows who came last to each operation, `lateness` counts that, `activity`
what each rank did when, `reasons` (with `excess`) why communication was exposed, and `verdict` puts it into a sentence;
`operations`, `stragglers` and `critical_path` are tables on request (`columns`); `theme`, `folding`, `lanes`, `axis`,
`table`, `legend` are what `draw` draws with; `events` (and back: `decode`), `parts`, `tail` and `tracefile` store it,
`stream` as it grows, `foreign` (`kineto`, `neuron`, `chakra/`) what others stored, `cut` what is left of it,
`oddities` what cannot be true, `merge` makes one timeline of those of several processes. `picture/` and `page` draw it
elsewhere. `replay/` runs one again with something changed.

All of it is pure. Importing this loads the recording only: every program pays for that, few look at a timeline.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .recording import Recorder
from .span import CollectiveInfo, Span
from .spans import Timeline

if TYPE_CHECKING:
    from .draw import TimelineView, render_text
    from .lateness import Arrivals, arrivals, straggler
    from .merge import merged
    from .metrics import Breakdown, breakdowns, median_step
    from .reasons import Cause, causes
    from .tracefile import read_trace, write_trace
    from .verdict import Verdict, verdict_of

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
    "render_text",
    "straggler",
    "verdict_of",
    "write_trace",
]

_LOADED_WHEN_USED = {
    "Arrivals": "lateness",
    "Breakdown": "metrics",
    "Cause": "reasons",
    "TimelineView": "draw",
    "Verdict": "verdict",
    "arrivals": "lateness",
    "breakdowns": "metrics",
    "causes": "reasons",
    "median_step": "metrics",
    "merged": "merge",
    "read_trace": "tracefile",
    "render_text": "draw",
    "straggler": "lateness",
    "verdict_of": "verdict",
    "write_trace": "tracefile",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LOADED_WHEN_USED[name]}", __name__), name)
