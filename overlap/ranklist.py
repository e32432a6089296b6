"""Lists of ranks as text: `0-3, 7`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

LIMIT = 1_000_000
"""More ranks than this in one list are a slip or an attack, not a machine."""

_PART = re.compile(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", re.ASCII)


def format_rank_list(ranks: Sequence[int]) -> str:
    """Return ranks as text, in their order, with ascending runs shortened: `0-3, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text with their noun: `rank 7`, `ranks 0-3, 7`."""
    return f"rank{'s' * (len(ranks) > 1)} {format_rank_list(ranks)}"


@lru_cache(maxsize=256)
def parse_rank_list(text: str) -> tuple[int, ...]:
    """Read a list that `format_rank_list` wrote, at most `LIMIT` ranks; blanks do not matter.

    Raises:
        ValueError: A part is neither a number nor an ascending range, or the list is too long; names the part.
    """
    ranks: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{part.strip()!r} is not a rank or a range such as 3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if len(ranks) + last - first >= LIMIT:
            raise ValueError(f"{part.strip()!r} makes more than {LIMIT} ranks; name fewer")
        ranks.extend(range(first, last + 1))
    return tuple(ranks)
