"""Verdicts from records that are written down: pure, without ranks."""

from dataclasses import replace

import pytest
from msgspec import structs

from overlap.errors import CollectiveMismatchError, RankFailedError, RankLeftError, StallError
from overlap.testing import latent
from overlap.testing.judging import judge_mismatch, judge_run, judge_stall
from overlap.testing.record import GroupCall, Issue, Record, Touch, WeightRecord
from overlap.waits.ends import CallRecord

STALL = StallError(None, [], reason="cannot finish")


def record(size: int, *issues: tuple, **more) -> Record:
    """Make a record of (rank, op, group, line[, ended]); of messages, (peer, tag) stands for the group."""
    made, counts = Record(size=size, **more), {}
    for rank, op, group, line, *rest in issues:
        ended = rest[0] if rest else None
        if op in ("send", "recv"):
            peer, tag = group
            ends = (rank, peer) if op == "send" else (peer, rank)
            key, members, name = f"{ends} {tag}", ends if peer is not None else (), "world"
        else:
            key, members, name, peer, tag = group, tuple(range(size)), group, None, 0
        seq = counts[rank, key, op] = counts.get((rank, key, op), -1) + 1
        if op not in ("send", "recv"):
            seq = counts[rank, key] = counts.get((rank, key), -1) + 1
        made.issues.append(
            Issue(
                rank=rank, index=len(made.issues), seq=seq, issued_ns=0, ended_ns=ended, awaited=ended is None,
                call=CallRecord(
                    op=op, form="float32 (4,)", group=name, members=members, key=key, site=f"x.py:{line}", tag=tag,
                    any_source=op == "recv" and peer is None,
                ),
            )
        )  # fmt: skip
    return made


def test_a_cycle_over_three_groups_is_named_in_order() -> None:
    made = record(3, (0, "all_reduce", "a", 1), (1, "all_gather", "b", 2), (2, "barrier", "c", 3))
    for issue, members in zip(made.issues, [(0, 1), (1, 2), (2, 0)], strict=True):
        issue.call = structs.replace(issue.call, members=members)
    verdict = judge_stall(made)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.lines) == ("cycle", (0, 1, 2), ("x.py:1", "x.py:2", "x.py:3"))
    assert verdict.text.startswith(
        "ranks 0-2 wait for each other and cannot go on: rank 0 in all_reduce #0 of group 'a' (x.py:1), rank 1 in "
        "all_gather #0 of group 'b' (x.py:2), rank 2 in barrier #0 of group 'c' (x.py:3); "
    )


def test_the_operation_that_was_skipped_is_named_and_not_the_one_that_hangs() -> None:
    """Rank 1 leaves out line 5 in its second round: the lines of both tell, although all operations are alike."""
    loop = [(4, 1), (5, 1), (4, 1), (5, 1), (4, 1)]
    mine = [(rank, "all_reduce", "world", line, 9) for rank in (0, 2) for line, _ in loop]
    theirs = [(1, "all_reduce", "world", line, 9) for line in (4, 5, 4, 4)]
    made = record(3, *mine, *theirs, (0, "all_reduce", "world", 5), (2, "all_reduce", "world", 5), left={1: ""})
    verdict = judge_stall(made)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks[0], verdict.lines[:2]) == ("skipped", 1, ("x.py:5", "x.py:4"))
    assert verdict.text.startswith(
        "rank 1 skipped all_reduce #3 of group 'world' (x.py:5) and called all_reduce #3 of group 'world' (x.py:4) "
        "instead; ranks 0, 2 wait for it in all_reduce #"
    )


@pytest.mark.parametrize(
    ("issues", "kind", "told"),
    [
        ([(0, "send", (1, 3), 1)], "unmatched", "without the other end of send #0 to rank 1 with tag 3 (x.py:1), for"),
        (
            [(0, "recv", (1, 0), 1)],
            "unmatched",
            "without the other end of recv #0 from rank 1 (x.py:1), for which rank",
        ),
        ([(0, "send", (1, 3), 1), (1, "recv", (0, 4), 2)], "tags", "rank 1 waits in recv #0 from rank 0 with tag 4"),
        ([(0, "send", (1, 0), 1), (1, "barrier", "world", 2)], "cycle", "a message and an operation of a group wait"),
        ([(0, "barrier", "world", 1), (1, "recv", (0, 0), 2)], "cycle", "a message and an operation of a group wait"),
        ([(0, "send", (1, 0), 1), (1, "send", (0, 0), 2)], "cycle", "each sends before it receives"),
        ([(0, "recv", (1, 0), 1), (1, "recv", (0, 0), 2)], "cycle", "each receives before it sends"),
    ],
)
def test_messages_without_an_end(issues, kind, told) -> None:
    verdict = judge_stall(record(2, *issues, left={1: ""} if len(issues) == 1 else {}))
    assert verdict is not None
    assert (verdict.kind, told in verdict.text) == (kind, True), verdict


def meant_for_another_tag(source: str, tag: int) -> str:
    return (
        f"rank 0 waits in recv #0 from {source} (x.py:1), and rank 1 has sent send #0 to rank 0 with tag {tag} (x.py:2)"
    )


@pytest.mark.parametrize(
    ("issues", "more", "told"),
    [
        (  # others have ended
            [(0, "recv", (None, 0), 1), (1, "send", (0, 5), 2), (1, "recv", (0, 0), 3)],
            {"left": {2: ""}},
            meant_for_another_tag("any rank", 5),
        ),
        (  # all wait
            [(0, "recv", (None, 0), 1), (1, "send", (0, 5), 2), (1, "recv", (0, 0), 3), (2, "recv", (0, 0), 3)],
            {},
            meant_for_another_tag("any rank", 5),
        ),
        (
            [(0, "recv", (1, 0), 1), (1, "send", (0, 4), 2), (1, "recv", (0, 0), 3)],
            {},
            meant_for_another_tag("rank 1", 4),
        ),
        (
            [(0, "recv", (1, 0), 1), (1, "send", (0, 4), 2), (1, "barrier", "world", 3), (2, "barrier", "world", 3)],
            {},
            meant_for_another_tag("rank 1", 4),
        ),
    ],
)
def test_a_message_with_another_tag_is_told_with_its_line(issues, more, told) -> None:
    made = record(3, *issues, **more)
    for issue in made.issues:
        issue.awaited = issue.call.op != "send"
    verdict = judge_stall(made)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.lines) == ("tags", (0, 1), ("x.py:1", "x.py:2")), verdict
    assert verdict.text.startswith(told)


def test_a_message_whose_tag_is_received_elsewhere_is_not_blamed() -> None:
    sent = [(1, "send", (0, 5), 2), (1, "recv", (0, 0), 3)]
    made = record(2, (0, "recv", (1, 5), 9), (0, "recv", (None, 0), 1), *sent)
    for issue in made.issues:
        issue.awaited = issue.call.site in ("x.py:1", "x.py:3")
    verdict = judge_stall(made)
    assert verdict is not None
    assert verdict.kind == "cycle"


def test_a_mismatch_names_the_odd_ranks_first() -> None:
    made = record(4, *[(rank, "all_reduce" if rank != 2 else "barrier", "dp", 7 + (rank == 2)) for rank in range(4)])
    verdict = judge_mismatch(made)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.lines) == ("mismatch", (2, 0, 1, 3), ("x.py:8", "x.py:7"))
    error = CollectiveMismatchError(group="dp", seq=0, ranks=(0, 2), calls=("a", "b"), call_sites=("x.py:7", "x.py:8"))
    failed = RankFailedError(rank=0, cause=error, where="", doing=[], others={}, world_size=4)
    assert judge_run(made, failed)[0] == verdict


def test_messages_of_one_tag_that_differ_are_told_apart() -> None:
    made = record(2, (0, "send", (1, 5), 1), (0, "send", (1, 5), 2), (1, "recv", (0, 5), 9))
    for issue in made.issues[1:3]:
        issue.call = structs.replace(issue.call, form="int64 (1,)")
    verdict = judge_mismatch(made)
    assert verdict is not None
    assert verdict.kind == "tag reused"
    assert verdict.lines == ("x.py:1", "x.py:2", "x.py:9")
    assert "messages sent at x.py:1 and x.py:2 have the same tag 5" in verdict.text


def test_an_inversion_that_was_survived_is_found_and_one_order_is_none() -> None:
    order = [("a", 1), ("b", 2)]
    wrong = record(2, *[(r, "all_reduce", g, line, 9) for r in (0, 1) for g, line in order[:: 1 if r else -1]])
    right = record(2, *[(r, "all_reduce", g, line, 9) for r in (0, 1) for g, line in order])
    verdict = latent.find_order_cycle(wrong)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.lines) == ("cycle", (0, 1), ("x.py:2", "x.py:1"))
    assert (
        "rank 0 issues all_reduce #0 of group 'b' (x.py:2) before all_reduce #0 of group 'a' (x.py:1)" in verdict.text
    )
    assert latent.find_order_cycle(right) is None


def test_a_long_cycle_is_told_by_its_joints_only() -> None:
    """Operations of one rank between two joints are left out."""
    one = [(0, "all_reduce", name, line, 9) for line, name in enumerate("abcd")]
    other = [(1, "all_reduce", name, line, 9) for line, name in enumerate("dbca", 10)]
    verdict = latent.find_order_cycle(record(2, *one, *other))
    assert verdict is not None
    assert verdict.text.count(" before ") == 2


def test_groups_of_some() -> None:
    made = [GroupCall(rank=rank, ranks=(0, 1), line="x.py:3") for rank in (0, 1, 2)]
    verdict = latent.find_partial_group(Record(size=4, group_calls=made), {0, 1, 2, 3})
    assert verdict is not None
    assert (verdict.ranks[0], verdict.lines) == (3, ("x.py:3",))
    assert (
        latent.find_partial_group(Record(size=4, group_calls=made), {0, 1, 2}) is None
    )  # rank 3 may still have come to it
    alone = [GroupCall(rank=0, ranks=(0, 1), line="x.py:3", alone=True)]
    assert latent.find_partial_group(Record(size=2, group_calls=alone), {0, 1}) is None


def weights(rank: int, step: int, **digests: str) -> WeightRecord:
    return WeightRecord(rank=rank, step=step, digests=digests, line=f"x.py:{step}")


def test_weights_that_differ_name_the_first_update_and_the_first_weight() -> None:
    same = [weights(rank, 1, a="1", b="2") for rank in range(3)]
    then = [weights(rank, 2, a="3", b="4" if rank != 1 else "5") for rank in range(3)]
    assert latent.find_weight_difference(Record(size=3, weights=same)) is None
    verdict = latent.find_weight_difference(Record(size=3, weights=same + then))
    assert verdict is not None
    assert verdict.text == "after update 2 (x.py:2), and not before, 'b' differs: rank 1 (5) from rank 0 (4)"
    parts = [WeightRecord(rank=rank, step=1, digests={f"a [part {rank}]": str(rank)}) for rank in range(2)]
    assert latent.find_weight_difference(Record(size=2, weights=parts)) is None


def test_only_a_difference_that_lasts_counts_at_the_end() -> None:
    def record_of(*steps: str) -> Record:
        pairs = [[weights(rank, n, a=each[rank]) for rank in (0, 1)] for n, each in enumerate(steps)]
        return Record(size=2, weights=[each for pair in pairs for each in pair])

    averaged = record_of("00", "12", "33", "45", "66")  # by every second update
    assert latent.find_weight_difference(averaged, lasting=True) is None
    first = latent.find_weight_difference(averaged)
    assert first is not None
    assert first.text.startswith("after update 1 (x.py:1), and not before, 'a' differs: rank 1 (2)")
    left = latent.find_weight_difference(record_of("00", "12", "33", "45", "46"), lasting=True)
    assert left is not None
    assert left.text.startswith("from update 3 (x.py:3) on, 'a' differs: rank 1 (5)")


def test_weights_that_differ_name_the_setting_that_differs_before_random_numbers() -> None:
    def told(lr: str = "0.1", seed: str = "s", *, step: int = 1) -> str:
        made = record(2, (0, "all_reduce", "world", 7), (1, "all_reduce", "world", 7))
        made.issues[0].randomness, made.issues[1].randomness = "x", "y"
        for rank in (0, 1):
            first = WeightRecord(rank=rank, step=0, digests={"a": "0"}, randomness="s" if rank else seed)
            settings = ({"lr": "0.1"}, {"lr": lr if rank else "0.1", "foreach": "None"})
            differing = WeightRecord(rank=rank, step=step, digests={"a": str(rank)}, settings=settings)
            made.weights += [first, differing] if step else [replace(first, digests=differing.digests)]
        verdict = latent.find_weight_difference(made)
        assert verdict is not None
        return verdict.text.partition("from rank 0 (0)")[2]

    parted = "; at all_reduce #0 of group 'world' (x.py:7) the random numbers of rank 1 are no longer those of rank 0"
    assert told() == parted
    assert told("0.2") == "; the optimizer of rank 1 has lr in its group 1 = 0.2, that of rank 0 0.1"
    assert told(seed="t") == ""  # each rank's own by right
    assert told(seed="t", step=0) == parted


def test_a_missing_gradient_and_a_touched_buffer() -> None:
    lacking = [
        WeightRecord(rank=rank, step=1, digests={}, without_gradient=("a", "b")[: 1 + rank], line="x.py:9")
        for rank in (0, 1)
    ]
    verdict = latent.find_missing_gradient(Record(size=2, weights=lacking))
    assert verdict is not None
    assert verdict.text == "rank 1 had no gradient of 'b' in update 1 (x.py:9), rank 0 had one"
    made = record(2, (0, "all_reduce", "world", 4))
    made.touches.append(Touch(rank=0, issue=made.issues[0], line="x.py:5", how="read", by="mul"))
    [stall, *_] = judge_run(made, STALL)
    assert stall.text == (
        "rank 0 reads a tensor at x.py:5 (mul) while all_reduce #0 of group 'world' (x.py:4) is under way: wait for it "
        "first"
    )


def test_a_rank_that_left_is_told_with_what_it_did_last() -> None:
    made = record(2, (0, "barrier", "world", 2), (1, "all_reduce", "other", 8, 5), left={1: "called sys.exit()"})
    cause = RankLeftError("rank 1 finished", culprit=1)
    error = RankFailedError(rank=1, cause=cause, where="", doing=[], others={}, world_size=2)
    [verdict] = judge_run(made, error)
    assert verdict.text == "rank 1 called sys.exit(); rank 0 waits for it in barrier #0 of group 'world' (x.py:2)"
    assert verdict.lines == ("x.py:2", "x.py:8")


def test_groups_made_in_another_order() -> None:
    def made(rank: int, *groups: tuple[tuple[int, ...], int], alone: bool = False) -> list[GroupCall]:
        return [GroupCall(rank=rank, ranks=ranks, line=f"x.py:{line}", alone=alone) for ranks, line in groups]

    order = [((0, 1), 3), ((1, 2), 4)]
    wrong = [*made(0, *order), *made(1, *order), *made(2, *order[::-1])]
    verdict = latent.find_group_order_difference(Record(size=3, group_calls=wrong))
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.lines) == ("group order", (2, 0), ("x.py:4", "x.py:3"))
    assert "rank 2 made the group of ranks 1-2 at x.py:4 where rank 0 made that of ranks 0-1 at x.py:3" in verdict.text
    assert latent.find_partial_group(Record(size=3, group_calls=wrong), {0, 1, 2}) is None
    assert latent.find_group_order_difference(Record(size=2, group_calls=[*made(0, *order), *made(1, *order)])) is None
    assert (
        latent.find_group_order_difference(
            Record(size=2, group_calls=[*made(0, *order), *made(1, order[1], alone=True)])
        )
        is None
    )


def test_one_tag_for_two_messages_under_way_is_told_with_both_lines() -> None:
    ends = [(0, "send", (1, 7), 1, 9), (0, "send", (1, 7), 2, 9), (1, "recv", (0, 7), 5, 9), (1, "recv", (0, 7), 6, 9)]
    verdict = latent.find_reused_tag(record(2, *ends))
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("tag reused", (0, 1))
    assert verdict.lines == ("x.py:1", "x.py:2", "x.py:5", "x.py:6")
    waited = record(2, *ends)
    waited.issues[0].waited_ns = 0  # before the second was issued
    assert latent.find_reused_tag(waited) is None
    for place, line in ((1, 1), (3, 5)):  # a loop sends, or receives
        loop = [list(each) for each in ends]
        loop[place][3] = line
        assert latent.find_reused_tag(record(2, *map(tuple, loop))) is None
    assert latent.find_reused_tag(record(2, *[(r, op, (peer, 0), *rest) for r, op, (peer, _), *rest in ends])) is None


def test_ranks_that_wait_outside_of_an_inversion_are_named_too() -> None:
    made = record(
        4, (0, "all_reduce", "a", 1), (1, "all_reduce", "b", 2), (2, "recv", (0, 0), 3), (3, "barrier", "c", 4)
    )
    for issue, members in zip(made.issues, [(0, 1), (0, 1), (0, 2), (0, 1, 2, 3)], strict=True):
        issue.call = structs.replace(issue.call, members=members)
    verdict = judge_stall(made)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("cycle", (0, 1, 2, 3))
    assert verdict.lines == ("x.py:1", "x.py:2", "x.py:3", "x.py:4")
    assert verdict.text.endswith(
        "; outside of it, rank 2 waits in recv #0 from rank 0 (x.py:3), rank 3 waits in barrier #0 of group 'c' "
        "(x.py:4)"
    )


def test_a_group_whose_ranks_pass_different_lists_is_the_cause_of_an_inversion() -> None:
    made = record(4, (0, "all_reduce", "0-1", 5), (1, "all_reduce", "0-2", 5), (2, "all_reduce", "0-2", 5))
    for issue, members in zip(made.issues, [(0, 1), (0, 1, 2), (0, 1, 2)], strict=True):
        issue.call = structs.replace(issue.call, members=members)
    lists = [(0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2)]
    made.group_calls = [GroupCall(rank=rank, ranks=ranks, line="x.py:4") for rank, ranks in enumerate(lists)]
    verdicts = judge_run(made, STALL)
    assert [verdict.kind for verdict in verdicts] == ["group members", "cycle"]
    assert (verdicts[0].ranks, verdicts[0].lines) == ((0, 1, 2, 3), ("x.py:4",))
    assert verdicts[0].text == (
        "rank 0 called new_group for ranks 0-1 at x.py:4, ranks 1-3 for ranks 0-2 there: all ranks must pass "
        "the same list"
    )


def test_lists_that_the_other_rank_passes_later_are_no_wrong_members() -> None:
    lists = {0: [(0, 1), (2, 3)], 1: [(2, 3)]}
    made = record(2)
    made.group_calls = [GroupCall(rank=rank, ranks=ranks, line="x.py:4") for rank, of in lists.items() for ranks in of]
    assert latent.find_group_members_difference(made) is None
