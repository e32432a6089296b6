"""The spans of a run: a timeline, which keeps them in columns until somebody asks for one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .columnar import NONE, SpanColumns, SpanList
from .measure.intervals import Interval
from .recording import (
    Recorder,
)
from .span import Clock, Span


@dataclass(kw_only=True)
class Timeline:
    """The spans of a run, or of the part of it that one process saw."""

    spans: Sequence[Span]  # sorted by `span_order`; `collect` does that, and `columns` has them as numbers
    world_size: int  # ranks in the whole run, seen here or not
    clock: Clock = "real"  # "real", or "virtual" for simulated time
    dropped: int = 0  # spans that no longer fitted the rings
    meta: dict[str, str] = field(default_factory=dict)  # free text about the run, such as the script's name
    _columns: SpanColumns | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def collect(
        cls,
        recorders: Iterable[Recorder],
        *,
        world_size: int,
        clock: Clock = "real",
        meta: Mapping[str, str] | None = None,
    ) -> Timeline:
        """Gather what the recorders of a process hold. Cost: 2 microseconds per span, so after the run."""
        recorders = list(recorders)
        columns = SpanColumns.joined(recorder.columns() for recorder in recorders)
        dropped = sum(recorder.dropped for recorder in recorders)
        return cls.of_columns(columns, world_size=world_size, clock=clock, dropped=dropped, meta=dict(meta or {}))

    @classmethod
    def of_columns(
        cls,
        columns: SpanColumns,
        *,
        world_size: int,
        clock: Clock = "real",
        dropped: int = 0,
        meta: dict[str, str] | None = None,
    ) -> Timeline:
        """Return the timeline of spans in any order; none is made before it is asked for."""
        spans = SpanList(columns.take(columns.order()))
        return cls(spans=spans, world_size=world_size, clock=clock, dropped=dropped, meta=meta or {})

    @property
    def columns(self) -> SpanColumns:
        """The spans as columns, in their order: a look at a million of them takes milliseconds."""
        if isinstance(self.spans, SpanList):
            return self.spans.columns
        if self._columns is None or len(self._columns) != len(self.spans):
            self._columns = SpanColumns.of(self.spans)
        return self._columns

    def ranks(self) -> list[int]:
        """The ranks that have spans here, ascending."""
        found: list[int] = np.unique(self.columns.rank).tolist()
        return found

    def for_rank(self, rank: int) -> list[Span]:
        """The spans of one rank, in order of start."""
        return self.chosen(self.columns.rank == rank)

    def near(self, window: Interval) -> list[Span]:
        """The spans that touch a window, and all those of the operations that do, in order of start."""
        return self.chosen(self.columns.near(window))

    def chosen(self, which: NDArray[np.bool_]) -> list[Span]:
        """The spans of a mask over the columns, in order of start."""
        numbers = np.flatnonzero(which).tolist()
        return self.spans.chosen(numbers) if isinstance(self.spans, SpanList) else [self.spans[at] for at in numbers]

    def shifted(self, offset_ns: int) -> Timeline:
        """The same on another clock: what that showed when this one showed 0 is `offset_ns`."""
        return replace(self, spans=SpanList(self.columns.shifted(offset_ns)))

    def by_rank(self) -> dict[int, list[Span]]:
        """The spans of each rank that has any, ranks ascending, each in order of start."""
        found: dict[int, list[Span]] = {rank: [] for rank in self.ranks()}
        for span in self.spans:
            found[span.rank].append(span)
        return found

    def steps(self) -> list[int]:
        """The step indices that any rank recorded, ascending."""
        columns = self.columns
        found: list[int] = np.unique(columns.step[columns.is_kind("step") & (columns.step != NONE)]).tolist()
        return found
