"""One palette and one set of glyphs for all that the command draws.

Okabe-Ito colours: told apart with any colour vision, and by luminance in grey (compute 0.15, hidden communication 0.42,
bytes on the wire 0.21, waiting 0.32). Nothing depends on colour alone: each kind has a glyph of its own, too.
"""

from __future__ import annotations

COMPUTE = "#0072B2"
HIDDEN = "#E69F00"
"""Communication under compute, whether it moves bytes or waits."""
EXPOSED = "#D55E00"
"""Bytes on the wire, and no compute."""
WAITING = "#CC79A7"
"""Waiting for a rank, and no compute."""

BLOCK_BAR = "█░"
ASCII_BAR = "#."
"""What is done of a bar, and what is not."""
