"""Flight records as timelines, by hand: four ranks whose records say what they did to the nanosecond."""

import threading
import time

import numpy as np
import pytest

import overlap
from overlap.cli.top import find_world, measure_window, summary_line
from overlap.config import overriding_config
from overlap.flight.reading import RankTable
from overlap.flight.spans import step_length_ns, timeline_of_records
from overlap.timeline import Timeline, breakdowns
from overlap.timeline.measure.activity import Activity
from overlap.timeline.measure.metrics import measure_windows
from overlap.timeline.measure.steps import RankWindow
from overlap.waits.ends import CallRecord
from tests.timeline.made import shifted

MS = 1_000_000
CALLS = {
    1: CallRecord(op="compute", name="backward", key="", members=(), site="train.py:7", nbytes=0),
    2: CallRecord(op="all_reduce", name="bucket 0", key="world", members=(0, 1), site="train.py:8", nbytes=1 << 20),
    3: CallRecord(op="all_reduce", name="bucket 1", key="far", members=(0, 9), site="train.py:9", nbytes=1 << 10),
    4: CallRecord(op="send", name="to 1", key="0 to 1", members=(0, 1), site="train.py:11", nbytes=1 << 10),
    5: CallRecord(op="recv", name="from 0", key="0 to 1", members=(0, 1), site="train.py:12", nbytes=1 << 10),
}


def table(rank, *operations, step=4, calls=CALLS, **more):
    """Operations are (issued, number, call, step, ended, started) in milliseconds."""
    rows = [(i * MS, number, call, of, e * MS, s * MS) for i, number, call, of, e, s in operations]
    return RankTable(rank, step, False, np.array(rows, np.int64).reshape(-1, 6).T, calls, **more)


def measured(*tables, window=(100, 200)):
    timeline = timeline_of_records(tables, window[1] * MS, 10)
    return measure_window(timeline, {each.rank: each for each in tables}, (window[0] * MS, window[1] * MS))


def times(row):
    return [x / MS for x in (row.compute_ns, row.overlapped_ns, row.waiting_ns, row.wire_ns, row.idle_ns)]


def waited(look):
    return {late.rank: late.waited_ns / MS for late in look.late}


EARLY = table(0, (90, 0, 1, 3, 140, 100), (95, 0, 2, 3, 190, 130))
LATE = table(1, (90, 0, 1, 3, 180, 100), (95, 0, 2, 3, 190, 180))


def test_time_goes_to_compute_to_waiting_for_the_last_and_to_the_wire():
    look = measured(EARLY, LATE)
    assert [times(row) for row in look.rows] == [[40, 10, 40, 10, 10], [80, 0, 0, 10, 10]]
    assert waited(look) == {1: 40}
    assert summary_line(look) == (
        "step 4: compute 60%, hidden 14%, exposed 30%: 20% waiting, 10% wire; waited for: rank 1 (compute 'backward' "
        "at train.py:7), 100% of all waiting"
    )


def test_a_rank_that_has_not_come_is_late_until_now():
    look = measured(table(0, (110, 5, 2, 4, 0, 0)), table(1, (110, 3, 1, 4, 0, 120), (100, 4, 2, 4, 119, 105)))
    assert times(look.rows[0])[2:4] == [90, 0]
    assert waited(look) == {1: 90}
    assert look.in_flight_bytes == {0: 1 << 20, 1: 0}
    assert look.doing == {0: "bucket 0", 1: "backward"}


def test_the_ends_of_a_message_meet():
    look = measured(table(0, (110, 0, 4, 4, 190, 180)), table(1, (110, 0, 5, 4, 190, 120)))
    assert times(look.rows[1])[2:4] == [60, 10]
    assert waited(look) == {0: 60}


def test_a_rank_does_its_newest_compute_else_the_oldest_operation_in_flight():
    forward, backward = (0, 1, 1, 4, 0, 110), (120, 2, 6, 4, 0, 120)
    first, second = (105, 3, 2, 4, 0, 0), (106, 4, 3, 4, 0, 0)
    calls = CALLS | {
        6: CallRecord(op="compute", name="look ahead", key="ahead", members=(), site="train.py:7", nbytes=0)
    }

    def doing(*operations):
        return measured(table(0, *operations, calls=calls)).doing[0]

    assert doing(first, forward, second, backward) == "look ahead"
    assert doing(first, forward, second) == "backward"
    assert doing(first, second) == "bucket 0"


def test_of_members_elsewhere_nothing_is_known_and_nobody_is_blamed():
    look = measured(table(0, (110, 5, 3, 4, 0, 0)))
    assert times(look.rows[0])[2:4] == [0, 90]
    assert look.late == []


def test_a_compute_that_has_not_begun_and_a_call_that_is_forgotten_are_no_time_of_others():
    look = measured(table(0, (110, 0, 1, 4, 0, 0), (150, 0, 99, 4, 160, 155)))
    assert times(look.rows[0]) == [0, 0, 0, 5, 90]  # 5 are from the call to the begin


def test_of_a_rank_whose_record_is_cut_the_time_since_its_oldest_operation_counts():
    (row,) = measured(table(0, (90, 0, 1, 3, 150, 140), (95, 0, 1, 3, 200, 150), cut=True)).rows
    assert (row.wall_ns, row.compute_ns) == (50 * MS, 50 * MS)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_takes_what_lies_between_last_ends_however_far_ahead_it_was_issued(ahead):
    operations = [
        ((0 if ahead else 100 * step) + at, 2 * step, 1, step, 100 * step + at + 9, 100 * step + at + 1)
        for step in range(4)
        for at in (0, 50)
    ]
    assert step_length_ns(table(0, *operations)) == 100 * MS
    assert step_length_ns(table(0, *operations[:3])) is None


def test_a_step_that_has_not_ended_counts_for_nothing():
    ended = [(10 * step, step, 1, step, 100 * step + 90, 100 * step) for step in range(3)]
    assert step_length_ns(table(0, *ended, (25, 3, 1, 1, 0, 0))) is None  # 1 has more to come, and so may 2


def test_top_shows_the_figures_that_timeline_shows(tmp_path, monkeypatch):
    """Of one run: its records while it runs, and its timeline at the end, in the window of the records."""
    monkeypatch.setenv("OVERLAP_FLIGHT_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen, looks, waits = [], [], [threading.Event() for _ in range(3)]

    def come_late(x, event):
        event.wait()
        time.sleep(0.02)
        return x

    async def program(rank):
        for step in range(3):
            with rank.step(step):
                part = rank.compute(np.ones, 1 << 20, np.float32, name="make")
                if rank.rank == 1:
                    part = rank.compute(come_late, part, waits[step], name="late")
                total = rank.all_reduce(part)
                await part
                waits[step].set()  # rank 0 has its part first
                await total
        if rank.rank == 0:
            world = find_world(None)
            ranks = [each for record in world.processes for each in record.read_ranks()]
            now_ns = max(int(np.abs(each.operations[4]).max()) for each in ranks)
            recorded = timeline_of_records(ranks, now_ns, 2)
            looks.append((recorded, measure_window(recorded, {each.rank: each for each in ranks}, window(recorded))))
            world.close()
        await rank.barrier()

    with overriding_config(watcher=seen.append):
        overlap.run(program, ranks=2)
    (recorded, look), columns = looks[0], seen[0].columns
    columns = columns.take(~columns.is_kind("program"))  # a record does not know who kept the event loop
    timeline = Timeline.of_columns(columns, world_size=2)
    first = timeline.columns.take(timeline.columns.is_kind("compute")).start_ns.min()
    timeline = shifted(timeline, int(recorded.columns.start_ns.min() - first))
    windows = [RankWindow(rank, None, *window(recorded)) for rank in timeline.ranks()]
    rows = measure_windows(Activity(timeline, windows))
    assert [times(row) for row in look.rows] == [times(row) for row in rows]
    assert [row.wall_ns for row in look.rows] == [row.wall_ns for row in rows] > [0, 0]
    assert look.late[0].rank == 1
    assert breakdowns(recorded)[0].exposed_ns == look.rows[0].exposed_ns


def window(timeline):
    return int(timeline.columns.start_ns.min()), int(timeline.columns.end_ns.max())
