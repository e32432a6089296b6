"""Recorded runs as programs, for the cluster that they ran on or a larger one.

`tape` infers from a timeline what each rank issued, and after what; `growth` maps the ranks of a cluster to recorded
ranks; `player` issues the same on them, or on a few that stand for all (`stand_ins`).
"""

from .growth import Growth, growth_of
from .player import play
from .stand_ins import classes_of
from .tape import Move, Tape, tape_of

__all__ = ["Growth", "Move", "Tape", "classes_of", "growth_of", "play", "tape_of"]
