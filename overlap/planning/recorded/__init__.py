"""A recorded run as a program, for the same cluster or a larger one.

`tape` reads off a timeline what each rank issued and after what, `growth` says which rank of a cluster does what which
recorded one did, `player` does it.
"""

from .growth import Growth, growth_of
from .player import play
from .tape import Tape, tape_of

__all__ = ["Growth", "Tape", "growth_of", "play", "tape_of"]
