"""Pieces of a timeline: the sum is exact, and each nanosecond has the cause that one finds by looking."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.explain.causes import NAMES, WAIT, WIRE
from overlap.explain.pieces import MAX_CHAIN_RANKS
from overlap.explain.ranks import late_ranks
from overlap.explain.spans import pieces_of_spans, run_ns_until
from overlap.timeline import Span, breakdowns
from overlap.timeline.measure.activity import WAITING, Activity
from overlap.timeline.measure.meetings import PAIRED, last_arrival_rows
from overlap.timeline.measure.steps import RankWindow, rank_windows
from tests.timeline.made import LIMIT_NS, RANKS, comm, compute, timeline_of, traces


def at(spans, now):
    return [span for span in spans if span.start_ns <= now < span.end_ns]


def doing(timeline, rank, now):
    """What a rank does at an instant: computing, or the oldest operation that moves, or else waits."""
    mine = at([span for span in timeline.spans if span.rank == rank], now)
    if any(span.kind == "compute" for span in mine):
        return "compute", None
    ordered = sorted([s for s in timeline.spans if s.kind == "comm" and s.rank == rank and s.duration_ns], key=by_start)
    active = sorted([span for span in mine if span.kind == "comm"], key=lambda s: (s.info.issued_ns, ordered.index(s)))
    for span in active:
        if span.info.met_ns <= now:
            return "wire", span
    return ("waiting", active[0]) if active else ("program", None)


def key(span):
    """What the spans of one operation have in common."""
    info = span.info
    met_ns = info.met_ns if info.op in PAIRED else None
    return info.group, info.ranks, span.lane, info.op, info.seq, met_ns


def by_start(span):
    return span.start_ns


def last_of(timeline, span):
    same = [other for other in timeline.spans if other.info and other.info.seq == span.info.seq]
    return max(same, key=lambda other: (other.start_ns, -other.rank)).rank


def found_by_looking(timeline, victim, now):
    what, span = doing(timeline, victim, now)
    if what == "wire":
        return None, "wire"
    passed = {victim}
    if (rank := last_of(timeline, span)) in passed:
        return None, ""
    while True:
        what, under = doing(timeline, rank, now)
        passed.add(rank)
        if what != "waiting" or last_of(timeline, under) in passed or len(passed) > MAX_CHAIN_RANKS:
            return rank, "unrecorded" if what in ("waiting", "program") else what
        rank = last_of(timeline, under)


@given(traces())
def test_every_nanosecond_has_the_cause_that_one_finds_by_looking(timeline):
    windows = rank_windows(timeline)
    told, spent = {}, {}
    found = pieces_of_spans(Activity(timeline, windows))
    for piece in range(len(found)):
        victim, cause = int(found.rank[piece]), NAMES[found.cause[piece]]
        late, did = int(found.late[piece]), NAMES[found.did[piece]] if found.did[piece] >= 0 else ""
        for now in range(found.start_ns[piece], found.end_ns[piece]):
            assert (victim, now) not in spent
            spent[victim, now] = cause
            if cause in (WAIT, WIRE):
                told[victim, now] = (late if late >= 0 else None, did) if cause == WAIT else (None, "wire")
    for row, window in zip(breakdowns(timeline), windows, strict=True):
        assert {now for rank, now in spent if rank == row.rank} == set(range(*window[2:]))
        counted = {"compute": 0, "wire": 0, "waiting": 0, "idle": 0, "transfer": 0, "queued": 0}
        mine = [span for span in timeline.spans if span.rank == row.rank and span.kind == "comm"]
        for now in range(*window[2:]):
            active = at(mine, now)
            moving = any(span.info.met_ns <= now for span in active)
            computing = any(span.kind == "compute" for span in at(timeline.for_rank(row.rank), now))
            counted["transfer"] += moving
            queued = any(s.info.issued_ns <= now < s.end_ns for s in mine)
            busy = "compute" if computing else "wire" if moving else "waiting" if active else ""
            what = busy or ("queued" if queued else "idle")
            counted[what] += 1
            assert spent[row.rank, now] == {"queued": "queue", "idle": "unrecorded"}.get(what, what)
            if what in ("wire", "waiting"):
                assert told.pop((row.rank, now)) == found_by_looking(timeline, row.rank, now)
        assert counted == {
            "compute": row.compute_ns,
            "wire": row.wire_ns,
            "waiting": row.waiting_ns,
            "idle": row.idle_ns,
            "transfer": row.transfer_ns,
            "queued": row.queued_ns,
        }
        assert row.wall_ns == row.compute_ns + row.waiting_ns + row.wire_ns + row.queued_ns + row.idle_ns
    assert told == {}


@given(traces(), st.lists(st.tuples(st.integers(0, RANKS - 1), st.integers(0, 9), st.sampled_from(["send", "gather"]))))
def test_columns_name_the_same_last_rank_as_a_look_at_each_span(timeline, others):
    spans = [comm(rank, start, start + rank, 20, op=op, seq=start % 2) for rank, start, op in others]
    timeline = timeline_of(*timeline.spans, *spans)
    spans, rows = timeline.spans, last_arrival_rows(timeline.columns)
    for span, row in zip(spans, rows.tolist(), strict=True):
        met = [other for other in spans if span.info and other.info and key(other) == key(span)]
        if len({other.rank for other in met}) < 2:
            assert row < 0
        else:
            start_ns = max(other.start_ns for other in met)
            assert (spans[row].start_ns, key(spans[row])) == (start_ns, key(span))
            assert spans[row].rank == min(other.rank for other in met if other.start_ns == start_ns)


@given(traces())
def test_what_each_rank_did_is_what_one_finds_by_looking(timeline):
    activity = Activity(timeline, [RankWindow(rank, None, 0, 2 * LIMIT_NS) for rank in timeline.ranks()])
    every = activity.pieces()
    for rank in timeline.ranks():
        pieces = every.take((every.rank == rank) & (every.doing <= WAITING))
        spans = list(activity.columns.take(pieces.row).spans())
        words = [("compute", "program", "wire", "waiting")[number] for number in pieces.doing.tolist()]
        times = zip(pieces.start_ns.tolist(), pieces.end_ns.tolist(), words, spans, strict=True)
        did = {now: (word, span) for start_ns, end_ns, word, span in times for now in range(start_ns, end_ns)}
        for now in range(2 * LIMIT_NS):
            what, span = did.get(now, ("program", None))
            assert (what, None if what == "compute" else span) == doing(timeline, rank, now)


@pytest.mark.parametrize("late", ["send", "recv"])
def test_the_late_rank_is_named_with_its_own_call(late):
    """The ends of a message are one operation, with two names and two lines."""
    ends = [
        replace(
            comm(rank, 30 if name == late else 0, 30, 32, op="send/recv", ranks=(0, 1), site=f"{name}.py:1"), name=name
        )
        for rank, name in enumerate(("send", "recv"))
    ]
    (found,) = [each for rank in (0, 1) for each in only(timeline_of(*ends), rank) if each[0] is not None]
    assert found[:2] == (late == "recv", f"its program, before {late} at {late}.py:1")


def only(timeline, victim=0, step=None):
    """Return the reasons of exposed communication on a rank: the awaited rank, what it did, or the operation; time."""
    found = pieces_of_spans(Activity(timeline, rank_windows(timeline, step=step)))
    found = found.take((found.rank == victim) & found.is_cause(WAIT, WIRE))
    sums = {}
    for at in range(len(found)):
        piece = found.take(np.array([at]))
        late = late_ranks(piece, None)
        known = bool(late) and late[0].rank is not None
        key = (late[0].rank, late[0].doing) if known else (None, str(piece.sites[piece.site[0]]), bool(late))
        sums[key] = sums.get(key, 0) + int(piece.end_ns[0] - piece.start_ns[0])
    return sorted(((*key[:2], ns) for key, ns in sums.items()), key=lambda each: (-each[2], each[1]))


def test_the_last_rank_is_told_with_what_it_computed_and_where():
    timeline = timeline_of(
        compute(0, 0, 5), compute(1, 0, 5), compute(1, 5, 20, "tokenise", "train.py:31"), comm(0, 6, 22, 30),
        comm(1, 22, 22, 30),
    )  # fmt: skip
    assert only(timeline) == [
        (1, "compute 'tokenise' at train.py:31", 14),
        (None, "all_reduce at train.py:9", 8),
        (1, "its program, before all_reduce at train.py:9", 2),
    ]


def test_it_is_what_the_victim_does_not_compute_even_if_the_rank_is_on_to_something_else():
    timeline = timeline_of(
        compute(0, 0, 10, "backward"), compute(1, 0, 4, "tokenise", "train.py:31"), compute(1, 4, 14, "backward"),
        comm(0, 10, 14, 20), comm(1, 14, 14, 20),
    )  # fmt: skip
    assert only(timeline)[1] == (1, "compute 'tokenise' at train.py:31", 4)


def test_a_compute_after_the_wait_made_nobody_late():
    timeline = timeline_of(
        compute(0, 0, 5, "backward"), compute(1, 0, 8, "backward"), comm(0, 5, 8, 9), comm(1, 8, 8, 9),
        compute(0, 9, 11, "update"), compute(1, 9, 18, "update"),
    )  # fmt: skip
    assert only(timeline)[0] == (1, "compute 'backward' at train.py:1", 3)


def test_what_the_rank_was_at_is_named_before_a_larger_excess():
    timeline = timeline_of(
        compute(0, 0, 2, "update"), compute(1, 0, 9, "update"), compute(0, 2, 9, "other"),
        compute(0, 10, 15, "backward"), compute(1, 10, 18, "backward"), comm(0, 15, 18, 19), comm(1, 18, 18, 19),
    )  # fmt: skip
    assert only(timeline)[0] == (1, "compute 'backward' at train.py:1", 3)


def test_what_a_rank_computed_before_its_step_began_is_no_excess_of_the_step():
    steps = [
        Span(rank=rank, kind="step", lane="step", name="step 1", start_ns=start_ns, end_ns=30, step=1)
        for rank, start_ns in ((0, 10), (1, 16))
    ]
    timeline = timeline_of(
        *steps, compute(0, 0, 10, "update"), compute(1, 6, 16, "update"), compute(0, 10, 14, "backward"),
        compute(1, 16, 20, "backward"), comm(0, 14, 20, 30), comm(1, 20, 20, 30),
    )  # fmt: skip
    told = [did for rank, did, _ in only(timeline, step=1) if rank == 1]
    assert told == ["compute 'backward' at train.py:1", "compute 'update' at train.py:1"]


@given(traces(), st.lists(st.integers(0, LIMIT_NS), min_size=RANKS, max_size=RANKS))
def test_time_spent_until_an_instant_is_what_one_finds_by_looking(timeline, begun):
    computes = timeline.columns.take(timeline.columns.is_kind("compute"))
    asked = [(rank, now) for now in range(2 * LIMIT_NS) for rank in range(RANKS)]
    found = run_ns_until(computes, np.array(begun), *np.array(asked).T)
    for (rank, now), ns in zip(asked, found.tolist(), strict=True):
        spans = [span for span in timeline.spans if span.kind == "compute" and span.rank == rank]
        assert ns == sum(max(min(span.end_ns, now) - max(span.start_ns, begun[rank]), 0) for span in spans)


def test_a_program_that_kept_the_loop_busy_is_told_with_its_place():
    busy = Span(rank=1, kind="program", lane="program", name="train.py:50", start_ns=0, end_ns=20)
    assert only(timeline_of(busy, comm(0, 5, 20, 22), comm(1, 20, 20, 22))) == [
        (1, "its program at train.py:50", 15),
        (None, "all_reduce at train.py:9", 2),
    ]


def test_a_chain_is_followed_to_the_rank_that_nobody_keeps_waiting():
    pair, other = (0, 1), (1, 2)
    timeline = timeline_of(
        comm(0, 0, 20, 20, ranks=pair, op="send/recv"), comm(1, 20, 20, 20, ranks=pair, op="send/recv"),
        comm(1, 0, 18, 18, ranks=other, op="send/recv"), comm(2, 18, 18, 18, ranks=other, op="send/recv"),
        compute(2, 0, 18, "load"),
    )  # fmt: skip
    assert only(timeline)[0] == (2, "compute 'load' at train.py:1", 18)


def test_two_ranks_that_wait_for_each_other_are_not_followed_in_circles():
    timeline = timeline_of(
        comm(0, 0, 10, 10, seq=0), comm(1, 10, 10, 10, seq=0), comm(1, 0, 12, 12, seq=1), comm(0, 12, 12, 12, seq=1)
    )
    assert only(timeline, 0) == [(1, "its program, before all_reduce at train.py:9", 10)]


def test_a_wait_for_somebody_who_is_not_recorded_says_so():
    assert only(timeline_of(comm(0, 0, 10, 12))) == [
        (None, "all_reduce at train.py:9", 10),
        (None, "all_reduce at train.py:9", 2),
    ]
    (late,) = late_ranks(
        pieces_of_spans(Activity(timeline := timeline_of(comm(0, 0, 10, 12)), rank_windows(timeline))), None
    )
    assert (late.rank, str(late), late.waited_ns) == (None, "a rank that is not recorded", 10)


def test_a_rank_that_marks_no_steps_does_not_vanish():
    step = Span(rank=0, kind="step", lane="step", name="step 0", start_ns=0, end_ns=50, step=0)
    timeline = timeline_of(step, compute(0, 0, 40), compute(1, 5, 45))
    assert [(row.rank, row.wall_ns, row.compute_ns) for row in breakdowns(timeline, step=0)] == [
        (0, 50, 40),
        (1, 50, 40),
    ]


@pytest.mark.parametrize("met", [-5, 40])
def test_times_that_cannot_be_still_add_up(met):
    (row,) = breakdowns(timeline_of(comm(0, 0, met, 10)))
    assert row.waiting_ns + row.wire_ns == row.exposed_ns == 10
