import pytest

from overlap.timeline import Recorder, Timeline
from overlap.timeline.measure.stragglers import arrivals, straggler


def timeline_of(*calls):
    """Each call is (rank, start_ns, group, lane, seq, op)."""
    recorders = [Recorder(rank) for rank in range(4)]
    for rank, start, group, lane, seq, op in calls:
        info = ((op, "ring", group, seq, 8, "int8", start), start, 0, "", 0, None)
        recorders[rank].append(("comm", lane, op, start, start + 100, info))
    return Timeline.collect(recorders, world_size=4)


def counted(timeline, **arguments):
    return {one.rank: (one.collectives, one.last, one.caused_wait_ns) for one in arrivals(timeline, **arguments)}


def test_the_last_to_arrive_caused_the_waiting_of_all_others():
    reduce = ("world", "comm", 0, "all_reduce")
    timeline = timeline_of((0, 10, *reduce), (1, 30, *reduce), (2, 25, *reduce))
    assert counted(timeline) == {0: (1, 0, 0), 1: (1, 1, 25), 2: (1, 0, 0)}
    assert straggler(arrivals(timeline)).rank == 1


def test_group_stream_and_sequence_number_keep_operations_apart():
    timeline = timeline_of(
        (0, 0, "world", "comm", 0, "all_reduce"),
        (1, 9, "world", "comm", 1, "all_reduce"),
        (2, 9, "world", "tp", 0, "all_reduce"),
        (3, 9, "dp", "comm", 0, "all_reduce"),
    )
    assert set(counted(timeline).values()) == {(0, 0, 0)}
    assert straggler(arrivals(timeline)) is None


def test_groups_of_one_name_are_told_apart_by_their_ranks():
    first, second = ("tp", (0, 1)), ("tp", (2, 3))
    starts = ((0, 0, first), (1, 4, first), (2, 9, second), (3, 7, second))
    timeline = timeline_of(*((rank, start, group, "comm", 0, "all_reduce") for rank, start, group in starts))
    assert counted(timeline) == {0: (1, 0, 0), 1: (1, 1, 4), 2: (1, 1, 2), 3: (1, 0, 0)}


@pytest.mark.parametrize("op", ["send", "recv", "send/recv"])
def test_point_to_point_says_nothing_about_groups(op):
    timeline = timeline_of((0, 0, "world", "comm", 0, op), (1, 9, "world", "comm", 0, op))
    assert counted(timeline) == {0: (0, 0, 0), 1: (0, 0, 0)}


def test_a_tie_blames_the_lowest_rank_and_a_full_tie_nobody():
    first, second = ("world", "comm", 0, "barrier"), ("world", "comm", 1, "barrier")
    timeline = timeline_of((0, 0, *first), (1, 5, *first), (2, 5, *first), (0, 20, *second), (1, 20, *second))
    assert counted(timeline) == {0: (2, 0, 0), 1: (2, 1, 5), 2: (1, 0, 0)}


def test_a_step_counts_its_own_collectives(training):
    assert counted(training(3), step=1) == {0: (4, 0, 0), 1: (4, 0, 0), 2: (4, 4, 8_000_000)}
    assert counted(training(3)) == {0: (12, 0, 0), 1: (12, 0, 0), 2: (12, 12, 24_000_000)}
    assert straggler([]) is None
