"""Pipeline schedules as data: made, proved, timed on paper, drawn. Pure.

From the bottom up: `action` is one thing a rank does. `timing` says when each of them runs, and draws
that; `proof` says whether rows of them make a schedule. `schedule` holds the rows, `families` makes the published
schedules, `folded` the ones whose stages lie like a V.
"""

from __future__ import annotations

from .action import Action, ActionKind
from .families import FAMILIES, Family, gpipe, interleaved_1f1b, make, one_f_one_b, zb_h1, zb_h2
from .folded import dualpipe_v, zb_v
from .schedule import PipelineSchedule
from .timing import Durations, Timing

__all__ = [
    "FAMILIES",
    "Action",
    "ActionKind",
    "Durations",
    "Family",
    "PipelineSchedule",
    "Timing",
    "dualpipe_v",
    "gpipe",
    "interleaved_1f1b",
    "make",
    "one_f_one_b",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
