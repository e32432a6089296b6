"""Worlds in which ranks wait, each with its verdict: a table of kinds, culprits and sentences."""

from overlap.waits.ends import CallRecord, End, EndState, RankView, Seen
from overlap.waits.judge import Kind

ALL = (0, 1, 2, 3)
OPEN, DONE, FAILED = EndState.WAITING, EndState.DONE, EndState.FAILED


def call(op="all_reduce", line=10, *, group="world", members=ALL, form="float32 (4,), op='sum'", **more):
    return CallRecord(op=op, site=f"train.py:{line}", key=group, group=group, members=members, form=form, **more)


def message(op, src, dst, *, tag=0, line=40, form="float32 (4,)", **more):
    return CallRecord(
        op=op, site=f"train.py:{line}", key=f"{src}>{dst}:{tag}", members=(src, dst), form=form, tag=tag, **more
    )


def any_source(rank, *senders, line=50):
    return CallRecord(op="recv", site=f"train.py:{line}", key=f"any>{rank}", members=senders, any_source=True)


def end(rank, of, seq=0, state=OPEN, **more):
    return End(rank=rank, call=of, seq=seq, state=state, issued_ns=more.pop("at", seq + 1), **more)


def view(rank, *ends, seen=Seen.WAITS, **more):
    return RankView(rank=rank, seen=seen, ends=ends, **more)


REDUCE, GATHER = call(), call("all_gather", 11, form="float32 (4,)")
HEAD, TAIL = call(members=(0, 1, 2)), call(line=12, members=(0, 1, 2))
DP, TP = (call(line=line, group=name, members=(0, 1)) for line, name in ((20, "dp"), (21, "tp")))
SLEEPS = {"seen": Seen.ELSEWHERE, "site": "train.py:30"}
TOKENISE = End(
    rank=2, call=CallRecord(op="compute", name="tokenise", site="train.py:7"), state=EndState.MOVING, begun_ns=1
)


def others(*ranks, seq=1, of=REDUCE, state=OPEN):
    """Return views of ranks that have ended a first all_reduce and wait in a second."""
    return [view(rank, end(rank, of, seq - 1, DONE), end(rank, of, seq, state)) for rank in ranks]


CASES = {
    # name: views, size, kind, culprits, sentence
    "late": (
        [*others(0, 1, 3), view(2, end(2, REDUCE, 0, DONE), **SLEEPS)], 4, Kind.LATE, (2,),
        "rank 2 has not come: its program is at train.py:30; ranks 0-1, 3 wait for it in all_reduce #1 of group "
        "'world' (train.py:10)",
    ),
    "two are late": (
        [view(0, end(0, REDUCE)), view(1, end(1, REDUCE)), view(2, **SLEEPS), view(3, **SLEEPS)], 4, Kind.LATE, (2, 3),
        "ranks 2-3 have not come: rank 2's program is at train.py:30; ranks 0-1 wait for them in all_reduce #0 of "
        "group 'world' (train.py:10)",
    ),
    "one of two late ones holds up more": (
        [view(0, end(0, message("recv", 3, 0))), view(1, end(1, message("recv", 3, 1))),
         view(2, end(2, message("recv", 4, 2))), view(3, **SLEEPS), view(4, seen=Seen.ELSEWHERE, site="train.py:31")],
        5, Kind.LATE, (3,),
        "rank 3 has not come: its program is at train.py:30; rank 0 waits for it in recv #0 from rank 3 (train.py:40)",
    ),
    "computes": (
        [*others(0, 1, 3), view(2, TOKENISE, seen=Seen.GOES_ON)], 4, Kind.LATE, (2,),
        "rank 2 has not come: it computes 'tokenise' (train.py:7); ranks 0-1, 3 wait for it in all_reduce #1 of group "
        "'world' (train.py:10)",
    ),
    "input is not there": (
        [*others(0, 1, 3), view(2, end(2, REDUCE, 1, EndState.BLOCKED))], 4, Kind.LATE, (2,),
        "rank 2 has not come: its all_reduce #1 of group 'world' (train.py:10) waits for its input; ranks 0-1, 3 wait "
        "for it in all_reduce #1 of group 'world' (train.py:10)",
    ),
    "queued on one rank": (
        [*others(0, 1, 3), view(2, end(2, REDUCE, 1, EndState.QUEUED))], 4, Kind.LATE, (2,),
        "rank 2 has not come: its all_reduce #1 of group 'world' (train.py:10) is queued, and has not started; ranks "
        "0-1, 3 wait for it in all_reduce #1 of group 'world' (train.py:10)",
    ),
    "a chain": (
        [view(0, end(0, DP)), view(1, end(1, message("recv", 2, 1), at=9)), view(2, **SLEEPS)], 3, Kind.LATE, (2,),
        "rank 2 has not come: its program is at train.py:30; rank 1 waits for it in recv #0 from rank 2 (train.py:40)",
    ),
    "left": (
        [*others(0, 1, 3), view(2, end(2, REDUCE, 0, DONE), seen=Seen.LEFT)], 4, Kind.LEFT, (2,),
        "rank 2 has finished its program; ranks 0-1, 3 wait for it in all_reduce #1 of group 'world' (train.py:10)",
    ),
    "left, and another is late": (
        [view(0, end(0, REDUCE)), view(1, end(1, REDUCE)), view(2, seen=Seen.LEFT), view(3, **SLEEPS)],
        4, Kind.LEFT, (2,),
        "rank 2 has finished its program; ranks 0-1 wait for it in all_reduce #0 of group 'world' (train.py:10)",
    ),
    "unmatched": (
        [view(0, end(0, message("send", 0, 1, tag=3))), view(1, seen=Seen.LEFT)], 2, Kind.UNMATCHED, (1,),
        "rank 1 has finished without the other end of send #0 to rank 1 with tag 3 (train.py:40), for which rank 0 "
        "waits",
    ),
    "dead": (
        [*others(0, 1, 3, state=FAILED),
         view(2, end(2, REDUCE, 0, DONE), seen=Seen.ENDED, process=1, pid=47, host="a", how="was killed by SIGKILL")],
        4, Kind.DEAD, (2,),
        "rank 2: process 1 (pid 47 on a) was killed by SIGKILL; it had last called all_reduce #0 of group 'world' "
        "(train.py:10); ranks 0-1, 3 wait for it in all_reduce #1 of group 'world' (train.py:10)",
    ),
    "of two ended processes the awaited one": (
        [view(0, end(0, message("recv", 2, 0))), view(1, seen=Seen.ENDED, process=1),
         view(2, seen=Seen.ENDED, process=2)],
        3, Kind.DEAD, (2,),
        "rank 2: process 2 has ended without a word; it had called nothing; rank 0 waits for it in recv #0 from rank 2 "
        "(train.py:40)",
    ),
    "failed": (
        [*others(0, 1, 3), view(2, seen=Seen.LEFT, error="ValueError: bad (train.py:9)")], 4, Kind.FAILED, (2,),
        "rank 2 failed: ValueError: bad (train.py:9); ranks 0-1, 3 wait for it in all_reduce #1 of group 'world' "
        "(train.py:10)",
    ),
    "sizes differ": (
        [*others(0, 1, 3, seq=0), view(2, end(2, call(form="float32 (8,), op='sum'")))], 4, Kind.MISMATCH, (2,),
        "rank 2 called all_reduce #0 of group 'world' (train.py:10) with float32 (8,), op='sum', where ranks 0-1, 3 "
        "called all_reduce #0 of group 'world' (train.py:10) with float32 (4,), op='sum' (sizes differ)",
    ),
    "dtypes differ": (
        [view(0, end(0, DP)), view(1, end(1, call(line=20, group="dp", members=(0, 1), form="int8 (4,), op='sum'")))],
        2, Kind.MISMATCH, (0, 1),
        "rank 0 called all_reduce #0 of group 'dp' (train.py:20) with float32 (4,), op='sum', where rank 1 called "
        "all_reduce #0 of group 'dp' (train.py:20) with int8 (4,), op='sum' (dtypes differ)",
    ),
    "roots differ": (
        [view(rank, end(rank, call("broadcast", form=f"float32 (4,), root={rank == 2:d}"))) for rank in ALL],
        4, Kind.MISMATCH, (2,),
        "rank 2 called broadcast #0 of group 'world' (train.py:10) with float32 (4,), root=1, where ranks 0-1, 3 "
        "called broadcast #0 of group 'world' (train.py:10) with float32 (4,), root=0 (roots differ)",
    ),
    "operations differ": (
        [*others(0, 1, 3, seq=0), view(2, end(2, GATHER))], 4, Kind.MISMATCH, (2,),
        "rank 2 called all_gather #0 of group 'world' (train.py:11) with float32 (4,), where ranks 0-1, 3 called "
        "all_reduce #0 of group 'world' (train.py:10) with float32 (4,), op='sum' (operations differ)",
    ),
    "sizes of a message differ": (
        [view(0, end(0, message("send", 0, 1))), view(1, end(1, message("recv", 0, 1, form="float32 (9,)", line=41)))],
        2, Kind.MISMATCH, (0, 1),
        "rank 0 called send #0 to rank 1 (train.py:40) with float32 (4,), where rank 1 called recv #0 from rank 0 "
        "(train.py:41) with float32 (9,) (sizes differ)",
    ),
    "skipped": (
        [*(view(rank, end(rank, REDUCE)) for rank in (0, 1)), view(2, end(2, GATHER)),
         view(3, end(3, REDUCE), end(3, GATHER, 1))],
        4, Kind.SKIPPED, (2,),
        "rank 2 skipped all_reduce #0 of group 'world' (train.py:10) and called all_gather #0 of group 'world' "
        "(train.py:11) instead; rank 3 waits for it in all_gather #1 of group 'world' (train.py:11)",
    ),
    "skipped one of many alike": (
        [*(view(rank, *(end(rank, of, seq, DONE) for seq, of in enumerate((HEAD, TAIL, HEAD, TAIL))),
                end(rank, HEAD, 4)) for rank in (0, 2)),
         view(1, *(end(1, of, seq, DONE) for seq, of in enumerate((HEAD, TAIL, HEAD, HEAD))), seen=Seen.LEFT)],
        3, Kind.SKIPPED, (1,),
        "rank 1 skipped all_reduce #3 of group 'world' (train.py:12) and called all_reduce #3 of group 'world' "
        "(train.py:10) instead; ranks 0, 2 wait for it in all_reduce #4 of group 'world' (train.py:10)",
    ),
    "swapped": (
        [*(view(rank, end(rank, REDUCE), end(rank, GATHER, 1)) for rank in (0, 1, 3)),
         view(2, end(2, GATHER), end(2, REDUCE, 1))],
        4, Kind.SWAPPED, (2,),
        "rank 2 called all_gather #0 of group 'world' (train.py:11) before all_reduce #0 of group 'world' "
        "(train.py:10), ranks 0-1, 3 in the other order: call the operations of a group in one order",
    ),
    "swapped at other lines": (
        [view(0, end(0, DP), end(0, call("barrier", 12, group="dp", members=(0, 1), form=""), 1)),
         view(1, end(1, call("barrier", 9, group="dp", members=(0, 1), form="")), end(1, DP, 1))],
        2, Kind.SWAPPED, (0, 1),
        "rank 0 called all_reduce #0 of group 'dp' (train.py:20) before barrier #0 of group 'dp' (train.py:9), rank 1 "
        "in the other order: call the operations of a group in one order",
    ),
    "groups in two orders": (
        [view(0, end(0, DP, awaited=True)), view(1, end(1, TP, awaited=True)), view(2, end(2, REDUCE)),
         view(3, end(3, REDUCE))],
        4, Kind.CYCLE, (0, 1),
        "ranks 0-1 wait for each other and cannot go on: rank 0 in all_reduce #0 of group 'dp' (train.py:20), rank 1 "
        "in all_reduce #0 of group 'tp' (train.py:21); call the operations of all groups that ranks share in one "
        "order; outside of it, ranks 2-3 wait in all_reduce #0 of group 'world' (train.py:10)",
    ),
    "both receive first": (
        [view(0, end(0, message("recv", 1, 0))), view(1, end(1, message("recv", 0, 1, line=41)))],
        2, Kind.CYCLE, (0, 1),
        "ranks 0-1 wait for each other and cannot go on: rank 0 in recv #0 from rank 1 (train.py:40), rank 1 in recv "
        "#0 from rank 0 (train.py:41); each receives before it sends",
    ),
    "both send first": (
        [view(0, end(0, message("send", 0, 1))), view(1, end(1, message("send", 1, 0)))], 2, Kind.CYCLE, (0, 1),
        "ranks 0-1 wait for each other and cannot go on: rank 0 in send #0 to rank 1 (train.py:40), rank 1 in send #0 "
        "to rank 0 (train.py:40); each sends before it receives",
    ),
    "a message and a group": (
        [view(0, end(0, message("send", 0, 1))), view(1, end(1, DP))], 2, Kind.CYCLE, (0, 1),
        "ranks 0-1 wait for each other and cannot go on: rank 0 in send #0 to rank 1 (train.py:40), rank 1 in "
        "all_reduce #0 of group 'dp' (train.py:20); a message and an operation of a group wait for each other: call "
        "them in one order",
    ),
    "parts of a call": (
        [view(0, end(0, message("recv", 1, 0, name="all_to_all_single"))), view(1, end(1, DP))], 2, Kind.CYCLE, (0, 1),
        "ranks 0-1 wait for each other and cannot go on: rank 0 in all_to_all_single #0 from rank 1 (train.py:40), "
        "rank 1 in all_reduce #0 of group 'dp' (train.py:20); call all_to_all_single on all of these ranks, with the "
        "sizes of its parts on all or on none",
    ),
    "one waits for itself": (
        [view(0, end(0, message("recv", 0, 0)))], 1, Kind.CYCLE, (0,),
        "rank 0 waits for itself and cannot go on: rank 0 in recv #0 from rank 0 (train.py:40); each receives before "
        "it sends",
    ),
    "one in a group is stuck, one is busy": (
        [view(0, end(0, call(members=(0, 1, 2)))), view(1, end(1, message("recv", 0, 1))), view(2, **SLEEPS)],
        3, Kind.CYCLE, (0, 1),
        "ranks 0-1 wait for each other and cannot go on: rank 0 in all_reduce #0 of group 'world' (train.py:10), rank "
        "1 in recv #0 from rank 0 (train.py:40); a message and an operation of a group wait for each other: call them "
        "in one order",
    ),
    "a task of one may go on": (
        [view(0, end(0, message("recv", 1, 0), awaited=True), end(0, message("recv", 2, 0), awaited=True)),
         view(1, end(1, message("recv", 0, 1))), view(2, **SLEEPS)],
        3, Kind.LATE, (2,),
        "rank 2 has not come: its program is at train.py:30; rank 0 waits for it in recv #0 from rank 2 (train.py:40)",
    ),
    "a deadline may end one wait": (
        [view(0, end(0, message("recv", 1, 0)), may_end=True), view(1, end(1, message("recv", 0, 1)))],
        2, Kind.CYCLE, (0, 1),
        "ranks 0-1 wait for each other, and may yet go on: rank 0 in recv #0 from rank 1 (train.py:40), rank 1 in "
        "recv #0 from rank 0 (train.py:40); each receives before it sends",
    ),
    "other tasks of both may go on": (
        [view(0, end(0, DP), **SLEEPS), view(1, end(1, TP), **SLEEPS)],
        2, Kind.CYCLE, (0, 1),
        "ranks 0-1 wait for each other, and may yet go on: rank 0 in all_reduce #0 of group 'dp' (train.py:20), rank "
        "1 in all_reduce #0 of group 'tp' (train.py:21); call the operations of all groups that ranks share in one "
        "order",
    ),
    "any source, one busy": (
        [view(0, end(0, any_source(0, 1, 2))), view(1, end(1, message("recv", 0, 1))), view(2, **SLEEPS)],
        3, Kind.LATE, (2,),
        "rank 2 has not come: its program is at train.py:30; rank 0 waits for it in recv #0 from any rank "
        "(train.py:50)",
    ),
    "any source, none": (
        [view(0, end(0, any_source(0, 1, 2))), view(1, end(1, message("recv", 0, 1))),
         view(2, end(2, message("recv", 0, 2)))],
        3, Kind.CYCLE, (0, 1, 2),
        "ranks 0-2 wait for each other and cannot go on: rank 0 in recv #0 from any rank (train.py:50), ranks 1-2 in "
        "recv #0 from rank 0 (train.py:40); each receives before it sends",
    ),
    "tags": (
        [view(0, end(0, message("send", 0, 1, tag=7)), end(0, message("recv", 1, 0, tag=1, line=42), awaited=True)),
         view(1, end(1, message("recv", 0, 1, tag=8, line=43)))],
        2, Kind.TAGS, (0, 1),
        "rank 1 waits in recv #0 from rank 0 with tag 8 (train.py:43), and rank 0 has sent send #0 to rank 1 with tag "
        "7 (train.py:40), which nobody receives: the tags are 8 and 7",
    ),
    "tags, and the sender has finished": (
        [view(0, end(0, message("send", 0, 1, tag=7)), seen=Seen.LEFT), view(1, end(1, message("recv", 0, 1, tag=8)))],
        2, Kind.TAGS, (0, 1),
        "rank 1 waits in recv #0 from rank 0 with tag 8 (train.py:40), and rank 0 has sent send #0 to rank 1 with tag "
        "7 (train.py:40), which nobody receives: the tags are 8 and 7",
    ),
    "a record is missing": (
        others(0, 1, 3), 4, Kind.MISSING, (2,),
        "cannot be told: rank 2 has no record here; ranks 0-1, 3 wait for it in all_reduce #1 of group 'world' "
        "(train.py:10)",
    ),
    "wire": (
        others(*ALL), 4, Kind.WIRE, (),
        "cannot be told: all known members have called all_reduce #1 of group 'world' (train.py:10), and it has not "
        "ended: the network or a device",
    ),
    "queued on all ranks": (
        others(*ALL, state=EndState.QUEUED), 4, Kind.WIRE, (),
        "cannot be told: all known members have called all_reduce #1 of group 'world' (train.py:10), and it has not "
        "ended: the network or a device",
    ),
    "nobody": (
        [view(rank, end(rank, REDUCE, 0, DONE)) for rank in ALL], 4, Kind.NOBODY, (),
        "cannot be told: no rank waits for another",
    ),
    "all have ended, and two records are missing": (
        [view(rank, end(rank, REDUCE, 0, DONE)) for rank in (0, 2)], 4, Kind.NOBODY, (),
        "cannot be told: no rank waits for another",
    ),
    "receives are not recorded": (
        [view(rank, end(rank, REDUCE, 0, DONE), unrecorded="sends and receives of gloo") for rank in ALL],
        4, Kind.NOBODY, (),
        "cannot be told: no rank waits for another in a recorded operation; sends and receives of gloo are not "
        "recorded",
    ),
    "two records of one rank": (
        [view(0, end(0, DP, at=5)), view(1, end(1, DP, state=DONE), seen=Seen.LEFT),
         view(1, end(1, TP, at=6), **SLEEPS)],
        2, Kind.LATE, (1,),
        "cannot be told: the records of rank 1 contradict each other; by the newest, rank 1 has not come: its program "
        "is at train.py:30; rank 0 waits for it in all_reduce #0 of group 'dp' (train.py:20)",
    ),
}  # fmt: skip
