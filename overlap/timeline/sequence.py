"""Timelines of the epochs of a run, brought together: each rank keeps the number that it had in the first world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .columnar import SpanColumns
from .spans import Timeline


def in_first_world(timeline: Timeline, members: Sequence[int], *, ranks_each: int, world_size: int) -> Timeline:
    """Return the timeline of one epoch with the numbers of ranks of the first world.

    Args:
        timeline: Spans of the epoch.
        members: Processes of the epoch in their order, by their numbers in the first world.
        ranks_each: Ranks of each process.
        world_size: Ranks of the first world.
    """
    number = np.array([member * ranks_each + rank for member in members for rank in range(ranks_each)], np.int64)
    columns = timeline.columns
    groups = tuple(group._replace(ranks=tuple(number[list(group.ranks)].tolist())) for group in columns.groups)
    columns = replace(columns, rank=number[columns.rank], groups=groups)
    return Timeline.of_columns(
        columns, world_size=world_size, clock=timeline.clock, dropped=timeline.dropped, meta=timeline.meta
    )


def in_sequence(timelines: Sequence[Timeline]) -> Timeline:
    """Return the timelines of the epochs of one process as one, with the size and the clock of the last."""
    columns = SpanColumns.concatenate(timeline.columns for timeline in timelines)
    last, dropped = timelines[-1], sum(timeline.dropped for timeline in timelines)
    return Timeline.of_columns(
        columns, world_size=last.world_size, clock=last.clock, dropped=dropped, meta=dict(last.meta)
    )
