"""Merging the timelines of the processes of one run into one, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...collectives.kinds import Collective
from ...errors import UsageError
from ..columnar import SpanColumns, SpanGroup, Table, runs
from ..spans import CUT, STARVED, Timeline
from .parts import Header, Part

_ERROR = "clock_error_ns"
"""Key in `meta`: how far, at most, any instant may be from the common clock."""


def on_clock(timeline: Timeline, *, error_ns: int) -> Timeline:
    """Note the largest error of the common clock that the timeline will be shifted to."""
    return replace(timeline, meta=timeline.meta | {_ERROR: str(error_ns)})


def merged(timelines: Sequence[Timeline]) -> Timeline:
    """Join the timelines of the processes of one run, all on one clock already.

    Each process knows only when its own ranks came to a collective; merging tells when the last of all came.

    Raises:
        UsageError: They cannot be of one run: their world sizes or clocks differ, or a rank is in two of them.
    """
    header = merged_header([Header.of(timeline) for timeline in timelines])
    meetings = _Meetings()
    columns = timelines[0].columns if len(timelines) == 1 else SpanColumns.joined(each.columns for each in timelines)
    return header.timeline(meetings.settled(meetings.note(columns), columns))


def merged_columns(parts: Sequence[Part]) -> Iterator[SpanColumns]:
    """Yield the columns of the merged timeline, rank by rank.

    Each part is read twice, and memory holds the columns of one rank, and 40 bytes of each operation.

    Raises:
        UsageError: They cannot be of one run, or one is damaged.
    """
    merged_header([part.header for part in parts])
    meetings = _Meetings()
    noted = {id(part): [meetings.note(columns) for columns in part.columns()] for part in parts}
    for part in sorted(parts, key=lambda part: list(part.header.ranks)):
        for number, columns in zip(noted[id(part)], part.columns(), strict=True):
            yield meetings.settled(number, columns)


def merged_header(headers: Sequence[Header]) -> Header:
    """Return the header of all parts together.

    Raises:
        UsageError: They cannot be of one run.
    """
    first, *rest = headers
    for other in rest:
        if (other.world_size, other.clock) != (first.world_size, first.clock):
            raise UsageError(
                f"not of one run: {first.world_size} ranks on the {first.clock} clock, "
                f"and {other.world_size} on the {other.clock} clock; name the files of one run"
            )
    ranks = sorted(rank for header in headers for rank in header.ranks)
    for rank, following in pairwise(ranks):
        if rank == following:
            raise UsageError(f"not parts of one run: rank {rank} is in two of them; name the files of one run")
    errors = [int(header.meta[_ERROR]) for header in headers if _ERROR in header.meta]
    cut = [header.meta[CUT] for header in headers if CUT in header.meta]
    meta = first.meta | ({CUT: cut[0]} if cut else {}) | ({_ERROR: str(max(errors))} if errors else {})
    if starved := [header.meta[STARVED] for header in headers if STARVED in header.meta]:
        meta[STARVED] = " ".join(starved)
    dropped = sum(header.dropped for header in headers)
    return msgspec.structs.replace(first, ranks=tuple(ranks), dropped=dropped, meta=meta, offset_ns=0)


class _Meetings:
    """Finds when the last rank came to each collective of which all ranks are known."""

    def __init__(self) -> None:
        self._kinds = Table[tuple[SpanGroup, str, str]]()  # group, stream and operation
        self._noted: list[NDArray[np.int64]] = []  # (3, operations): kind, number and start
        self._of: list[NDArray[np.intp]] = []  # the meeting of each operation, once all are noted
        self._last_ns: NDArray[np.int64] = np.zeros(0, np.int64)
        self._are_all: NDArray[np.bool_] = np.zeros(0, bool)

    def note(self, columns: SpanColumns) -> int:
        """Add operations of some ranks; return the number that `settled` takes for them."""
        operations = columns.take(columns.is_operation)
        texts = len(columns.texts)
        group, lane, op = (each.astype(np.int64) for each in (operations.group, operations.lane, operations.op))
        packed, of = np.unique((group * texts + lane) * texts + op, return_inverse=True)
        split = ((one // texts**2, one // texts % texts, one % texts) for one in packed.tolist())
        kinds = [self._kinds[columns.groups[at], columns.texts[on], columns.texts[what]] for at, on, what in split]
        kind = np.array(kinds, np.int64)[of.reshape(-1)]
        self._noted.append(np.stack([kind, operations.seq, operations.start_ns]))
        return len(self._noted) - 1

    def settled(self, noted: int, columns: SpanColumns) -> SpanColumns:
        """Return spans that were added as `noted`, with the arrival of the last rank, once all are added."""
        if not self._of:
            self._meet()
        which = np.flatnonzero(columns.is_operation)
        of = self._of[noted]
        which, of = which[self._are_all[of]], of[self._are_all[of]]
        met_ns = columns.met_ns.copy()
        last_ns, end_ns = self._last_ns[of], columns.end_ns[which]
        # A send may end before its receiver comes: it has not waited. No other operation ends before the last rank has
        # come; where clocks say so, they are off by less than their error.
        left = (last_ns > end_ns) & _sends(columns)[which]
        met_ns[which] = np.where(left, columns.start_ns[which], np.minimum(last_ns, end_ns))
        return replace(columns, met_ns=met_ns)

    def _meet(self) -> None:
        """Match operations by kind and sequence number."""
        kind, seq, start_ns = np.concatenate(self._noted, axis=1)
        order = np.lexsort((seq, kind))
        kind, seq, start_ns = kind[order], seq[order], start_ns[order]
        firsts = runs(kind, seq)
        begins = np.zeros(len(order), np.intp)
        begins[firsts] = 1
        numbers = np.empty(len(order), np.intp)
        numbers[order] = np.cumsum(begins) - 1
        if len(firsts):
            sizes = np.array([len(ranks) for (_, ranks, _), _, _ in self._kinds])
            came = np.diff(np.append(firsts, len(order)))
            self._are_all = came == sizes[kind[firsts]]
            self._last_ns = np.maximum.reduceat(start_ns, firsts)
        self._of = np.split(numbers, np.cumsum([each.shape[1] for each in self._noted])[:-1])


def _sends(columns: SpanColumns) -> NDArray[np.bool_]:
    """Whether each span is the sender's end of a message."""
    sources = np.array([group.ranks[0] if group.ranks else -1 for group in columns.groups], np.int64)
    message = [number for number, text in enumerate(columns.texts) if text == Collective.P2P.text]
    found: NDArray[np.bool_] = np.isin(columns.op, message) & (sources[columns.group] == columns.rank)
    return found
