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
from ..columnar import SpanColumns, SpanGroup, Table, run_starts
from ..spans import CUT, STARVED, Timeline
from .parts import Header, Part

_ERROR = "clock_error_ns"
"""Key in `meta`: how far, at most, any instant may be from the common clock."""


def with_clock_error(timeline: Timeline, *, error_ns: int) -> Timeline:
    """Return the timeline with the largest error of its clock, against the common clock, noted in `meta`."""
    return replace(timeline, meta=timeline.meta | {_ERROR: str(error_ns)})


def merged(timelines: Sequence[Timeline]) -> Timeline:
    """Join the timelines of the processes of one run, all on one clock already.

    Each process knows only when its own ranks came to a collective; merging tells when the last of all came.

    Raises:
        UsageError: They cannot be of one run: their world sizes or clocks differ, or a rank is in two of them.
    """
    header = merged_header([Header.of(timeline) for timeline in timelines])
    meetings = _Meetings()
    columns = (
        timelines[0].columns if len(timelines) == 1 else SpanColumns.concatenate(each.columns for each in timelines)
    )
    return header.timeline(meetings.with_meetings(meetings.add_operations(columns), columns))


def merged_columns(parts: Sequence[Part]) -> Iterator[SpanColumns]:
    """Yield the columns of the merged timeline, rank by rank.

    Each part is read twice, and memory holds the columns of one rank, and 40 bytes of each operation.

    Raises:
        UsageError: They cannot be of one run, or one is damaged.
    """
    merged_header([part.header for part in parts])
    meetings = _Meetings()
    added = {id(part): [meetings.add_operations(columns) for columns in part.columns()] for part in parts}
    for part in sorted(parts, key=lambda part: list(part.header.ranks)):
        for number, columns in zip(added[id(part)], part.columns(), strict=True):
            yield meetings.with_meetings(number, columns)


def merged_header(headers: Sequence[Header]) -> Header:
    """Return the header of all parts together: their ranks, the sum of dropped spans, and the largest clock error.

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
        self._operations: list[NDArray[np.int64]] = []  # (3, operations): kind, number and start
        self._meeting_numbers: list[NDArray[np.intp]] = []  # the meeting of each operation, once all are added
        self._last_ns: NDArray[np.int64] = np.zeros(0, np.int64)
        self._is_complete: NDArray[np.bool_] = np.zeros(0, bool)

    def add_operations(self, columns: SpanColumns) -> int:
        """Add the operations of some ranks; return the index by which `with_meetings` finds them again."""
        operations = columns.take(columns.is_operation)
        texts = len(columns.texts)
        group, lane, op = (each.astype(np.int64) for each in (operations.group, operations.lane, operations.op))
        packed_kinds, kind_index = np.unique((group * texts + lane) * texts + op, return_inverse=True)
        # one number for group, stream and operation together: each distinct one is looked up once
        split = ((number // texts**2, number // texts % texts, number % texts) for number in packed_kinds.tolist())
        kinds = [
            self._kinds[columns.groups[group_at], columns.texts[lane_at], columns.texts[op_at]]
            for group_at, lane_at, op_at in split
        ]
        kind = np.array(kinds, np.int64)[kind_index.reshape(-1)]
        self._operations.append(np.stack([kind, operations.seq, operations.start_ns]))
        return len(self._operations) - 1

    def with_meetings(self, added: int, columns: SpanColumns) -> SpanColumns:
        """Return columns, added before at index `added`, with `met_ns` of each operation whose group is complete."""
        if not self._meeting_numbers:
            self._match_operations()
        which = np.flatnonzero(columns.is_operation)
        meeting = self._meeting_numbers[added]
        which, meeting = which[self._is_complete[meeting]], meeting[self._is_complete[meeting]]
        met_ns = columns.met_ns.copy()
        last_ns, end_ns = self._last_ns[meeting], columns.end_ns[which]
        # A send may end before its receiver comes: it has not waited. No other operation ends before the last rank has
        # come; where clocks say so, they are off by less than their error.
        ended_early = (last_ns > end_ns) & _is_send(columns)[which]
        met_ns[which] = np.where(ended_early, columns.start_ns[which], np.minimum(last_ns, end_ns))
        return replace(columns, met_ns=met_ns)

    def _match_operations(self) -> None:
        """Number the meetings by kind and sequence number; find the last start of each, and whether all ranks came."""
        kind, seq, start_ns = np.concatenate(self._operations, axis=1)
        order = np.lexsort((seq, kind))
        kind, seq, start_ns = kind[order], seq[order], start_ns[order]
        firsts = run_starts(kind, seq)
        # The first row of each meeting, in sorted order, counts the number of the meeting up.
        begins = np.zeros(len(order), np.intp)
        begins[firsts] = 1
        numbers = np.empty(len(order), np.intp)
        numbers[order] = np.cumsum(begins) - 1
        if len(firsts):
            sizes = np.array([len(ranks) for (_, ranks, _), _, _ in self._kinds])
            came = np.diff(np.append(firsts, len(order)))
            self._is_complete = came == sizes[kind[firsts]]
            self._last_ns = np.maximum.reduceat(start_ns, firsts)
        self._meeting_numbers = np.split(numbers, np.cumsum([each.shape[1] for each in self._operations])[:-1])


def _is_send(columns: SpanColumns) -> NDArray[np.bool_]:
    """Whether each span is the sender's end of a message."""
    sources = np.array([group.ranks[0] if group.ranks else -1 for group in columns.groups], np.int64)
    message = [number for number, text in enumerate(columns.texts) if text == Collective.P2P.text]
    found: NDArray[np.bool_] = np.isin(columns.op, message) & (sources[columns.group] == columns.rank)
    return found
