"""One planted hang has one kind, one set of culprits and one sentence: live, in records, in dumps, and in a test."""

import re
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import trio
from trio.testing import MockClock

import overlap
from overlap import StallError
from overlap.flight import hang
from overlap.testing import Ranks
from tests.flight.test_hang import entry, write

LIKE = ((1,), float)
Roles = tuple[int, ...]


def cycle_of_groups(roles: Roles) -> Callable[[overlap.Rank], object]:
    async def main(rank: overlap.Rank) -> None:
        pair = sorted(roles[:2])
        groups = [rank.group(pair, name=name) for name in ("tp", "dp")] if rank.rank in pair else []
        if rank.rank in pair:
            await groups[rank.rank == roles[0]].all_reduce(np.ones(1))
        else:
            await rank.world.barrier()

    return main


def both_receive(roles: Roles) -> Callable[[overlap.Rank], object]:
    async def main(rank: overlap.Rank) -> None:
        if rank.rank in roles[:2]:
            await rank.recv(LIKE, roles[rank.rank == roles[0]])
        else:
            await trio.sleep_forever()

    return main


def stuck_beside_a_sleeper(roles: Roles) -> Callable[[overlap.Rank], object]:
    async def main(rank: overlap.Rank) -> None:
        if rank.rank == roles[0]:
            await rank.all_reduce(np.ones(1))
        elif rank.rank == roles[1]:
            await rank.recv(LIKE, roles[0])
        else:
            await trio.sleep_forever()

    return main


def one_is_late(roles: Roles) -> Callable[[overlap.Rank], object]:
    async def main(rank: overlap.Rank) -> None:
        await rank.barrier()
        if rank.rank == roles[2]:
            await trio.sleep_forever()
        await rank.all_reduce(np.ones(1))

    return main


def dumped(case: Callable[[Roles], object], roles: Roles, folder: Path) -> Path:
    """Write what PyTorch's flight recorder would have of a case."""
    first, second, third = roles
    ranks: list[list[dict[str, object]]] = [[], [], []]
    groups = {"0": ("world", [0, 1, 2]), "1": ("tp", sorted(roles[:2])), "2": ("dp", sorted(roles[:2]))}
    if case is cycle_of_groups:
        ranks[first] = [entry(1, group=("2", "dp"))]
        ranks[second] = [entry(1, group=("1", "tp"))]
        ranks[third] = [entry(1, "barrier", group=("0", "world"))]
    elif case is both_receive:
        ranks[first] = [entry(1, f"recv {first}<-{second}")]
        ranks[second] = [entry(1, f"recv {second}<-{first}")]
    elif case is stuck_beside_a_sleeper:
        ranks[first] = [entry(1, group=("0", "world"))]
        ranks[second] = [entry(1, f"recv {second}<-{first}")]
    else:
        met = entry(1, "barrier", group=("0", "world"), done=True)
        ranks = [[met] + [entry(2, group=("0", "world"))] * (rank != third) for rank in range(3)]
    return write(folder, ranks, groups=groups)


def plain(sentence: str) -> str:
    """Return a sentence without lines and numbers: those of dumps begin with 1; a dump knows no line of a sleeper."""
    text = re.sub(r"#\d+", "#N", re.sub(r" \([^()]*\)", "", sentence))
    return re.sub(r"its (program is|last call was) [^;]*", "ELSEWHERE", text)


@pytest.mark.everyday(8)
@pytest.mark.parametrize("roles", [roles for roles in permutations(range(3)) if roles[2] != 1])
@pytest.mark.parametrize("case", [cycle_of_groups, both_receive, stuck_beside_a_sleeper, one_is_late])
def test_a_planted_hang_has_one_sentence(
    case: Callable[[Roles], object], roles: Roles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLAP_FLIGHT_DIR", str(tmp_path / "records"))
    main = case(roles)

    async def world() -> str:
        with pytest.raises(StallError) as caught:
            await overlap.run_async(main, ranks=3, timeout_s=60)
        return caught.value.sentence

    live = trio.run(world, clock=MockClock(autojump_threshold=0))
    recorded = hang.judge([tmp_path / "records"])
    from_dumps = hang.judge([dumped(case, roles, tmp_path / "dumps")])
    tested = Ranks().run(main, ranks=3, check=False).verdict
    assert tested is not None
    kind, culprits = ("late", roles[2:]) if case is one_is_late else ("cycle", tuple(sorted(roles[:2])))
    assert {(recorded.verdict, recorded.ranks), (from_dumps.verdict, from_dumps.ranks)} == {(kind, culprits)}
    assert (tested.kind, tested.ranks[: len(culprits)]) == (kind, culprits)
    assert {plain(live), plain(recorded.sentence), plain(from_dumps.sentence)} == {plain(tested.text)}
