"""Timelines made by hand, and at random."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from overlap.timeline import CollectiveInfo, Span, Timeline, TimelineView
from overlap.timeline.columnar import NONE

LIMIT_NS = 30
RANKS = 3


def compute(rank, start, end, name="work", site="train.py:1"):
    return Span(rank=rank, kind="compute", lane="compute", name=name, start_ns=start, end_ns=end, call_site=site)


def comm(rank, start, met, end, *, seq=0, issued=None, ranks=tuple(range(RANKS)), op="all_reduce", site="train.py:9",
         awaited=None, nbytes=8):  # fmt: skip
    info = CollectiveInfo(
        op=op, algorithm="ring", group="world", seq=seq, nbytes=nbytes, dtype="float32",
        issued_ns=start if issued is None else issued, met_ns=met, priority=0, call_site=site, start_ns=start,
        end_ns=end, ranks=ranks, awaited_ns=awaited,
    )  # fmt: skip
    return Span(rank=rank, kind="comm", lane="comm", name=op, start_ns=start, end_ns=end, info=info)


def shifted(timeline, offset_ns):
    """Return a timeline on a clock that is ahead."""
    columns = timeline.columns
    known = {name: getattr(columns, name) != NONE for name in ("issued_ns", "awaited_ns")}
    known |= {"start_ns": True, "end_ns": True, "met_ns": columns.is_operation}
    moved = {name: getattr(columns, name) + np.where(which, offset_ns, 0) for name, which in known.items()}
    return Timeline.of_columns(
        replace(columns, **moved), world_size=timeline.world_size, clock=timeline.clock, meta=timeline.meta
    )


def sentence(timeline, **how):
    """Return the sentence on a step, or on the whole run, and maybe on some ranks."""
    return TimelineView(timeline, **how).sentence


def span_order(span):
    """Say how a timeline sorts its spans."""
    seq = span.info.seq if span.info else -1
    return span.start_ns, span.rank, span.kind, span.lane, span.end_ns, span.name, seq


def timeline_of(*spans):
    return Timeline(spans=spans, world_size=RANKS)


@st.composite
def traces(draw):
    random = draw(st.randoms(use_true_random=False))
    spans = [compute(0, 0, 1)]
    for rank in range(RANKS):
        for _ in range(random.randint(0, 3)):
            spans.append(compute(rank, *sorted(random.randint(0, LIMIT_NS) for _ in range(2))))
    for seq in range(random.randint(0, 4)):
        starts = [random.randint(0, LIMIT_NS) for _ in range(RANKS)]
        for rank, start in enumerate(starts):
            end = max(starts) + random.randint(0, 8)
            issued, awaited = random.randint(0, start), random.choice([None, random.randint(0, end)])
            spans.append(comm(rank, start, max(starts), end, seq=seq, issued=issued, awaited=awaited))
    return timeline_of(*spans)


def render_text(timeline, *, width=80, height=None, color=False, **how):
    """Return the picture of a timeline as text, with the characters of a terminal with colours or without."""
    lines = TimelineView(timeline, **how).lines(width=width, height=height, color=color)
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
