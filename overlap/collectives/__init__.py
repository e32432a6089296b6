"""Schedules of collectives as data, their proof, and each rank's program. Pure: numpy only.

In the order of use: `generate` makes a `Schedule`, `verify` proves it, `project` cuts out a rank's `Program`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .generators import GENERATORS, fits, generate
    from .program import Extent, Program, Step, StepKind, project, project_all
    from .proof import verify
    from .schedule import Buffer, Op, Schedule, slot_bounds

__all__ = [
    "GENERATORS",
    "Buffer",
    "Extent",
    "Op",
    "Program",
    "Schedule",
    "Step",
    "StepKind",
    "fits",
    "generate",
    "project",
    "project_all",
    "slot_bounds",
    "verify",
]

# Ranks that share memory never need a schedule: the generators load when the first one is asked for.
_HOMES = {
    **dict.fromkeys(("GENERATORS", "fits", "generate"), "generators"),
    **dict.fromkeys(("Extent", "Program", "Step", "StepKind", "project", "project_all"), "program"),
    **dict.fromkeys(("Buffer", "Op", "Schedule", "slot_bounds"), "schedule"),
    "verify": "proof",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
