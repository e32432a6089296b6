"""Verdicts on worlds that are written down, each under permuted ranks."""

import cProfile
import random
from itertools import pairwise

import pytest
from msgspec.structs import replace

from overlap.waits.ends import Seen
from overlap.waits.judge import Kind, judge
from overlap.waits.wording import wait_rows, wait_sentence

from .cases import CASES, DONE, REDUCE, SLEEPS, call, end, message, others, view


@pytest.mark.everyday(len(CASES))
@pytest.mark.parametrize("case", CASES)
def test_kind_culprits_and_sentence(case):
    views, size, kind, culprits, text = CASES[case]
    verdict = judge(views, size)
    assert (verdict.kind, verdict.culprits, wait_sentence(verdict)) == (kind, culprits, text)


def permuted(views, to):
    """Return a world whose ranks have other numbers, in any order."""

    def moved(each):
        made = each.call
        members = tuple(to[rank] for rank in made.members)
        key = made.key
        if made.is_message and not made.any_source:
            key = f"{members[0]}>{members[1]}:{made.tag}"
        elif not made.is_message:
            members = tuple(sorted(members))
        return replace(each, rank=to[each.rank], call=replace(made, key=key, members=members))

    return [replace(each, rank=to[each.rank], ends=tuple(map(moved, each.ends))) for each in views]


@pytest.mark.everyday(len(CASES))
@pytest.mark.parametrize("case", CASES)
def test_permuted_ranks_have_the_permuted_verdict(case):
    views, size, kind, culprits, _ = CASES[case]
    chance = random.Random(case)
    for _ in range(50):
        to = chance.sample(range(size), size)
        # of two views of one rank that are equally new the first counts
        made = permuted(views, to)
        chance.shuffle(made)
        verdict = judge(made, size)
        assert (verdict.kind, set(verdict.culprits)) == (kind, {to[rank] for rank in culprits})


def test_a_mismatch_that_has_ended_comes_second():
    wrong = call(form="float32 (9,), op='sum'")
    views = [*others(0, 1), view(2, end(2, wrong, 0, DONE), **SLEEPS)]
    verdict = judge(views, 3)
    assert (verdict.kind, verdict.culprits) == (Kind.LATE, (2,))
    assert verdict.earlier is not None
    assert wait_sentence(verdict.earlier).startswith("rank 2 called all_reduce #0 of group 'world' (train.py:10) with ")
    alone = judge([view(each.rank, *each.ends[:1]) for each in views], 3)
    assert (alone.kind, alone.culprits, alone.earlier) == (Kind.MISMATCH, (2,), None)


SIZE = 1024
MEMBERS = tuple(range(SIZE))
REDUCE_OF_ALL = call(members=MEMBERS)


def large(last, line=MEMBERS):
    """Return ranks of which each receives from the next one in line, and the last one."""
    receives = [view(rank, end(rank, message("recv", of, rank))) for rank, of in pairwise(line)]
    return [*receives, last(line[-1])]


SHUFFLED = random.Random(1).sample(MEMBERS, SIZE)
LARGE = {
    # name: views, kind, number of culprits, number of waiters, calls of functions for each end
    "one is late": (
        [view(rank, *(end(rank, REDUCE_OF_ALL, seq, DONE) for seq in range(40)),
              *([] if rank == 777 else [end(rank, REDUCE_OF_ALL, 40)]), **(SLEEPS if rank == 777 else {}))
         for rank in MEMBERS], Kind.LATE, 1, SIZE - 1, 12,
    ),
    "two halves wait for each other": (
        [view(rank, end(rank, call(group="ab"[rank % 2], members=MEMBERS, line=20 + rank % 2))) for rank in MEMBERS],
        Kind.CYCLE, SIZE, 0, 100,
    ),
    "a line waits for its last": (large(lambda rank: view(rank, **SLEEPS), SHUFFLED), Kind.LATE, 1, 1, 800),
    "the last of a line has finished": (large(lambda rank: view(rank, seen=Seen.LEFT)), Kind.UNMATCHED, 1, 1, 1400),
    "a ring": (
        large(lambda rank: view(rank, end(rank, message("recv", SHUFFLED[0], rank))), SHUFFLED),
        Kind.CYCLE, SIZE, 0, 800,
    ),
    "pairs": (
        [view(rank, end(rank, call(group=f"{rank // 2} {rank % 2}", members=(rank // 2 * 2, rank // 2 * 2 + 1))))
         for rank in MEMBERS], Kind.CYCLE, 2, SIZE - 2, 400,
    ),
}  # fmt: skip


@pytest.mark.everyday(len(LARGE))
@pytest.mark.parametrize("case", LARGE)
def test_a_thousand_ranks_take_a_few_calls_for_each_end(case):
    """Also where each rank lacks 512 others, which are looked at once. Half of SIZE calls of one of sets take 0.1 s."""
    views, kind, culprits, waiters, most_calls = LARGE[case]
    profile = cProfile.Profile()
    verdict = profile.runcall(judge, views, SIZE)
    assert (verdict.kind, len(verdict.culprits), len(verdict.waiters)) == (kind, culprits, waiters)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < most_calls * sum(len(each.ends) for each in views)


def test_rows_begin_with_the_culprit():
    views, size, *_ = CASES["computes"]
    table = wait_rows(views, size, judge(views, size))
    assert [(row.view.rank, row.describe_wait()) for row in table] == [
        (2, "computes 'tokenise' (train.py:7)"),
        *((rank, "all_reduce #1 of group 'world' (train.py:10); waits for rank 2") for rank in (0, 1, 3)),
    ]


def test_a_rank_that_moves_is_blamed_after_one_that_does_not():
    """Rank 1 has just issued something; rank 3 has not moved for long."""
    moving = view(1, seen=Seen.GOES_ON)
    pairs = [view(0, end(0, call(group="a", members=(0, 1)))), view(2, end(2, call(group="b", members=(2, 3))))]
    assert judge([*pairs, moving, view(3, **SLEEPS)], 4).culprits == (3,)
    both = [view(0, end(0, REDUCE)), moving, view(2, end(2, REDUCE)), view(3, **SLEEPS)]
    assert judge(both, 4).kind is Kind.LATE


def test_the_own_view_of_a_rank_counts_before_what_another_knows_of_it():
    """Rank 1 knows nothing of rank 0, which has issued their all_reduce, and now awaits a message of rank 1."""
    both, late = call(members=(0, 1, 2)), message("recv", 1, 0)
    waiting = view(1, end(1, both, lacks=(0, 2), awaited=True))
    ahead = view(0, end(0, both, lacks=(1, 2), awaited=False), end(0, late, lacks=(1,), awaited=True))
    assert judge([ahead, waiting, view(2, **SLEEPS)], 3).culprits == (2,)
    behind = view(0, end(0, late, lacks=(1,), awaited=True))
    assert judge([behind, waiting, view(2, **SLEEPS)], 3).kind is Kind.CYCLE
