"""Recorded runs as programs, for the cluster that they ran on or a larger one.

`tape` infers from a timeline what each rank issued, and after what; `growth` maps the ranks of a cluster to recorded
ranks; `player` issues the same on them.
"""

from .growth import Growth, growth_of
from .player import play
from .tape import Tape, tape_of

__all__ = ["Growth", "Tape", "growth_of", "play", "tape_of"]
