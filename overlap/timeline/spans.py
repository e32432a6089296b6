"""The timeline of a run: its spans, in order, and facts about the run as a whole."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from .columnar import NONE, Mask, SpanColumns, SpanList
from .recording import Recorder, columns_from_spans
from .span import Clock, Span

CUT = "cut"
"""Key in `meta` of a timeline from a file that was cut off: which spans it has."""
ENDED = "ended"
"""Key in `meta` of a timeline of a run that did not end well: "failed" or "was stopped"."""
LEFT_OUT = "left_out"
"""Key in `meta`: a text on spans of the file that were left out."""
ORIGIN = "origin"
"""Key in `meta` of a timeline that another tool recorded: the name of the tool."""
STARVED = "starved"
"""Key in `meta`: the part of its computing in which a rank could run and had no processor, such as "0:0.31 2:0.5"."""


@dataclass(kw_only=True)
class Timeline:
    """The spans of a run, or of the part of it that one process saw.

    Raises:
        OverflowError: A number in a span has more than 64 bits.
    """

    spans: Sequence[Span]  # passed in any order; then sorted by start, and stored as columns
    world_size: int  # ranks in the whole run, also those without spans here
    clock: Clock = "real"  # "real", or "virtual" for simulated time
    dropped: int = 0  # spans that newer ones have replaced in the recorders
    meta: dict[str, str] = field(default_factory=dict)  # free text about the run, such as the script's name

    def __post_init__(self) -> None:
        if not isinstance(self.spans, SpanList):
            columns = columns_from_spans(self.spans)
            self.spans = SpanList(columns.take(columns.timeline_order()))
        # the same list, whose type is known here
        self._list = self.spans

    @classmethod
    def collect(
        cls,
        recorders: Iterable[Recorder],
        *,
        world_size: int,
        clock: Clock = "real",
        meta: Mapping[str, str] | None = None,
    ) -> Timeline:
        """Gather the spans of the recorders of a process. Cost: 2 microseconds per span, so call it after the run.

        Args:
            recorders: Recorders of the ranks here.
            world_size: Ranks in the whole run.
            clock: The clock of the spans.
            meta: Free text about the run.
        """
        recorders = list(recorders)
        columns = SpanColumns.concatenate(recorder.columns() for recorder in recorders)
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
        """Return a timeline from columns of spans; a `Span` object is made only when it is read.

        Args:
            columns: The spans, in any order.
            world_size: Ranks in the whole run.
            clock: The clock of the spans.
            dropped: Number of spans that newer ones have replaced in the recorders.
            meta: Free text about the run.
        """
        spans = SpanList(columns.take(columns.timeline_order()))
        return cls(spans=spans, world_size=world_size, clock=clock, dropped=dropped, meta=meta or {})

    def __repr__(self) -> str:
        ranks = f"{len(self.ranks())} of {self.world_size} ranks"
        return f"<Timeline of {len(self.columns.rank)} spans, {ranks}, {self.clock}>"

    def _repr_html_(self) -> str:
        """Return the picture that notebooks show: of the median step, or of the whole run without steps."""
        if not len(self.columns.rank):
            return "<pre>a timeline without spans</pre>"
        html: str = self._make_view()._repr_html_()
        return html

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Draw the same picture as text in a terminal's IPython, and print the repr elsewhere."""
        if sys.stdout.isatty() and len(self.columns.rank):
            self._make_view()._repr_pretty_(printer, cycle)
        else:
            printer.text(repr(self))

    def _make_view(self) -> Any:
        draw, steps = (import_module(name, __package__) for name in (".draw.view", ".measure.steps"))
        return draw.TimelineView(self, step=steps.median_step(self))

    @property
    def columns(self) -> SpanColumns:
        """The spans as numpy columns, sorted by start; for fast access to all of them."""
        return self._list.columns

    def ranks(self) -> list[int]:
        """The ranks that have spans here, ascending."""
        found: list[int] = np.unique(self.columns.rank).tolist()
        return found

    def for_rank(self, rank: int) -> list[Span]:
        """The spans of one rank, in order of start."""
        return self.chosen(self.columns.rank == rank)

    def chosen(self, which: Mask) -> list[Span]:
        """The spans that a mask over the columns selects, in order of start."""
        return self._list.spans_at(np.flatnonzero(which).tolist())

    def steps(self) -> list[int]:
        """The step indices that any rank recorded, ascending."""
        columns = self.columns
        found: list[int] = np.unique(columns.step[columns.is_kind("step") & (columns.step != NONE)]).tolist()
        return found
