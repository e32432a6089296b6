"""Pipeline schedules as data: made, proved, timed and drawn, without running anything.

The files, from the bottom up: `action`, one step of a rank, such as the forward of one microbatch at one stage;
`timing`, when each action runs, and a drawing of it; `proof`, whether rows of actions are a valid schedule; `schedule`,
the class with the rows; `families`, the published schedules; `folded`, those whose stages go down the ranks and up
again, like a V.
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
