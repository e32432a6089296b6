"""Each compute of a real run by itself: what it took, and how long after the one before it it began.

Between two computes of a stream, both of which have been issued, lies what virtual time knows nothing of: the thread
ends the one and takes the next one, while other threads want the interpreter and the cores. Where the next one has
waited, for communication or for the program to issue it, that lies between what ended last on its rank and its start.

Whether it has waited for communication is not in the trace. So it is taken to be the same for all computes of a name
that follow those of another name: they have waited if in at least half of the pairs something of the rank's
communication, or of its other streams, ended in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TypeAlias

from ..timeline.span import Span
from ..timeline.spans import Timeline

Call: TypeAlias = "tuple[int, int]"
"""What lies between a compute and the one before it, and what it takes, in nanoseconds."""

Which: TypeAlias = "tuple[int, str, str]"
"""A rank, a lane, and the name of computes."""

_Pair: TypeAlias = "tuple[str, str]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Computes of a real run, one by one."""

    calls: Mapping[Which, tuple[Call, ...]]  # in the order of their starts
    between_ns: int  # the median of what lies between two computes of a stream if the second does not wait

    @classmethod
    def of(cls, timeline: Timeline) -> Replayed:
        """Take the computes of a timeline."""
        met = [each for rank in range(timeline.world_size) for each in _followed(timeline.for_rank(rank))]
        at_once = _at_once(met)
        between_ns = median_low([each.after_ns for each in met if each.pair in at_once] or [0])
        calls: defaultdict[Which, list[Call]] = defaultdict(list)
        for each in met:
            before_ns = each.after_ns if each.pair in at_once else each.late_ns
            calls[each.span.rank, each.span.lane, each.span.name].append((before_ns, each.span.duration_ns))
        return cls(calls={which: tuple(of) for which, of in calls.items()}, between_ns=between_ns)


class Replaying:
    """How far the ranks of a simulation have come in what is replayed."""

    def __init__(self, replayed: Replayed) -> None:
        self._between_ns = replayed.between_ns
        self._left: dict[Which, Iterator[Call]] = {which: iter(calls) for which, calls in replayed.calls.items()}

    def next(self, which: Which, usual_ns: int) -> Call:
        """Return what the next compute takes; as usual if there was none in the real run."""
        return next(self._left.get(which, iter(())), (self._between_ns, usual_ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followed:
    """A compute and the one before it on its stream: no pair if that was over before it was issued."""

    span: Span  # of the compute
    pair: _Pair | None  # the names of both
    after_ns: int  # from the end of the one before it to its start
    late_ns: int  # from the last end of anything on its rank to its start
    waited: bool  # whether anything of other streams or communication ended in between


def _followed(spans: list[Span]) -> Iterator[_Followed]:
    """Yield the computes of one rank in the order of their starts."""
    ends = sorted(span.end_ns for span in spans if span.kind in ("comm", "compute"))
    last: dict[str, Span] = {}
    for span in spans:
        if span.kind != "compute":
            continue
        before = last.get(span.lane)
        last[span.lane] = span
        over = bisect_right(ends, span.start_ns)
        late_ns = span.start_ns - ends[over - 1] if over else 0
        after_ns = max(0, span.start_ns - before.end_ns) if before else 0
        queued = before is not None and span.issued_ns is not None and span.issued_ns <= before.end_ns
        pair = (before.name, span.name) if before and queued else None
        yield _Followed(span=span, pair=pair, after_ns=after_ns, late_ns=late_ns, waited=late_ns < after_ns)


def _at_once(met: list[_Followed]) -> set[_Pair]:
    """Return the pairs whose second compute does not wait, mostly."""
    waited: Counter[_Pair] = Counter()
    for each in met:
        if each.pair is not None:
            waited[each.pair] += 1 if each.waited else -1
    return {pair for pair, more in waited.items() if more < 0}
