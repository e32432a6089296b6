"""The verdict on a world from its flight records, whatever has happened to it."""

import numpy as np
import pytest

from overlap.flight.ends import judge_records, name_missing_processes, views_of_records
from overlap.flight.reading import Flight, RankTable, WorldEnd
from overlap.flight.records import RecordedWorld, choose_world
from overlap.waits.ends import CallRecord
from overlap.waits.wording import last_signs, wait_rows, wait_sentence, wait_table

S = 1_000_000_000
STEP = 12


def operation(
    number=41, *, group="world", members=(0, 1, 2, 3), since=0, started=0, ended=0, failed=False, known=True, **changes
):
    """A row of a table, and its call: an all-reduce on a group, issued in step 12 at second `since`."""
    details = {"op": "all_reduce", "key": group, "group": group, "members": members, "form": "float32 (8,), op='sum'",
               "site": "train.py:33"}  # fmt: skip
    row = (since * S, number, 1 if known else -1, STEP, -ended * S if failed else ended * S, started * S)
    return row, CallRecord(**details | changes)


def compute(name="think", **times):
    return operation(0, group="", members=(), name=name, op="compute", form="", site="train.py:30", **times)


def record(rank, *operations, left=False, step=STEP):
    rows = [(*row[:2], row[2] * (at + 1), *row[3:]) for at, (row, _) in enumerate(operations)]
    calls = {at + 1: call for at, (_, call) in enumerate(operations)}
    return RankTable(rank, step, left, np.array(rows, np.int64).reshape(-1, 6).T, calls)


def flight(process, *records, ending=None, processes=2, **changes):
    details = {
        "path": f"{process}.flight", "job": "j", "attempt": 0, "world": 0, "process": process, "processes": processes,
        "world_size": 4, "host": f"host{process}", "pid": 4710 + process, "born": "1", "started_ns": process,
        "ranks": records, "ending": ending,
    }  # fmt: skip
    return Flight(**details | changes)


def ending(how="failed", rank=None, line="ValueError: no at train.py:8", *, here=False, at=10):
    return WorldEnd(how=how, rank=rank, line=line, here=here, at_ns=at * S)


def judged(*flights, runs=lambda flight: False):
    _, verdict, notes = judge_records(RecordedWorld(flights, runs))
    return verdict.kind.value, verdict.culprits, wait_sentence(verdict), notes


def tabled(*flights):
    world = RecordedWorld(flights, lambda flight: False)
    views, verdict, _ = judge_records(world)
    return wait_table(wait_rows(views, len(views), verdict), world.end_ns)


LOST = "PeerLostError: process 1 (ranks 2-3) is lost: the last connection to it was lost"
WAITED = "{} for it in all_reduce #41 of group 'world' (train.py:33)"
OTHERS = [record(rank, operation(40, ended=1), operation(since=3)) for rank in (0, 1)]
FAILED_LAST = operation(since=3, ended=9, failed=True)
SURVIVED = operation(40, members=(0, 1), since=1, ended=2, failed=True)
HUNG = {"runs": lambda flight: True}
CASES = {
    # name: records, whether processes run, kind, culprits, sentence
    "an error counts before those that only noticed it": (
        [flight(0, *OTHERS, ending=ending(rank=3, line="no at train.py:8", at=9)),
         flight(1, record(2, operation(40, ended=1), operation(since=3)), record(3, operation(40, ended=1)),
                ending=ending(rank=3, here=True))],
        {}, "failed", (3,),
        "rank 3 failed: ValueError: no at train.py:8; " + WAITED.format("ranks 0-2 wait"),
    ),
    "a process that was killed": (
        [flight(0, *OTHERS, ending=ending(rank=2, line=LOST)),
         flight(1, record(2, operation(since=3)), record(3, compute(since=3, started=4)))],
        {}, "dead", (2, 3),
        "ranks 2-3: process 1 (pid 4711 on host1) ended without a word: killed, or by os._exit; rank 3 computed "
        "'think' (train.py:30); ranks 0-1 wait for them in all_reduce #41 of group 'world' (train.py:33)",
    ),
    "a failed operation is open if nothing was issued since": (
        [flight(0, record(0, SURVIVED, FAILED_LAST), ending=ending(rank=1, line=LOST)),
         flight(1, record(1, operation(39, ended=1)))],
        {}, "dead", (1,),
        "rank 1: process 1 (pid 4711 on host1) ended without a word: killed, or by os._exit; it had last called "
        "all_reduce #39 of group 'world' (train.py:33); " + WAITED.format("rank 0 waits"),
    ),
    "a rank has left, and others went on": (
        [flight(0, record(0, operation(since=3, ended=4, failed=True), compute("next", since=6),
                          operation(42, since=6, known=False)),
                record(2, operation(40, ended=1), left=True), record(3, operation(since=3, ended=4, failed=True)),
                processes=1, ending=ending(rank=2, line="RankLeftError: rank 2 finished its program", at=9))],
        {}, "left", (2,),
        "rank 2 has finished its program; " + WAITED.format("ranks 0, 3 wait"),
    ),
    "a process without a file here": (
        [flight(0, record(0, operation(since=3)), record(1, operation(since=4)), ending=ending(rank=2, line=LOST))],
        {}, "dead", (2,),
        f"rank 2: its process is lost, as another process reported: {LOST}; it has no record here; "
        + WAITED.format("ranks 0-1 wait"),
    ),
    "a rank computes": (
        [flight(0, record(0, operation(5, group="a", members=(0, 1), since=1)),
                record(1, operation(7, group="b", members=(1, 2), since=2)), ending=ending("stalled", at=9)),
         flight(1, record(2, compute("tokenise", since=2, started=3),
                          operation(7, group="b", members=(1, 2), known=False)),
                record(3, left=True), ending=ending("stalled", at=9))],
        {}, "late", (2,),
        "rank 2 has not come: it computes 'tokenise' (train.py:30); rank 1 waits for it in all_reduce #7 of group 'b' "
        "(train.py:33)",
    ),
    "a rank that computes waits for nobody": (
        [flight(0, record(0, compute("tokenise", since=3, started=4))),
         flight(1, record(1, operation(since=3), compute(since=3, started=4)), record(3, operation(since=5)))],
        {"runs": lambda flight: flight.process == 1}, "dead", (0,),
        "rank 0: process 0 (pid 4710 on host0) ended without a word: killed, or by os._exit; it computed 'tokenise' "
        "(train.py:30); " + WAITED.format("rank 3 waits"),
    ),
    "two ranks wait for each other": (
        [flight(0, record(0, operation(5, group="a", members=(0, 1), since=1)),
                record(1, operation(7, group="b", members=(0, 1), since=2)), ending=ending("stalled", at=9),
                processes=1)],
        {}, "cycle", (0, 1),
        "ranks 0-1 wait for each other and cannot go on: rank 0 in all_reduce #5 of group 'a' (train.py:33), rank 1 in "
        "all_reduce #7 of group 'b' (train.py:33); call the operations of all groups that ranks share in one order",
    ),
    "an operation waits for its input": (
        [flight(0, record(0, operation(known=False)), *(record(rank, operation()) for rank in (1, 2, 3)))],
        HUNG, "late", (0,),
        "rank 0 has not come: its all_reduce #41 of group 'world' (train.py:33) waits for its input; "
        + WAITED.format("ranks 1-3 wait"),
    ),
    "a receive from any rank": (
        [flight(0, record(0, operation(0, op="recv", key="any source, 0", members=(), tag=3, any_source=True)),
                *(record(rank, operation(1, ended=2), left=True) for rank in (1, 2, 3)))],
        HUNG, "unmatched", (1, 2, 3),
        "ranks 1-3 have finished without the other end of recv #0 from any rank with tag 3 (train.py:33), for which "
        "rank 0 waits",
    ),
    "a run that goes on": (
        [flight(0, record(0, operation(ended=3)), record(1, operation(ended=3)), processes=1, world_size=2)],
        HUNG, "nobody", (), "cannot be told: no rank waits for another",
    ),
}  # fmt: skip


@pytest.mark.everyday(len(CASES))
@pytest.mark.parametrize("case", CASES)
def test_kind_culprits_and_sentence(case):
    flights, runs, *expected = CASES[case]
    *found, notes = judged(*flights, **runs)
    assert (found, notes) == (expected, [])


def test_processes_that_all_vanish_have_no_culprit_of_their_own():
    kind, culprits, _, notes = judged(
        flight(0, record(0, operation(since=3)), record(1, operation(since=3))),
        flight(1, record(2, operation(since=3)), record(3, operation(since=5))),
    )
    assert (kind, culprits) == ("wire", ())
    assert notes == [
        "2 processes (process 0: pid 4710, process 1: pid 4711) ended together without a word: by their launcher, the "
        "machine or the scheduler"
    ]


def test_an_error_that_was_only_noticed_counts_where_waits_decide_nothing():
    ended = [record(rank, operation(40, ended=1)) for rank in (0, 1)]
    line = "LinkLostError: the wire from rank 1 is cut"
    assert judged(flight(0, *ended, processes=1, world_size=2, ending=ending(rank=1, line=line)))[:3] == (
        "failed", (1,), f"rank 1 failed: {line}"
    )  # fmt: skip


def test_a_process_that_ended_is_described_by_its_last_operations():
    killed = flight(0, record(0, compute("before", since=1, started=2), compute("now", since=1, started=4)),
                    record(1, operation(40, ended=1)), pid=7)  # fmt: skip
    world = RecordedWorld([killed, flight(1, record(2, operation(since=3)))], lambda flight: False)
    assert last_signs(views_of_records(world, [killed]), 4, [0, 1]) == [
        "rank 0 computed 'now' (train.py:30) in step 12",
        "rank 1 had last called all_reduce #40 of group 'world' (train.py:33) in step 12",
        "rank 2 waits for it in all_reduce #41 of group 'world' (train.py:33)",
    ]


def test_the_table_has_a_line_for_each_rank():
    flights = [
        flight(0, record(0, operation(since=3)), record(1, operation(40, ended=2), left=True, step=-1),
               ending=ending(rank=2, line=LOST), processes=3),
        flight(2, record(2, compute(since=3, started=4)), record(3), processes=3),
    ]  # fmt: skip
    assert tabled(*flights) == [
        "rank  process  step    for  doing                                          waits for",
        "   2        2    12  6.0 s  computes 'think' (train.py:30)",
        "   3        2    12      -  in its program",
        "   0        0    12  7.0 s  all_reduce #41 of group 'world' (train.py:33)  1-3",
        "   1        0     -  8.0 s  has finished",
    ]
    assert name_missing_processes(RecordedWorld(flights, lambda flight: False)) == [
        "no file of process 1: see the folder for flight records on its machine"
    ]


def test_the_world_that_began_last_is_judged():
    first, second = flight(0, record(0), started_ns=5), flight(0, record(0), attempt=1, started_ns=6)
    world, others = choose_world([second, first], lambda flight: False)
    assert (world.flights, others) == ([second], 1)


def test_runs_of_one_name_are_not_mixed():
    """As those of a job without a name, of which one after the other failed."""
    runs = [
        [flight(process, record(process), started_ns=at * S + process, world_size=size) for process in (0, 1)]
        for at, size in ((0, 4), (60, 4), (62, 2))
    ]
    elsewhere = flight(2, record(2), host="far", started_ns=100 * S)  # whose clock differs
    world, others = choose_world([*runs[1], runs[0][1], elsewhere, *runs[2], runs[0][0]], lambda flight: False)
    assert (world.flights, others) == ([*runs[1], elsewhere], 2)
