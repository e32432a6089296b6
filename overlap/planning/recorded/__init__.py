"""Recorded runs as programs, for the cluster that they ran on or a larger one.

`tape` infers from a timeline what each rank issued, and after what; `growth` maps the ranks of a cluster to recorded
ranks; `player` issues the same on them, or on a few that stand for all (`stand_ins`).
"""

from .growth import Growth, map_growth
from .player import play
from .stand_ins import classify_ranks
from .tape import Move, Tape, infer_tape

__all__ = ["Growth", "Move", "Tape", "classify_ranks", "infer_tape", "map_growth", "play"]
