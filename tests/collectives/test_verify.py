"""The proof accepts every schedule that we generate, and says what is wrong with others."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from overlap.collectives import GENERATORS, Buffer, Op, Schedule, fits, generate, verify
from overlap.collectives.explain import Origin, count_contributors, count_expected_contributors
from overlap.collectives.generators.families import FROM_ROOT
from overlap.collectives.tablewriter import TableWriter
from overlap.errors import ScheduleError

from .cases import NAMES, schedules
from .counting import is_right

TORI = [
    pytest.param(sides, marks=[pytest.mark.slow] if math.prod(sides) > 24 else [])
    for n in (1, 2, 3)
    for sides in itertools.product(range(1, 5), repeat=n)
]
EVEN_TORI = [(6, 2), (2, 6), (6, 4), (4, 6), (6, 6), (10, 2), (1, 6), (6, 2, 2), (2, 6, 2)]
SPREADING = ("all_reduce", "reduce_scatter", "all_gather")
INSIDE = ("ring", "multi_ring", "mesh", "rdh", "kangaring", "swing", "bucket", "bruck")
LEVELS = [
    (nodes, local_size, intra)
    for nodes, local_size in [(1, 4), (2, 4), (3, 4), (4, 1), (4, 2)]
    for intra in INSIDE
    if fits(intra, local_size)
]
# Nodes, and ranks in each.
GRIDS = [(1, 4), (2, 4), (4, 1), (3, 3), *(pytest.param(*grid, marks=pytest.mark.slow) for grid in ((3, 4), (4, 2)))]

# Every size up to nine, and what lies around the next power of two.
EVERYDAY = (*range(1, 10), 15, 16, 17)
FURTHER = tuple(size for size in range(34) if size > max(EVERYDAY) or 9 < size < 15)


@pytest.mark.parametrize(
    "sizes", [EVERYDAY, pytest.param(FURTHER, marks=pytest.mark.slow)], ids=["everyday", "further"]
)
@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_brute_force_agrees_for_every_size(collective: str, algorithm: str, sizes: tuple[int, ...]) -> None:
    for size in (size for size in sizes if fits(algorithm, size)):
        for schedule in schedules(collective, algorithm, size):
            verify(schedule)
            assert is_right(schedule), schedule


@pytest.mark.parametrize(("collective", "algorithm"), [("all_reduce", "mesh"), ("all_reduce", "chain"),
                                                      ("reduce_scatter", "mesh")])  # fmt: skip
def test_a_table_that_promises_the_order_of_ranks_keeps_it(collective: str, algorithm: str) -> None:
    other = replace(generate(collective, algorithm, 4), algorithm="rank_order")
    with pytest.raises(
        ScheduleError, match=r"is not combined in the order of ranks; correct the generator of the schedule$"
    ):
        verify(other)


@pytest.mark.parametrize("sides", TORI, ids=str)
def test_tori(sides: tuple[int, ...]) -> None:
    for collective in SPREADING:
        for algorithm in ("bucket", "swing") if 3 not in sides else ("bucket",):
            schedule = generate(collective, algorithm, math.prod(sides), dims=sides)
            verify(schedule)
            assert is_right(schedule), schedule


@pytest.mark.parametrize("sides", EVEN_TORI, ids=str)
def test_swing_takes_even_sides(sides: tuple[int, ...]) -> None:
    for collective in SPREADING:
        schedule = generate(collective, "swing", math.prod(sides), dims=sides)
        verify(schedule)
        assert is_right(schedule), schedule


def test_swing_has_no_partners_on_odd_rings() -> None:
    with pytest.raises(ScheduleError, match=r"swing needs even sides, got \(4, 3\); 'bucket' takes any"):
        generate("all_reduce", "swing", 12, dims=(4, 3))


@pytest.mark.parametrize("collective", SPREADING)
@pytest.mark.parametrize(("nodes", "local_size", "intra"), LEVELS)
def test_every_pair_of_levels(collective: str, intra: str, nodes: int, local_size: int) -> None:
    inters = GENERATORS["all_reduce"] if collective == "all_reduce" else INSIDE
    for inter in set(inters) - {"hierarchical"}:
        if fits(inter, nodes):
            for slices in (1, 3):
                options = {"nodes": nodes, "intra": intra, "inter": inter, "slices": slices}
                schedule = generate(collective, "hierarchical", nodes * local_size, **options)
                verify(schedule)
                assert is_right(schedule), (schedule, options)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("nodes", "local_size"), GRIDS)
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_levels_from_a_root(collective: str, nodes: int, local_size: int) -> None:
    pairs = [(intra, inter) for intra in INSIDE for inter in FROM_ROOT]
    for number, (intra, inter) in enumerate(pairs):
        if fits(intra, local_size):
            for scatter, slices in (("binomial", 1), ("mesh", 3), ("multi_ring", 2)):
                options = {"nodes": nodes, "intra": intra, "inter": inter, "slices": slices, "scatter": scatter}
                root = number % (nodes * local_size)
                schedule = generate(collective, "hierarchical", nodes * local_size, root=root, **options)
                verify(schedule)
                assert is_right(schedule), (schedule, options)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("nodes", "local_size"), GRIDS)
@pytest.mark.parametrize("collective", ["all_to_all", "gather", "scatter"])
def test_levels_of_blocks(collective: str, nodes: int, local_size: int) -> None:
    known = [name for name in GENERATORS[collective] if name != "hierarchical"]
    for intra, inter, slices in itertools.product(known, known, (1, 3)):
        for root in range(nodes * local_size) if collective != "all_to_all" else (0,):
            options = {"nodes": nodes, "intra": intra, "inter": inter, "slices": slices}
            schedule = generate(collective, "hierarchical", nodes * local_size, root=root, **options)
            verify(schedule)
            assert is_right(schedule), (schedule, options)


@pytest.mark.parametrize("collective", ["all_to_all", "gather", "scatter", "broadcast", "reduce"])
def test_between_nodes_only_ranks_of_one_place_talk(collective: str) -> None:
    schedule = generate(collective, "hierarchical", 12, nodes=3)
    crosses = schedule.src // 4 != schedule.dst // 4
    assert (schedule.src % 4 == schedule.dst % 4)[crosses].all()
    senders = set(schedule.src[crosses].tolist())
    assert len({rank % 4 for rank in senders}) == 4, "all places of a node take part"


def test_what_levels_cannot_be_made_of() -> None:
    with pytest.raises(ScheduleError, match="algorithm 'ring' does not fit this level; known are mesh, binomial"):
        generate("broadcast", "hierarchical", 8, inter="ring")
    with pytest.raises(ScheduleError, match="scatter: expected one of binomial, mesh, multi_ring, got 'chain'"):
        generate("broadcast", "scatter_all_gather", 8, scatter="chain")
    with pytest.raises(ScheduleError, match="algorithm 'chain' does not fit this level; known are ring"):
        generate("reduce", "reduce_scatter_gather", 8, gather="chain")


def test_rings_that_blocks_cannot_go_around() -> None:
    with pytest.raises(
        ScheduleError,
        match=r"rings: each must visit each of the 4 ranks once, got \[\(0, 1\), \(2,\)\]",
    ):
        generate("gather", "multi_ring", 4, rings=[[(0, 1), (2,)]])
    with pytest.raises(ScheduleError, match="rings: all must visit the same devices"):
        generate("scatter", "multi_ring", 4, rings=[[(0, 1), (2, 3)], [(0, 2), (1, 3)]])


@pytest.mark.parametrize("size", range(2, 34))
def test_double_trees_share_the_work(size: int) -> None:
    for schedule in (
        generate("broadcast", "double_binary_tree", size, root=size // 2, slices=3),
        generate("all_reduce", "double_binary_tree", size, slices=3),
    ):
        down = (schedule.src != schedule.dst) & (schedule.op == Op.MOVE)
        half, src, dst, step = (
            column[down] for column in (schedule.dslot // 3, schedule.src, schedule.dst, schedule.step)
        )
        inner = [set(src[half == tree].tolist()) - {schedule.root} for tree in (0, 1)]
        if schedule.collective == "broadcast":
            assert not inner[0] & inner[1]
        for ends in (src, dst):
            assert len(set(zip(step.tolist(), ends.tolist(), strict=True))) == len(ends), "one message a step"
        assert (np.bincount(half) == 3 * (size - 1)).all()


def test_hierarchy_reduces_inside_exchanges_between_spreads_inside() -> None:
    schedule = generate("all_reduce", "hierarchical", 8, nodes=2, intra="mesh", inter="ring")
    remote = schedule.src != schedule.dst
    crosses = schedule.src // 4 != schedule.dst // 4
    phases = [(op, bool(cross)) for op, cross in zip(schedule.op[remote], crosses[remote], strict=True)]
    order = [key for key, _ in itertools.groupby(phases)]
    assert order == [(Op.ADD, False), (Op.ADD, True), (Op.MOVE, True), (Op.MOVE, False)]
    assert (schedule.src[remote & crosses] % 4 == schedule.dst[remote & crosses] % 4).all()


def test_pipelining_overlaps_the_levels() -> None:
    schedule = generate("all_reduce", "hierarchical", 8, nodes=2, intra="mesh", inter="ring", slices=4)
    remote = schedule.src != schedule.dst
    crosses = (schedule.src // 4 != schedule.dst // 4)[remote]
    both = set(schedule.step[remote][crosses].tolist()) & set(schedule.step[remote][~crosses].tolist())
    assert both
    assert not set(schedule.channel[remote][crosses].tolist()) & set(schedule.channel[remote][~crosses].tolist())


@pytest.mark.parametrize(
    ("collective", "algorithm", "size", "options", "steps"),
    [
        ("all_reduce", "ring", 8, {}, 14),
        ("all_gather", "ring", 8, {}, 7),
        ("all_gather", "mesh", 8, {}, 1),
        ("all_gather", "rdh", 8, {}, 3),
        ("all_gather", "rdh", 11, {}, 5),
        ("all_reduce", "rdh", 8, {}, 6),
        ("all_reduce", "rdh", 3, {}, 4),
        ("all_reduce", "rdh", 11, {}, 8),  # 2 floor(log2(p)) + 2
        ("all_reduce", "hierarchical", 12, {"nodes": 3, "intra": "mesh", "inter": "rdh"}, 6),
        ("all_gather", "bruck", 11, {}, 4),
        ("all_gather", "kangaring", 8, {}, 4),
        ("all_gather", "swing", 16, {"dims": (4, 4)}, 4),
        ("all_gather", "bucket", 64, {"dims": (4, 4, 4)}, 9),
        ("broadcast", "binomial", 9, {}, 4),
        ("broadcast", "chain", 5, {"slices": 4}, 7),
        ("broadcast", "double_binary_tree", 16, {"slices": 4}, 14),
        ("broadcast", "scatter_all_gather", 9, {}, 12),
        ("broadcast", "scatter_all_gather", 8, {"gather": "rdh"}, 6),
        ("reduce", "reduce_scatter_gather", 8, {"gather": "rdh", "scatter": "mesh"}, 4),
        ("broadcast", "hierarchical", 16, {"nodes": 4, "intra": "mesh", "scatter": "mesh"}, 4),
        ("all_to_all", "hierarchical", 16, {"nodes": 4, "intra": "mesh", "inter": "mesh"}, 2),
        ("gather", "hierarchical", 16, {"nodes": 4, "intra": "mesh", "inter": "mesh"}, 2),
        ("scatter", "hierarchical", 16, {"nodes": 4, "intra": "mesh", "inter": "mesh"}, 2),
        ("all_gather", "swing", 6, {}, 3),
        ("scatter", "binomial", 9, {}, 4),
        ("scatter", "multi_ring", 9, {}, 4),
        ("gather", "multi_ring", 8, {"rings": [[(0, 1), (2, 3), (4, 5), (6, 7)]]}, 3),
        ("broadcast", "scatter_all_gather", 8, {"scatter": "multi_ring", "gather": "mesh"}, 5),
        ("all_to_all", "pairwise", 6, {}, 5),
        ("all_to_all", "bruck", 6, {}, 3),
    ],
)
def test_numbers_of_steps(collective: str, algorithm: str, size: int, options: dict[str, int], steps: int) -> None:
    schedule = generate(collective, algorithm, size, **options)
    remote = schedule.src != schedule.dst
    assert int(schedule.step[remote].max()) + 1 == steps


@pytest.mark.parametrize("algorithm", ["ring", "mesh", "multi_ring", "rdh", "kangaring", "swing", "bucket", "bruck"])
def test_gathering_sends_no_byte_twice(algorithm: str) -> None:
    schedule = generate("all_gather", algorithm, 16)
    remote = schedule.src != schedule.dst
    received = np.bincount(schedule.dst[remote], weights=schedule.count[remote])
    assert (received == 15 * schedule.slots_per_block).all()


@pytest.mark.parametrize("collective", SPREADING)
def test_rings_run_one_way(collective: str) -> None:
    ring = generate(collective, "ring", 6)
    remote = ring.src != ring.dst
    assert set(((ring.dst - ring.src)[remote] % 6).tolist()) == {1}
    cycle = [0, 1, 3, 2]
    kanga = generate(collective, "kangaring", 8, orders=[cycle])
    away = kanga.src // 2 != kanga.dst // 2
    hops = set(zip(kanga.src[away].tolist(), kanga.dst[away].tolist(), strict=True))
    follows = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    assert hops == {(2 * a + role, 2 * b + role) for a, b in follows.items() for role in (0, 1)}


def without(schedule: Schedule, row: int) -> Schedule:
    names = ("step", "op", "src", "dst", "sbuf", "sslot", "dbuf", "dslot", "count", "channel", "group")
    return replace(schedule, **{name: np.delete(getattr(schedule, name), row) for name in names})


def test_a_missing_contributor_is_named() -> None:
    schedule = generate("all_reduce", "mesh", 4)
    row = int(np.flatnonzero((schedule.op == Op.ADD) & (schedule.src == 3) & (schedule.dst == 1))[0])
    with pytest.raises(ScheduleError, match="lacks IN slot 1 of rank 3") as raised:
        verify(without(schedule, row))
    assert (raised.value.slot, raised.value.contributor) == (1, 3)


def test_a_duplicate_contributor_is_named() -> None:
    schedule = generate("reduce", "mesh", 4)
    row = int(np.flatnonzero((schedule.op == Op.ADD) & (schedule.src == 2))[0])
    with pytest.raises(ScheduleError, match="more than once or should not have IN slot 0 of rank 2") as raised:
        verify(replace(schedule, src=np.where(schedule.src == 3, 2, schedule.src).astype(np.int32)))
    assert (raised.value.rank, raised.value.contributor) == (0, 3)
    assert count_contributors(schedule, 0, 0) == Counter({Origin(r, Buffer.IN, 0): 1 for r in range(4)}), row


def test_provenance_is_the_definition() -> None:
    for collective, algorithm in NAMES:
        for schedule in schedules(collective, algorithm, 6):
            ends = [schedule.root] if collective in ("reduce", "gather") else range(6)
            for rank, slot in itertools.product(ends, range(schedule.slots[1])):
                assert count_contributors(schedule, rank, slot) == count_expected_contributors(schedule, rank, slot)


def chain_of(order: list[int]) -> TableWriter:
    """Reduce along a chain of ranks into its last, whose sum then goes nowhere."""
    table, ranks = TableWriter(), np.arange(len(order))
    table.add_moves(0, ranks, ranks, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    for step, (src, dst) in enumerate(itertools.pairwise(order)):
        table.add_reductions(step, src, dst, (Buffer.SCRATCH, 0), (Buffer.SCRATCH, 0))
    return table


def test_another_parenthesisation_on_another_rank_is_refused() -> None:
    # Every rank gets the whole sum, but 0 and 1 add up (0 + 1) + 2, while 2 adds up (2 + 1) + 0.
    table, ranks = TableWriter(), np.arange(3)
    table.add_moves(0, ranks, ranks, (Buffer.IN, 0), (Buffer.SCRATCH, 1))
    for step, (first, second) in enumerate([(1, 1), (2, 0)]):
        table.add_reductions(step, first, 0, (Buffer.IN, 0), (Buffer.SCRATCH, 1))
        table.add_reductions(step, second, 2, (Buffer.IN, 0), (Buffer.SCRATCH, 1))
    table.add_moves(2, ranks[::2], ranks[::2], (Buffer.SCRATCH, 1), (Buffer.OUT, 0))
    table.add_moves(2, 0, 1, (Buffer.OUT, 0), (Buffer.OUT, 0))
    schedule = table.build("all_reduce", "uneven", 3, scratch=2)
    assert is_right(schedule)
    with pytest.raises(ScheduleError, match="not combined as on the other ranks") as raised:
        verify(schedule)
    assert raised.value.rank == 2


def test_an_unfinished_result_is_refused() -> None:
    table = chain_of([1, 0])
    table.add_moves(1, 0, 0, (Buffer.SCRATCH, 0), (Buffer.SCRATCH, 1))
    table.add_moves(2, 0, 0, (Buffer.SCRATCH, 1), (Buffer.OUT, 0))
    verify(table.build("reduce", "fine", 2, scratch=2))
    schedule = generate("reduce", "binomial", 2)
    last = schedule.dbuf == Buffer.OUT
    with pytest.raises(ScheduleError, match="not in the vocabulary"):
        verify(replace(schedule, sbuf=np.where(last, Buffer.IN, schedule.sbuf).astype(np.uint8)))


def exchange(bank: int) -> Schedule:
    """Two ranks add each other's vector, reading bank 0 and writing `bank`."""
    table, ranks = TableWriter(), np.arange(2)
    table.add_moves(0, ranks, ranks, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    if bank:
        table.add_moves(1, ranks, ranks, (Buffer.SCRATCH, 0), (Buffer.SCRATCH, bank))
    table.add_reductions(1, ranks, 1 - ranks, (Buffer.SCRATCH, 0), (Buffer.SCRATCH, bank))
    table.add_moves(2, ranks, ranks, (Buffer.SCRATCH, bank), (Buffer.OUT, 0))
    return table.build("all_reduce", "exchange", 2, scratch=2)


def test_an_exchange_needs_two_banks() -> None:
    verify(exchange(1))
    assert is_right(exchange(0))
    with pytest.raises(ScheduleError, match=r"step 1, row 2.*another row of its step reads") as raised:
        verify(exchange(0))
    assert (raised.value.rank, raised.value.slot, raised.value.step) == (1, 0, 1)


def test_memory_that_may_be_shared_is_a_hazard() -> None:
    # Right as long as IN and SCRATCH are apart; in place, each rank would overwrite what it is sending.
    table, ranks = TableWriter(), np.arange(2)
    table.add_moves(0, ranks, ranks, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    table.add_reductions(0, ranks, 1 - ranks, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    table.add_moves(1, ranks, ranks, (Buffer.SCRATCH, 0), (Buffer.OUT, 0))
    schedule = table.build("all_reduce", "hasty", 2, scratch=1)
    assert is_right(schedule)
    with pytest.raises(ScheduleError, match="another row of its step reads"):
        verify(schedule)


def test_fan_in_needs_a_group() -> None:
    schedule = generate("reduce", "mesh", 4)
    verify(schedule)
    with pytest.raises(ScheduleError, match="another row of its step writes"):
        verify(replace(schedule, group=np.full(len(schedule), -1, np.int32)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"src": np.zeros(3, np.int32)}, "column src: expected int32 of length 8, got int32 .3"),
        ({"op": np.zeros(8, np.int64)}, "column op: expected uint8 of length 8, got int64"),
        ({"root": 7}, "root is 7, expected a rank from 0 to 1; correct the generator"),
        ({"slots_per_block": 0}, "slots_per_block is 0, expected 1 or more"),
        ({"src": np.full(8, -1, np.int32)}, "ranks outside 0..1"),
        ({"dst": np.full(8, 2, np.int32)}, "ranks outside 0..1"),
        ({"count": np.zeros(8, np.int32)}, "slots that do not exist"),
        ({"sslot": np.full(8, 2, np.int32)}, "slots that do not exist"),
        ({"sbuf": np.full(8, 3, np.uint8)}, "unknown buffer or operation"),
        ({"channel": np.full(8, -1, np.int16)}, "negative channel or group"),
        ({"step": np.arange(8, 0, -1).astype(np.int32)}, "not in order of steps"),
        ({"step": np.arange(-8, 0).astype(np.int32)}, "a negative step"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(replace(generate("all_reduce", "ring", 2), **changes))  # type: ignore[arg-type]


def test_only_the_root_has_inputs_and_outputs() -> None:
    scatter, gather = generate("scatter", "mesh", 3), generate("gather", "mesh", 3)
    with pytest.raises(ScheduleError, match="a source that only the root has"):
        verify(replace(scatter, root=1))
    with pytest.raises(ScheduleError, match="a target that only the root has"):
        verify(replace(gather, root=1))


def test_a_local_row_must_not_read_what_arrives_in_its_step() -> None:
    table = TableWriter()
    table.add_moves(0, 0, 0, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    table.add_moves(1, 0, 0, (Buffer.SCRATCH, 0), (Buffer.SCRATCH, 1))
    table.add_reductions(1, 1, 0, (Buffer.IN, 0), (Buffer.SCRATCH, 0))
    table.add_moves(2, 0, 0, (Buffer.SCRATCH, 0), (Buffer.OUT, 0))
    schedule = table.build("reduce", "by hand", 2, scratch=2)
    assert is_right(schedule)
    with pytest.raises(ScheduleError, match="a local row of its step reads"):
        verify(schedule)
