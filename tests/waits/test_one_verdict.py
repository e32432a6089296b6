"""One planted hang has one kind, one set of culprits and one sentence: live, in records, in dumps, and in a test."""

import re
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import overlap
from overlap import StallError
from overlap.explain import hang
from overlap.testing import Ranks
from tests.errors import error_from
from tests.explain.test_hang import entry, write

LIKE = ((1,), float)
R = overlap.Rank
Roles = tuple[int, int, int]
Entries = list[dict[str, Any]]
"""What PyTorch's flight recorder has of a rank."""


async def two_orders(rank: R, roles: Roles) -> None:
    pair = sorted(roles[:2])
    groups = [rank.group(pair, name=name) for name in ("tp", "dp")] if rank.rank in pair else []
    await (groups[rank.rank == roles[0]].all_reduce(np.ones(1)) if groups else rank.world.barrier())


async def both_receive(rank: R, roles: Roles) -> None:
    if rank.rank in roles[:2]:
        await rank.recv(LIKE, roles[rank.rank == roles[0]])
    await trio.sleep_forever()


async def both_send(rank: R, roles: Roles) -> None:
    if rank.rank in roles[:2]:
        await rank.send(np.ones(1), roles[rank.rank == roles[0]])
    await trio.sleep_forever()


async def all_receive(rank: R, roles: Roles) -> None:
    await rank.recv(LIKE, roles[(roles.index(rank.rank) + 1) % 3])


async def message_and_group(rank: R, roles: Roles) -> None:
    if rank.rank == roles[0]:
        await rank.all_reduce(np.ones(1))
    elif rank.rank == roles[1]:
        await rank.recv(LIKE, roles[0])
    await trio.sleep_forever()


async def other_tag(rank: R, roles: Roles) -> None:
    if rank.rank == roles[0]:
        await rank.send(np.ones(1), roles[1], tag=7)
    elif rank.rank == roles[1]:
        await rank.recv(LIKE, roles[0], tag=8)
    await trio.sleep_forever()


async def one_is_late(rank: R, roles: Roles) -> None:
    await rank.barrier()
    if rank.rank == roles[2]:
        await trio.sleep_forever()
    await rank.all_reduce(np.ones(1))


async def two_are_late(rank: R, roles: Roles) -> None:
    await rank.barrier()
    if rank.rank != roles[0]:
        await trio.sleep_forever()
    await rank.all_reduce(np.ones(1))


WORLD, TP, DP = ("0", "world"), ("1", "tp"), ("2", "dp")
MET, OPEN = entry(1, "barrier", group=WORLD, done=True), entry(2, group=WORLD)


def message(op: str, own: int, peer: int) -> Entries:
    return [entry(1, f"{op} {own}{'->' if op == 'send' else '<-'}{peer}")]


CASES: dict[Callable[[R, Roles], Awaitable[None]], tuple[str, int, Callable[[Roles], list[Entries]] | None]] = {
    # program: kind, number of roles at fault (the last ones if they are late), what its dumps have, by role
    two_orders: (
        "cycle", 2, lambda _: [[entry(1, group=DP)], [entry(1, group=TP)], [entry(1, "barrier", group=WORLD)]],
    ),
    both_receive: ("cycle", 2, lambda r: [message("recv", r[0], r[1]), message("recv", r[1], r[0]), []]),
    both_send: ("cycle", 2, lambda r: [message("send", r[0], r[1]), message("send", r[1], r[0]), []]),
    all_receive: ("cycle", 3, lambda r: [message("recv", r[at], r[(at + 1) % 3]) for at in range(3)]),
    message_and_group: ("cycle", 2, lambda r: [[entry(1, group=WORLD)], message("recv", r[1], r[0]), []]),
    other_tag: ("tags", 2, None),  # dumps have no tags
    one_is_late: ("late", 1, lambda _: [[MET, OPEN], [MET, OPEN], [MET]]),
    two_are_late: ("late", 2, lambda _: [[MET, OPEN], [MET], [MET]]),
}  # fmt: skip


def plain(sentence: str) -> str:
    """Return a sentence without lines and numbers: those of dumps begin with 1; a dump knows no line of a sleeper."""
    text = re.sub(r"#\d+", "#N", re.sub(r" \([^()]*\)", "", sentence))
    text = re.sub(r"(its|rank \d's) (program is|last call was) [^;,]*", "ELSEWHERE", text)
    return re.sub(r", or rank \d called one too many", "", text)  # of a rank elsewhere whose line is not known


@pytest.mark.everyday(8)
@pytest.mark.parametrize("roles", [roles for roles in permutations(range(3)) if roles[2] != 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_planted_hang_has_one_sentence(
    case: Callable[[R, Roles], Awaitable[None]], roles: Roles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP_FLIGHT_DIR", str(tmp_path / "records"))
    kind, count, dumped = CASES[case]
    culprits = tuple(sorted(roles[3 - count :] if kind == "late" else roles[:count]))
    main = partial(case, roles=roles)

    async def world() -> str:
        return (await error_from(StallError, overlap.run_async(main, ranks=3, timeout_s=60))).sentence

    live = trio.run(world, clock=MockClock(autojump_threshold=0))
    found = [hang.judge_stuck_job([tmp_path / "records"])]
    if dumped is not None:
        groups = {"0": ("world", [0, 1, 2]), "1": ("tp", sorted(roles[:2])), "2": ("dp", sorted(roles[:2]))}
        ranks = [entries for _, entries in sorted(zip(roles, dumped(roles), strict=True))]
        found.append(hang.judge_stuck_job([write(tmp_path / "dumps", ranks, groups=groups)]))
    tested = Ranks().run(main, ranks=3, check=False).verdict
    assert tested is not None
    assert {(each.verdict, tuple(each.ranks)) for each in found} == {(kind, culprits)}
    assert (tested.kind, tested.ranks[: len(culprits)]) == (kind, culprits)
    assert {plain(live), *(plain(each.sentence) for each in found)} == {plain(tested.text)}
