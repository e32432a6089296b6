"""This computer, in a few nominal figures: what ranks that are threads of one process pay for meeting and for messages.

They are what plans for the plain machine rest on. Nothing here is paced by them.

Fitted to medians of all-reduces, all-gathers, broadcasts and all-to-alls of 64 B and 16 MiB among 2, 4 and 8 ranks of
one process on two cores, by the short cut, `one_shot`, `mesh` and `ring` (CPython 3.11, Trio 0.31). Ranks of a process
share its event loop, so everything they do there counts once for each of them.
"""

from __future__ import annotations

__all__ = ["MEMORY_BYTES_PER_S", "launch_s", "meeting_s", "message_s"]

MEMORY_BYTES_PER_S = 25e9
"""What reads and writes of all ranks get together: 2 and 4 ranks reducing 16 MiB in place."""

# 24, 47 and 80 us for 2, 4 and 8 ranks that reduce 64 B.
_MEETING_S_PER_RANK = 10e-6
# Intercept and slope of the times of programs over their numbers of messages, from 1 to 112.
_LAUNCH_S_PER_RANK = 80e-6
_MESSAGE_S_PER_RANK = 35e-6


def meeting_s(ranks: int) -> float:
    """Return the time from the first to the last of the ranks that meet: one task switch each."""
    return _MEETING_S_PER_RANK * ranks


def launch_s(ranks: int) -> float:
    """Return the time to start the programs of all ranks of a process."""
    return _LAUNCH_S_PER_RANK * ranks


def message_s(ranks: int) -> float:
    """Return the time to start a message while all ranks of a process start theirs."""
    return _MESSAGE_S_PER_RANK * ranks
