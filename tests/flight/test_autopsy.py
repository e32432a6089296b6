"""The verdict on a world from its flight records: who, where and what it waited for, whatever has happened to it."""

import pytest

from overlap.flight.autopsy import RecordedWorld, last_signs, newest_world, sentence, table, verdict
from overlap.flight.reading import CallWords, Flight, Operation, RankRecord, WorldEnd

S = 1_000_000_000
STEP = 12
_WORDS = ("name", "kind", "key", "members", "site", "what", "group", "towards")


def operation(number=41, *, group="world", members=(0, 1, 2, 3), since=0, ended=None, **changes):
    """An all-reduce on a group, issued in step 12 at second `since`."""
    details = {
        "name": "all_reduce", "what": "all_reduce(float32 (8,), op='sum')", "kind": "all_reduce", "group": group,
        "towards": "", "members": members, "key": group, "number": number, "site": "train.py:33", "step": STEP,
        "issued_ns": since * S, "started_ns": None, "ended_ns": None if ended is None else ended * S, "failed": False,
    }  # fmt: skip
    told = details | changes
    words = CallWords(nbytes=0, **{name: told.pop(name) for name in _WORDS})
    return Operation(words=words, **told)


def compute(name="think", *, since=0, started=None, ended=None):
    return operation(
        0, group="", members=(), since=since, ended=ended, name=name, what=name, kind="compute", key="",
        site="train.py:30", started_ns=None if started is None else started * S,
    )  # fmt: skip


def record(rank, *operations, left=False, step=STEP):
    return RankRecord(rank=rank, step=step, left=left, waiting=0, operations=operations)


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
    return verdict(RecordedWorld(flights, runs))


LOST = "PeerLostError: process 1 (ranks 2-3) is lost: the last connection to it was lost"


def test_of_two_computes_that_have_begun_the_last_one_runs():
    killed = record(0, compute("before", since=1, started=2), compute("now", since=1, started=4))
    told = last_signs(RecordedWorld([flight(0, killed, pid=7)], lambda flight: False), 7)
    assert told == ["rank 0 was running compute 'now' (train.py:30) in step 12"]


def test_an_error_beats_those_who_only_noticed():
    waits = [record(rank, operation(40, ended=1), operation(since=3)) for rank in (0, 1)]
    told = judged(
        flight(0, *waits, ending=ending(rank=3, line="ValueError: no at train.py:8", at=9)),
        flight(1, record(2, operation(40, ended=1), operation(since=3)), record(3, operation(40, ended=1)),
               ending=ending(rank=3, here=True)),
    )  # fmt: skip
    assert told == [
        "who:        rank 3 (process 1, pid 4711 on host1) failed: ValueError: no at train.py:8",
        "where:      in its program in step 12, with nothing unfinished; "
        "all_reduce #40 on group 'world' had ended 9.0 s before",
        "waited for: nobody; ranks 0-2 waited for it in all_reduce #41 on group 'world' (train.py:33)",
    ]


def test_a_process_that_was_killed_is_named_with_what_it_was_doing():
    waits = [record(rank, operation(since=3)) for rank in (0, 1)]
    told = judged(
        flight(0, *waits, ending=ending(rank=2, line=LOST)),
        flight(1, record(2, operation(since=3)), record(3, compute(since=3, started=4))),
    )
    assert told == [
        "who:        process 1 (ranks 2-3, pid 4711 on host1) ended without a word: killed, or by os._exit",
        "where:      running compute 'think' (train.py:30) in step 12, for 6.0 s",
        "waited for: nobody; ranks 0-2 waited for it in all_reduce #41 on group 'world' (train.py:33)",
    ]


SENTENCES = {
    "failed": (
        [flight(0, record(0, operation(40, ended=1), operation(since=3)), ending=ending(rank=1, line="no", at=9)),
         flight(1, record(1, operation(40, ended=1)), ending=ending(rank=1, here=True, line="ValueError: no"))],
        "rank 1 (process 1, pid 4711 on host1) failed: ValueError: no; rank 1 was in its program in step 12, with "
        "nothing "
        "unfinished; all_reduce #40 on group 'world' had ended 9.0 s before; rank 0 waited for it in all_reduce #41 on "
        "group 'world' (train.py:33)",
    ),
    "killed": (
        [flight(0, record(0, operation(since=3)), ending=ending(rank=1, line=LOST)),
         flight(1, record(1, compute(since=3, started=4)))],
        "process 1 (rank 1, pid 4711 on host1) ended without a word: killed, or by os._exit; "
        "rank 1 was running compute "
        "'think' (train.py:30) in step 12, for 6.0 s; rank 0 waited for it in all_reduce #41 on group 'world' "
        "(train.py:33)",
    ),
    "not here": (
        [flight(0, record(0, operation(since=3)), ending=ending(rank=1, line=LOST))],
        f"rank 1 (of a process whose file is not here), as another process tells: {LOST}; rank 0 waited for it in "
        "all_reduce #41 on group 'world' (train.py:33)",
    ),
    "circle": (
        [flight(0, record(0, operation(5, group="a", members=(0, 1), since=1)),
                record(1, operation(7, group="b", members=(0, 1), since=2)), ending=ending("stalled", at=9),
                processes=1)],
        "ranks 0-1 wait for each other; rank 0 was in all_reduce #5 on group 'a' (train.py:33) in step 12, for 8.0 s, "
        "waiting for rank 1, which had not called it (rank 1: all_reduce #7 on group 'b' (train.py:33))",
    ),
    "together": (
        [flight(0, record(0, operation(since=3))), flight(1, record(1, operation(since=3)))],
        "2 processes (process 0: pid 4710, process 1: pid 4711) ended together without a word: by their launcher, the "
        "machine or the scheduler; 0 of 2 ranks had finished their programs, 2 operations were unfinished, the longest "
        "in all_reduce #41 on group 'world' (train.py:33), rank 0 for 0.0 ms",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_one_sentence_has_the_culprit_and_what_it_did(case):
    flights, expected = SENTENCES[case]
    assert sentence(RecordedWorld(flights, lambda flight: False)) == expected


@pytest.mark.parametrize(
    ("others", "told"),
    [
        (1, "rank 1 had issued all_reduce #41 on group 'world' (train.py:33) with it, and still computed"),
        (2, "ranks 1-2 had issued all_reduce #41 on group 'world' (train.py:33) with it, and still computed"),
    ],
)
def test_a_rank_that_computes_beside_an_operation_waits_for_nobody(others, told):
    busy = [record(rank, operation(since=3), compute(since=3, started=4)) for rank in range(1, others + 1)]
    killed = flight(0, record(0, compute("tokenise", since=3, started=4)))
    assert judged(killed, flight(1, *busy), runs=lambda flight: flight.process == 1)[2] == f"waited for: nobody; {told}"
    waits = record(3, operation(since=5))
    assert judged(killed, flight(1, *busy, waits), runs=lambda flight: flight.process == 1)[2] == (
        "waited for: nobody; rank 3 waited for it in all_reduce #41 on group 'world' (train.py:33)"
    )


def test_a_rank_that_stands_in_an_earlier_operation_with_others_waits_for_those():
    """Rank 1 receives from rank 2, which computes, and has issued an all-reduce of what comes."""
    receives = operation(7, name="recv", key="m", members=(1, 2), since=3)
    stands, busy = record(1, receives, operation(since=4, what="")), record(2, compute(since=3, started=4))
    killed = flight(0, record(0, compute("tokenise", since=3, started=4)))
    assert judged(killed, flight(1, stands, busy), runs=lambda flight: flight.process == 1)[2] == (
        "waited for: nobody; rank 1 had issued all_reduce #41 on group 'world' (train.py:33) with it, and still waited "
        "in recv #7 on group 'world'"
    )


def test_an_operation_that_failed_last_was_what_a_rank_waited_in():
    """As where a rank hears of the lost process before its world ends; what failed and was survived is no matter."""
    survived = operation(40, members=(0, 1), since=1, ended=2, failed=True)
    told = judged(
        flight(0, record(0, survived, operation(since=3, ended=9, failed=True)), ending=ending(rank=1, line=LOST)),
        flight(1, record(1, operation(39, ended=1))),
    )
    assert told[2] == "waited for: nobody; rank 0 waited for it in all_reduce #41 on group 'world' (train.py:33)"


def test_ranks_that_went_on_waited_in_the_first_operation_to_which_a_rank_did_not_come_that_left():
    """Their operation failed when it left, and they had not yet awaited that: rank 0 issued another one meanwhile."""
    failed = operation(since=3, ended=4, failed=True)
    ahead = [compute("next", since=6), operation(42, since=6, what="")]
    world = RecordedWorld(
        [
            flight(0, record(0, failed, *ahead, step=13), record(1, failed, compute(since=3, started=4)),
                   record(2, operation(40, ended=1), left=True), record(3, failed), processes=1,
                   ending=ending(rank=2, line="RankLeftError: rank 2 finished its program", at=9)),
        ],
        lambda flight: False,
    )  # fmt: skip
    who, _, waited = verdict(world)
    assert who == "who:        rank 2 (process 0, pid 4710 on host0): RankLeftError: rank 2 finished its program"
    assert waited == "waited for: nobody; ranks 0, 3 waited for it in all_reduce #41 on group 'world' (train.py:33)"
    assert table(world)[1:] == [
        "   0        0    12  6.0 s  all_reduce #41 on group 'world' (train.py:33)  2",
        "   1        0    12  5.0 s  running compute 'think' (train.py:30)",
        "   2        0    12  8.0 s  its program had finished",
        "   3        0    12  6.0 s  all_reduce #41 on group 'world' (train.py:33)  2",
    ]


def test_a_process_whose_file_is_not_here_is_accused_by_the_others():
    told = judged(
        flight(0, record(0, operation(since=3)), record(1, operation(since=4)), ending=ending(rank=2, line=LOST))
    )
    assert told == [
        f"who:        rank 2 (of a process whose file is not here), as another process tells: {LOST}",
        "where:      its file is not here; those of the others are in the table",
        "waited for: nobody; ranks 0-1 waited for it in all_reduce #41 on group 'world' (train.py:33)",
    ]


def test_of_a_hang_the_odd_one_out_is_named():
    """Rank 0 waits for 1 in one group, 1 for 2 in another, and 2 computes."""
    told = judged(
        flight(0, record(0, operation(5, group="a", members=(0, 1), since=1)),
               record(1, operation(7, group="b", members=(1, 2), since=2)), ending=ending("stalled", at=9)),
        flight(1, record(2, compute("tokenise", since=2, started=3), operation(7, group="b", members=(1, 2), what="")),
               record(3, left=True), ending=ending("stalled", at=9)),
    )  # fmt: skip
    assert told == [
        "who:        rank 2 (process 1, pid 4711 on host1): the others wait for it",
        "where:      running compute 'tokenise' (train.py:30) in step 12, for 6.0 s",
        "waited for: nobody; rank 1 waited for it in all_reduce #7 on group 'b' (train.py:33)",
    ]


def test_ranks_that_wait_for_each_other_are_named_together():
    told = judged(
        flight(0, record(0, operation(5, group="a", members=(0, 1), since=1)),
               record(1, operation(7, group="b", members=(0, 1), since=2)), ending=ending("stalled", at=9),
               processes=1),
    )  # fmt: skip
    assert told == [
        "who:        ranks 0-1 wait for each other",
        "where:      all_reduce #5 on group 'a' (train.py:33) in step 12, for 8.0 s",
        "waited for: rank 1, which had not called it (rank 1: all_reduce #7 on group 'b' (train.py:33))",
    ]


def test_processes_that_all_vanish_have_no_culprit_of_their_own():
    told = judged(
        flight(0, record(0, operation(since=3)), record(1, operation(since=3))),
        flight(1, record(2, operation(since=3)), record(3, operation(since=5))),
    )
    assert told == [
        "who:        2 processes (process 0: pid 4710, process 1: pid 4711) ended together without a word: by their "
        "launcher, the machine or the scheduler",
        "where:      0 of 4 ranks had finished their programs, 4 operations were unfinished",
        "waited for: longest in all_reduce #41 on group 'world' (train.py:33), rank 0 for 2.0 s",
    ]


def test_a_run_that_goes_on_is_no_failure():
    told = judged(
        flight(0, record(0, operation(ended=3)), record(1, operation(ended=3)), processes=1), runs=lambda flight: True
    )
    assert told == [
        "who:        nobody: no rank waits for another, and no process says that it failed",
        "where:      0 of 2 ranks had finished their programs, 0 operations were unfinished",
        "waited for: nothing",
    ]


@pytest.mark.parametrize(
    ("unfinished", "told"),
    [
        (operation(what=""), "its input, which was not there yet"),
        (operation(members=()), "whoever sends"),
        (operation(members=(0, 1)), "its bytes: every rank of the group had come"),
        (operation(43), "ranks 1-3, which had not called it (rank 1: all_reduce #41 on group 'world' (train.py:33))"),
        (compute(), "the computes before it, or its arguments"),
    ],
)
def test_what_a_rank_waited_for_is_told(unfinished, told):
    others = [record(rank, operation()) for rank in (1, 2, 3)]
    failed = flight(0, record(0, operation(ended=1), unfinished), *others, ending=ending(rank=0, here=True))
    assert judged(failed)[2] == f"waited for: {told}"


def test_a_rank_that_had_done_nothing_is_told_so():
    told = judged(flight(0, record(0), ending=ending(rank=0, here=True), processes=1))
    assert told[1:] == ["where:      it had issued nothing yet", "waited for: nobody, and nobody waited for it"]


def test_the_table_has_a_line_for_each_rank():
    told = table(
        RecordedWorld(
            [
                flight(0, record(0, operation(since=3)), record(1, operation(40, ended=2), left=True, step=None),
                       ending=ending(rank=2, line=LOST), processes=3),
                flight(2, record(2, compute(since=3, started=4)), record(3), processes=3),
            ],
            lambda flight: False,
        )
    )  # fmt: skip
    assert told == [
        "rank  process  step    for  doing                                          waits for",
        "   0        0    12  7.0 s  all_reduce #41 on group 'world' (train.py:33)  1-3",
        "   1        0     -  8.0 s  its program had finished",
        "   2        2    12  6.0 s  running compute 'think' (train.py:30)",
        "   3        2    12      -  in its program",
        "no file of process 1: see the folder for flight records on its machine",
    ]


def test_a_long_table_is_cut():
    ranks = [record(rank, operation(since=3)) for rank in range(5)]
    told = table(RecordedWorld([flight(0, *ranks, processes=1)], lambda flight: False), most_rows=2)
    assert [line.split()[0] for line in told] == ["rank", "0", "1", "and"]
    assert told[-1] == "and 3 ranks more (--all)"


def test_the_world_that_began_last_is_judged():
    first, second = flight(0, record(0), started_ns=5), flight(0, record(0), attempt=1, started_ns=6)
    world, others = newest_world([second, first], lambda flight: False)
    assert (world.flights, others) == ([second], 1)


def test_runs_of_one_name_are_not_mixed():
    """As those of a job without a name, of which one after the other failed."""
    runs = [[flight(process, record(process), started_ns=at * S + process) for process in (0, 1)] for at in (0, 60, 62)]
    for each in runs[2]:
        object.__setattr__(each, "world_size", 2)
    elsewhere = flight(2, record(2), host="far", started_ns=100 * S)  # whose clock differs
    world, others = newest_world([*runs[1], runs[0][1], elsewhere, *runs[2], runs[0][0]], lambda flight: False)
    assert (world.flights, others) == ([*runs[1], elsewhere], 2)
