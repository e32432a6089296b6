"""Groups of some ranks: made by hand, by split, as axes of a mesh, in any order of ranks, several at once."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import overlap
from overlap import UsageError
from overlap.config import overriding_config
from overlap.timeline.spans import Timeline

from .permuted import KINDS, main
from .worlds import run

# -- groups of some ranks: made by hand, by split, as axes of a mesh, in any order, several at once --------------------


def mine(rank: overlap.Rank) -> np.ndarray:
    return np.array([10**rank.rank])


def test_a_group_has_its_own_order(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[object] | None:
        if rank.rank == 1:
            return None
        group = rank.group([3, 0, 2])
        gathered = await group.all_gather(np.array([rank.rank]))
        rooted = await group.broadcast(mine(rank) if group.rank == 1 else None, root=1)
        return [group.ranks, group.rank, group.size, gathered.tolist(), rooted.tolist()]

    shared = [[3, 0, 2], [1]]
    assert run(main, 4, path=path) == [
        [(3, 0, 2), 1, 3, *shared],
        None,
        [(3, 0, 2), 2, 3, *shared],
        [(3, 0, 2), 0, 3, *shared],
    ]


def test_groups_of_groups(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[int] | None:
        if rank.rank == 0:
            return None
        outer = rank.group([4, 3, 2, 1])
        if outer.rank not in (0, 3):
            return None
        inner = outer.group([3, 0])
        return [*inner.ranks, inner.rank, int((await inner.all_reduce(mine(rank)))[0])]

    assert run(main, 5, path=path) == [None, [1, 4, 0, 10010], None, None, [1, 4, 1, 10010]]


def test_groups_may_be_made_and_used_in_any_order(path: str) -> None:
    """Rank r makes its groups with the others in an order of its own, and issues in yet another."""

    async def main(rank: overlap.Rank) -> list[int]:
        others = [other for other in range(4) if other != rank.rank]
        shuffled = np.random.default_rng(rank.rank).permutation
        groups = {int(o): rank.group(sorted((rank.rank, int(o)))) for o in shuffled(others)}
        futures = {int(o): groups[int(o)].all_reduce(mine(rank)) for o in shuffled(others)}
        return [int((await futures[other])[0]) for other in others]

    assert run(main, 4, path=path) == [[11, 101, 1001], [11, 110, 1010], [101, 110, 1100], [1001, 1010, 1100]]


def test_two_groups_of_the_same_ranks_do_not_mix(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        groups = {1: rank.group([0, 1]), 10: rank.group([0, 1]), 100: rank.world}
        order = list(groups) if rank.rank else list(reversed(groups))
        futures = {place: groups[place].all_reduce(np.array([rank.rank + place])) for place in order}
        return [int((await futures[place])[0]) for place in groups]

    assert run(main, 2, path=path) == [[3, 21, 201]] * 2


def test_split_by_color_and_key(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        parity = await rank.split(rank.rank % 2, key=-rank.rank)
        assert parity is not None
        some = await rank.split(7 if rank.rank in (0, 4) else None)
        total = int((await parity.all_reduce(mine(rank)))[0])
        return [parity.ranks, parity.rank, total, None if some is None else some.ranks]

    assert run(main, 5, path=path) == [
        [(4, 2, 0), 2, 10101, (0, 4)],
        [(3, 1), 1, 1010, None],
        [(4, 2, 0), 1, 10101, None],
        [(3, 1), 0, 1010, None],
        [(4, 2, 0), 0, 10101, (0, 4)],
    ]


def test_equal_keys_keep_the_order_of_the_group_that_is_split() -> None:
    async def main(rank: overlap.Rank) -> tuple[int, ...]:
        backwards = rank.group([2, 1, 0])
        again = await backwards.split(-5)
        assert again is not None
        return again.ranks

    assert run(main, 3) == [(2, 1, 0)] * 3


def test_names() -> None:
    async def main(rank: overlap.Rank) -> list[str]:
        halves = await rank.split(0)
        named = await rank.split(0, name="pipe")
        assert halves is not None
        assert named is not None
        made = [rank.group([0, 1]), rank.group([0, 1], name="dp"), halves, named, rank.world]
        return [repr(group) for group in made]

    assert run(main, 2)[1] == [
        "<Group '0-1' of ranks [0, 1], this is 1>",
        "<Group 'dp' of ranks [0, 1], this is 1>",
        "<Group 'world/0' of ranks [0, 1], this is 1>",
        "<Group 'pipe' of ranks [0, 1], this is 1>",
        "<Group 'world' of ranks [0, 1], this is 1>",
    ]


def test_mesh_axes(path: str) -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        mesh = rank.mesh(pp=2, dp=2, tp=2)
        assert mesh.axes == {"pp": 2, "dp": 2, "tp": 2}
        futures = [mesh[axis].all_reduce(mine(rank)) for axis in ("tp", "pp", "dp")]
        sums = [int((await future)[0]) for future in futures]
        return [tuple(mesh.coordinates.values()), [mesh[axis].ranks for axis in mesh.axes], sums]

    got = run(main, 8, path=path)
    assert got[0] == [(0, 0, 0), [(0, 4), (0, 2), (0, 1)], [11, 10001, 101]]
    assert got[6] == [(1, 1, 0), [(2, 6), (4, 6), (6, 7)], [11000000, 1000100, 1010000]]
    assert [coordinates for coordinates, *_ in got] == [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]


def test_axes_of_a_mesh_together() -> None:
    async def main(rank: overlap.Rank) -> list[object]:
        mesh = rank.mesh(pp=2, dp=2, tp=2)
        both = mesh["tp", "pp"]
        with pytest.raises(UsageError, match=r"^axis: 'ep' is unknown; known are pp, dp, tp$"):
            mesh["tp", "ep"]
        total = int((await both.all_reduce(mine(rank)))[0])
        return [both.name, both.ranks, total, mesh["pp", "dp", "tp"].ranks, mesh["tp", "pp"] is mesh["pp", "tp"]]

    got = run(main, 8)
    assert got[0] == ["ppxtp", (0, 1, 4, 5), 110011, tuple(range(8)), True]
    assert got[7] == ["ppxtp", (2, 3, 6, 7), 11001100, tuple(range(8)), True]


def test_mesh_says_where_it_is() -> None:
    async def main(rank: overlap.Rank) -> str:
        return repr(rank.mesh(dp=3, tp=1))

    assert run(main, 3) == ["<Mesh dp=0/3, tp=0/1>", "<Mesh dp=1/3, tp=0/1>", "<Mesh dp=2/3, tp=0/1>"]


def test_a_rank_knows_its_place() -> None:
    async def main(rank: overlap.Rank) -> list[int]:
        assert rank.world.rank == rank.rank
        return [rank.rank, rank.world_size, rank.local_rank, rank.node]

    assert run(main, 3) == [[0, 3, 0, 0], [1, 3, 1, 0], [2, 3, 2, 0]]


BAD_GROUPS = [
    ([0, 2], r"^ranks: expected this rank, 1, among \[0, 2\]; only members call it$"),
    ([], r"^ranks: expected this rank, 1, among \[\]; only members call it$"),
    ([1, 0, 1], r"^ranks: \[1, 0, 1\] names a rank twice; name each rank once$"),
    ([1, 3], r"^ranks: expected 0 to 2, a rank of group 'world', got 3$"),
    ([-1, 1], r"^ranks: expected 0 to 2, a rank of group 'world', got -1$"),
    ([1.0], r"^ranks: expected 0 to 2, a rank of group 'world', got 1.0$"),
]


@pytest.mark.parametrize(("ranks", "message"), BAD_GROUPS)
def test_groups_that_cannot_be(ranks: list[int], message: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        if rank.rank == 1:
            with pytest.raises(UsageError, match=message):
                rank.group(ranks)
            assert rank.group([1]).ranks == (1,)

    assert run(main, 3) == [None] * 3


def test_meshes_that_cannot_be() -> None:
    async def main(rank: overlap.Rank) -> None:
        with pytest.raises(
            UsageError, match=r"^axes: dp=2 x tp=3 makes 6 ranks, but the world has 4; choose sizes whose product is 4$"
        ):
            rank.mesh(dp=2, tp=3)
        with pytest.raises(
            UsageError, match=r"^axes: none makes 1 ranks, but the world has 4; choose sizes whose product is 4$"
        ):
            rank.mesh()
        with pytest.raises(UsageError, match=r"^dp: an axis needs a whole number of ranks, at least 1; got 0$"):
            rank.mesh(dp=0, tp=4)
        with pytest.raises(UsageError, match=r"^dp: an axis needs a whole number of ranks, at least 1; got '2'$"):
            rank.mesh(dp="2", tp=2)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"^axis: 'ep' is unknown; known are dp, tp$"):
            rank.mesh(dp=2, tp=2)["ep"]

    assert run(main, 4) == [None] * 4


@pytest.mark.parametrize(("color", "key", "argument"), [("red", 0, "color"), (0, 1.5, "key")])
def test_splits_that_cannot_be_meant(color: object, key: object, argument: str) -> None:
    async def main(rank: overlap.Rank) -> None:
        with pytest.raises(UsageError, match=rf"^{argument}: expected an integer, got "):
            await rank.split(color, key)  # type: ignore[arg-type]

    run(main, 1)


@pytest.mark.parametrize("argument", ["color", "key"])
def test_a_split_by_what_does_not_fit_into_64_bits_is_refused(argument: str) -> None:
    async def main(rank: overlap.Rank) -> str:
        with pytest.raises(UsageError) as refused:
            await rank.split(**{"color": 0, argument: 1 << 63})
        assert await rank.split(**{"color": 0, argument: -(1 << 63)})
        return str(refused.value)

    assert run(main, 1) == [f"{argument}: expected an integer of 64 bits, got 9223372036854775808"]


def test_a_split_is_issued_where_the_program_asks_for_it() -> None:
    async def main(rank: overlap.Rank) -> None:
        await rank.split(0)

    seen: list[Timeline] = []
    with overriding_config(watcher=seen.append):
        run(main, 2)
    line = main.__code__.co_firstlineno + 1
    sites = {span.info.call_site for span in seen[0].spans if span.info}
    assert sites == {f"tests/runtime/test_groups.py:{line}"}


# -- groups of the same ranks in other orders: the results are right in any sequence of them, on both clocks -----------

RANKS = (0, 1, 32, 33)  # on two nodes of trn1.32xlarge
ALIKE = (RANKS, RANKS[::-1], (1, 0, 33, 32), (32, 33, 0, 1))  # the same wires between the same places


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@example(orders=[[0, 1, 32, 33], [1, 0, 33, 32]], kinds=["reduce_scatter"], count=100_000)
@given(
    orders=st.lists(st.sampled_from(ALIKE) | st.permutations(RANKS), min_size=2, max_size=4),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
    count=st.sampled_from([1, 100_000]),
)
def test_in_virtual_time(orders: list[list[int]], kinds: list[str], count: int) -> None:
    looked = overlap.run(main, orders, kinds, count, clock="virtual", cluster="trn1.32xlarge x2")
    assert looked[:2] == [len(kinds) * sum(rank in order for order in orders) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire", "count"),
    [
        ("efa", 1000),
        pytest.param("efa", 100_000, marks=pytest.mark.slow),
        pytest.param("shared_memory", 100_000, marks=pytest.mark.slow),
    ],
)
def test_between_processes(wire: str, count: int) -> None:
    program = str(Path(__file__).with_name("permuted.py"))
    words = ["run", "--processes", "2", "--ranks", "4", "--transport", wire, "--no-prefix", program, str(count)]
    ended = subprocess.run([sys.executable, "-m", "overlap", *words], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    looked = 6 * len(KINDS)
    assert ended.stdout.splitlines() == [f"[{looked}, {looked}]"] * 2
