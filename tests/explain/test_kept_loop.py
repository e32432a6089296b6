"""Event loops that programs keep: a loss of its own in metrics, sentence and picture."""

from overlap.timeline import Span, breakdowns
from overlap.timeline.measure.critical_path import critical_path
from tests.explain.test_pieces import only
from tests.timeline.made import comm, compute, render_text, sentence, timeline_of

PLACE = "train.py:50"


def kept(rank, start, end, *, by):
    lane = "program" if rank == by else "loop"
    return Span(rank=rank, kind="program", lane=lane, name=PLACE, start_ns=start, end_ns=end)


def both(start, end, *, by):
    return [kept(rank, start, end, by=by) for rank in (0, 1)]


def one_keeps():
    """Rank 1 keeps the loop of both while an operation is under way, whose bytes take 10."""
    pair = (0, 1)
    return timeline_of(
        *both(2_000, 80_000, by=1), *(comm(rank, 2_000, 2_000, 90_000, ranks=pair, nbytes=1 << 20) for rank in pair)
    )


def test_a_kept_loop_is_no_communication():
    for row in breakdowns(one_keeps()):
        assert (row.wall_ns, row.kept_ns, row.wire_ns, row.waiting_ns, row.idle_ns) == (88_000, 78_000, 10_000, 0, 0)
        assert row.transfer_ns == row.comm_ns == 10_000


def test_compute_counts_before_a_kept_loop():
    timeline = timeline_of(compute(0, 0, 30), kept(0, 10, 50, by=0), comm(0, 20, 20, 60))
    (row,) = breakdowns(timeline)
    assert (row.compute_ns, row.kept_ns, row.overlapped_ns, row.exposed_ns) == (30, 20, 10, 10)


def test_the_verdict_and_the_picture_say_who_kept_it_and_where():
    assert sentence(one_keeps()) == (
        "whole run 88.0 us: compute not recorded, exposed 10.0 (11%): 10.0 on the wire (all_reduce at train.py:9); "
        "78.0 (89%) the program keeps the event loop (rank 1 at train.py:50)"
    )
    drawn = render_text(one_keeps(), ascii=True)
    assert "%%%%%" in drawn
    assert "% event loop kept" in drawn
    assert [(link.rank, str(link)) for link in critical_path(one_keeps())] == [
        (1, "program at train.py:50"),
        (0, "all_reduce at train.py:9"),
    ]


def test_a_rank_that_waits_for_a_rank_whose_loop_another_keeps_blames_the_other():
    pair = (0, 2)
    timeline = timeline_of(*both(0, 40, by=1), comm(2, 0, 40, 42, ranks=pair), comm(0, 40, 40, 42, ranks=pair))
    (found,) = [each for each in only(timeline, 2) if each[0] is not None]
    assert found == (1, "its program at train.py:50", 40)
