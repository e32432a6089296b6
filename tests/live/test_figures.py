"""What ranks did lately, by hand: four ranks whose records say it to the nanosecond."""

import numpy as np
import pytest

from overlap.flight.reading import CallWords, RankTable
from overlap.live.figures import figures
from overlap.live.screen import brief, lines, title

MS = 1_000_000
CALLS = {
    1: CallWords("backward", "compute", "", (), "train.py:7", 0),
    2: CallWords("bucket 0", "all_reduce", "world", (0, 1), "train.py:8", 1 << 20),
    3: CallWords("bucket 1", "all_reduce", "far", (0, 9), "train.py:9", 1 << 10),
}


def glance(rank, *operations, step=4):
    """Operations are (issued, number, call, step, ended, started) in milliseconds."""
    rows = [(i * MS, number, call, of, e * MS, s * MS) for i, number, call, of, e, s in operations]
    return RankTable(rank, step, False, np.array(rows, np.int64).reshape(-1, 6).T)


def measured(*glances, places=None, window=(100, 200)):
    ranks = [((places or {}).get(each.rank, ("a", 0)), each, CALLS) for each in glances]
    return figures(ranks, (window[0] * MS, window[1] * MS))


def times(row):
    t = row.times
    return [x / MS for x in (t.compute_ns, t.overlapped_ns, t.waiting_ns, t.wire_ns, t.idle_ns)]


EARLY = glance(0, (90, 0, 1, 3, 140, 100), (95, 0, 2, 3, 190, 130))
LATE = glance(1, (90, 0, 1, 3, 180, 100), (95, 0, 2, 3, 190, 180))


def test_time_goes_to_compute_to_waiting_for_the_last_and_to_the_wire():
    world = measured(EARLY, LATE)
    assert times(world.ranks[0]) == [40, 10, 40, 10, 10]
    assert times(world.ranks[1]) == [80, 0, 0, 10, 10]
    assert world.late_ns == {0: 0, 1: 50 * MS}
    assert world.bytes_per_s == {"in process": 2 * (1 << 20) / 0.1}


def test_who_has_not_come_is_late_until_now():
    world = measured(glance(0, (110, 5, 2, 4, 0, 0)), glance(1, (110, 3, 1, 4, 0, 120), (100, 4, 2, 4, 119, 105)))
    assert times(world.ranks[0])[2:4] == [90, 0]
    assert world.late_ns == {0: 0, 1: 90 * MS}
    assert (world.ranks[0].in_flight_bytes, world.ranks[0].doing, world.ranks[1].doing) == (
        1 << 20,
        "bucket 0",
        "backward",
    )


def test_a_rank_does_its_newest_compute_else_the_oldest_operation_in_flight():
    forward, backward = (0, 1, 1, 4, 0, 110), (120, 2, 4, 4, 0, 120)
    first, second = (105, 3, 2, 4, 0, 0), (106, 4, 3, 4, 0, 0)
    calls = CALLS | {4: CallWords("look ahead", "compute", "ahead", (), "train.py:7", 0)}

    def doing(*operations):
        return figures([(("a", 0), glance(0, *operations), calls)], (100 * MS, 200 * MS)).ranks[0].doing

    assert doing(first, forward, second, backward) == "look ahead"
    assert doing(first, forward, second) == "backward"
    assert doing(first, second) == "bucket 0"


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        ({0: ("a", 0), 1: ("a", 0)}, "in process"),
        ({0: ("a", 0), 1: ("a", 1)}, "on host"),
        ({0: ("a", 0), 1: ("b", 1)}, "network"),
        ({0: ("a", 0)}, "network"),
    ],
)
def test_bytes_are_told_apart_by_what_they_travel_over(places, kind):
    world = measured(EARLY, *([glance(1)] if 1 in places else []), places=places)
    assert list(world.bytes_per_s) == [kind]


def test_of_members_elsewhere_nothing_is_known_and_nobody_is_blamed():
    world = measured(glance(0, (110, 5, 3, 4, 0, 0)))
    assert times(world.ranks[0])[2:4] == [0, 90]
    assert world.late_ns == {0: 0}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_takes_what_lies_between_last_ends_however_far_ahead_it_was_issued(ahead):
    operations = [
        ((0 if ahead else 100 * step) + at, 2 * step, 1, step, 100 * step + at + 9, 100 * step + at + 1)
        for step in range(4)
        for at in (0, 50)
    ]
    world = measured(glance(0, *operations), window=(0, 400))
    assert world.step_ns == 100 * MS
    assert measured(glance(0, *operations[:3]), window=(0, 400)).step_ns is None


def test_a_step_that_has_not_ended_counts_for_nothing():
    ended = [(10 * step, step, 1, step, 100 * step + 90, 100 * step) for step in range(3)]
    world = measured(glance(0, *ended, (25, 3, 1, 1, 0, 0)), window=(0, 400))
    assert world.step_ns is None  # 1 has more to come, and so may 2


def text(world, **look):
    head = title(job="5f2c", script="train.py", ranks=2, where="1 process", age_s=75)
    return [
        "".join(piece for piece, _ in line)
        for line in lines(world, head, **{"width": 80, "height": 24, "ascii": False, **look})
    ]


def test_a_screen_of_eighty_columns():
    assert text(measured(EARLY, LATE)) == [
        "train.py: 2 ranks in 1 process, 1 min 15 s; job 5f2c",
        "step 4: compute 60%, hidden 14%, exposed 30%: 20% waiting, 10% wire",
        "waited for: rank 1, 100% of all waiting",
        "moved: 20 MiB/s in process",
        "rank compute             communication          a step  in flight at",
        "   1 ███████████     80% █               10%",
        "   0 ██████          40% ▄░░░░░░█        60%",
        "█ compute  ▄ hidden comm  ░ waiting for a rank  █ on the wire",
    ]


def test_a_dumb_terminal_gets_plain_characters_and_a_low_one_fewer_rows():
    ranks = [glance(rank, (90, 0, 1, 3, 110 + 8 * rank, 100)) for rank in range(8)]
    low = text(measured(*ranks), height=9, ascii=True)
    assert len(low) <= 9
    assert all(line.isascii() and len(line) <= 80 for line in low)
    assert len(text(measured(*ranks))) == 6 + 8


def test_a_line_says_it_where_nothing_can_be_drawn():
    assert brief(measured(EARLY, LATE)) == (
        "step 4: compute 60%, hidden 14%, exposed 30%: 20% waiting, 10% wire; "
        "waited for: rank 1, 100% of all waiting; moved: 20 MiB/s in process"
    )
