"""Computes of a recorded run, call by call: how long each took, and how long after the one before it it began.

Between two computes of a stream, both of which have been issued, lies time that a model does not know: the thread ends
the one and takes the next one, while other threads want the interpreter and the cores. Where the next compute has
waited, for communication or for the program to issue it, that time lies between the last end of anything on its rank
and its start.

A trace does not show whether a compute has waited for communication. All computes of a name that follow computes of
another name are taken to be alike in this: they have waited if, in at least half of the pairs, something of the rank's
communication, or of its other streams, ended in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TypeAlias

from ..span import Span
from ..spans import Timeline

RecordedCall: TypeAlias = "tuple[int, int]"
"""The time between a compute and the one before it, and the time that it takes, in nanoseconds."""

ComputeKey: TypeAlias = "tuple[int, str, str]"
"""A rank, a lane, and the name of computes."""

_Pair: TypeAlias = "tuple[str, str]"
_MeasuredCompute: TypeAlias = "tuple[Span, _Pair | None, int, int]"
"""A compute; its name after that of the one before it on its lane, or None if that was over before the compute was
issued; how long after the end of the one before, and after the last end of anything on its rank, it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Computes of a recorded run, call by call."""

    calls: Mapping[ComputeKey, tuple[RecordedCall, ...]]  # in the order of their starts
    between_ns: int  # the median of the time between two computes of a stream if the second does not wait

    @classmethod
    def of(cls, timeline: Timeline) -> Replayed:
        """Return the calls of a timeline's computes, by rank, lane and name."""
        measured = [each for spans in timeline.by_rank().values() for each in _measure_gaps(spans)]
        waits: Counter[_Pair] = Counter()
        for _, pair, after_ns, late_ns in measured:
            if pair is not None:
                waits[pair] += 1 if late_ns < after_ns else -1
        at_once = {pair for pair, more in waits.items() if more < 0}
        calls: defaultdict[ComputeKey, list[RecordedCall]] = defaultdict(list)
        for span, pair, after_ns, late_ns in measured:
            before_ns = after_ns if pair in at_once else late_ns
            calls[span.rank, span.lane, span.name].append((before_ns, span.duration_ns))
        between_ns = median_low([after_ns for _, pair, after_ns, _ in measured if pair in at_once] or [0])
        return cls(calls={key: tuple(calls_of_key) for key, calls_of_key in calls.items()}, between_ns=between_ns)

    def player(self) -> Callable[[ComputeKey, int], RecordedCall]:
        """Return a function that gives the next call of some computes, beginning with the first.

        Its second argument is how long such a compute usually takes, for calls that the recorded run did not have.
        """
        remaining: dict[ComputeKey, Iterator[RecordedCall]] = {key: iter(calls) for key, calls in self.calls.items()}
        return lambda key, usual_ns: next(remaining.get(key, iter(())), (self.between_ns, usual_ns))


def _measure_gaps(spans: list[Span]) -> Iterator[_MeasuredCompute]:
    """Yield the computes of one rank in order of start, each with its gaps to earlier ends."""
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
        yield span, (before.name, span.name) if before and queued else None, after_ns, late_ns
