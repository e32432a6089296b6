"""No price lies below what wires, memories or a node more allow, and pieces cost what they share."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import topology
from overlap.collectives.generators.composed import PHASES
from overlap.cost.candidates import list_options
from overlap.cost.pipeline import apart, in_slices_s
from overlap.cost.select import plan
from tests.properties import one_in

SWITCHED = str(Path(__file__).parents[1] / "switched.toml")
MACHINES = ("trn1.32xlarge", "trn2.48xlarge", "dl1.24xlarge", SWITCHED, "local")
SIZES = st.integers(min_value=0, max_value=34).map(lambda power: 1 << power)
ALL_REDUCE = ((1.0, 0.0, 1.0), (0.0, 1.0, 0.0))  # the first and the last phase have their wires in common


def priced(op, machine, nbytes):
    found, _ = list_options(op, machine, tuple(range(machine.world_size)), 0, None, True, None, False)
    return [(option, option.price(nbytes)) for option in found]


def cluster(name, nodes):
    return topology.cluster(name, nodes=nodes, ranks=8 * nodes if name == "local" else None)


@one_in(5)
@given(st.sampled_from(MACHINES), st.sampled_from(list(PHASES)), st.sampled_from((2, 3)), SIZES)
def test_no_price_is_below_a_wires_or_a_memorys_bound(name, op, nodes, nbytes):
    """All that an option puts on a wire, or moves in a memory, takes its time there, however it is cut."""
    for option, price in priced(op, cluster(name, nodes), nbytes):
        phases = option.phases(price.slices)
        width = max((len(part.placed.busy_s_per_slot()) for part in phases), default=0)
        busy = [0.0] * width
        for part in phases:
            each = part.placed.busy_s_per_slot() * (part.share * nbytes / part.placed.rounds.slots)
            busy[: len(each)] = [a + b for a, b in zip(busy, each.tolist(), strict=False)]
        size = phases[0].placed.placement.size if phases else 0
        limits = busy[size:] if size else [0.0]  # reducers come first: a flat step may hide them
        assert price.total_s >= max(limits) * (1 - 1e-9), option.label


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("name", "op"),
    [
        (SWITCHED, "all_reduce"),
        (SWITCHED, "broadcast"),
        *(
            pytest.param(name, op, marks=pytest.mark.slow)
            for name in ("trn1.32xlarge", "trn2.48xlarge", "dl1.24xlarge")
            for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
        ),
    ],
)
def test_more_nodes_never_take_less(name, op):
    for nbytes in (1 << 10, 1 << 20, 1 << 26, 1 << 32):
        times = [plan(op, nbytes, topology.cluster(name, nodes=nodes)).predicted_s for nodes in (1, 2, 4)]
        ticks = [round(each * 1e12) for each in times]  # of clocks: adding slices up loses less
        assert ticks == sorted(ticks), nbytes


@pytest.mark.parametrize("nbytes", [1 << 8, 1 << 20, 1 << 23])
def test_what_comes_to_one_adapter_at_different_steps_comes_one_after_the_other(nbytes):
    """A root that two leaves reach in different steps of a tree took as long as for one of them."""
    times = [
        plan("gather", nbytes, topology.cluster(SWITCHED, nodes=nodes), tuple(range(0, 8 * nodes, 8)))
        for nodes in (2, 3, 4)
    ]
    assert [each.predicted_s for each in times] == sorted(each.predicted_s for each in times)
    for each in times:
        assert each.busiest.kind == "efa"
        assert each.predicted_s >= each.breakdown.launch_s + 20e-6 + each.busiest.busy_s - 1e-12
        told_s = sum(getattr(each.breakdown, name) for name in each.breakdown.__slots__)
        assert told_s == pytest.approx(each.predicted_s, abs=1e-10)


def test_what_clocks_lose_by_rounding_is_no_reason():
    """A mesh of two ranks and a tree of two send the same; ticks of clocks tell them apart."""
    found = plan("broadcast", 8 << 30, topology.cluster(SWITCHED), (0, 1), programs_only=True)
    assert re.fullmatch(r"as fast as \w+", found.reason)


def test_no_price_is_below_what_the_dma_engines_of_a_rank_move():
    machine = topology.cluster("trn2.3xlarge")
    chip = machine.machine.chip
    slow = replace(chip, dma_bytes_per_s=replace(chip.dma_bytes_per_s, value=1e9))
    found = plan("all_gather", 1 << 30, replace(machine, machine=replace(machine.machine, chip=slow)))
    assert found.predicted_s >= found.bytes_per_rank / 2e9  # a rank has the engines of two cores
    assert found.bytes_per_rank >= 3 << 28
    assert plan("all_gather", 1 << 30, machine).predicted_s < 0.01


@pytest.mark.slow
def test_a_reduce_goes_in_pieces_on_one_node_too():
    """In one piece it took longer on one node than in three on two."""
    one, two = (plan("reduce", 1 << 32, topology.cluster("trn2.48xlarge", nodes=n)) for n in (1, 2))
    assert one.slices > 1
    assert one.predicted_s < two.predicted_s


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("op", "wider"), [("gather", "all_gather"), ("broadcast", "all_reduce"), ("reduce", "all_reduce")]
)
def test_what_goes_to_one_rank_takes_no_longer_than_what_goes_to_all(op, wider, nodes):
    """The shortest ways from all devices of a torus to one have most bytes on one of its wires; rings have not."""
    machine = topology.cluster("trn2.48xlarge", nodes=nodes)
    for nbytes in (1 << 28, 1 << 32):
        assert plan(op, nbytes, machine).predicted_s <= plan(wider, nbytes, machine).predicted_s


def test_all_wires_at_a_root_carry_as_much():
    machine = topology.cluster("trn2.48xlarge")
    table = plan("gather", 1 << 30, machine, root=5).schedule()
    into = table.dst == 5
    devices = [int(table.count[into & (table.src // 4 == device)].sum()) for device in range(16)]
    assert sorted(devices)[-5:] == [4, 14, 14, 16, 16]  # its own device, and the four around it


def test_the_first_and_the_last_phase_share_their_wires():
    """4 GiB on two nodes take longer than on one: what is inside is not overlapped with itself."""
    one, two = (plan("all_reduce", 1 << 32, topology.cluster("trn2.48xlarge", nodes=n)).predicted_s for n in (1, 2))
    assert 27.7e-3 < one < two  # what its memories need
    assert two > 28.1e-3


def test_phases_that_share_nothing_follow_each_other_like_a_pipeline():
    for slices in (1, 2, 3, 10):
        assert in_slices_s((4.0, 6.0, 2.0), slices, apart(3)) == pytest.approx(12 + (slices - 1) * 6)


@pytest.mark.parametrize(
    ("phases_s", "expected_s"),
    [
        ((1.0, 0.0, 1.0), 6.0),  # only the shared wires: six phases, one after the other
        ((1.0, 1.0, 1.0), 6.0),  # they are never idle: what is between is hidden
        ((1.0, 2.0, 1.0), 8.0),  # nor is the one between: one phase before, three of 2 s, one behind
        ((1.0, 4.0, 1.0), 14.0),
    ],
)
def test_three_slices_of_an_all_reduce(phases_s, expected_s):
    assert in_slices_s(phases_s, 3, ALL_REDUCE) == pytest.approx(expected_s)


class Wires:
    """Everything by hand, in small steps of time: who works takes an equal part of what several need."""

    def __init__(self, phases_s, slices, shared):
        self.left = {(piece, phase): phases_s[phase] for piece in range(slices) for phase in range(len(phases_s))}
        self.shared = shared

    def at_work(self):
        first = [min(piece for piece, phase in self.left if phase == p) for p in {phase for _, phase in self.left}]
        heads = zip(first, sorted({phase for _, phase in self.left}), strict=True)
        return [(piece, phase) for piece, phase in heads if (piece, phase - 1) not in self.left]

    def run(self, step_s):
        now_s = 0.0
        while self.left:
            work = self.at_work()
            for piece, phase in work:
                users = [q for _, q in work if any(row[phase] and row[q] for row in self.shared)]
                self.left[piece, phase] -= step_s / len(users)
            now_s += step_s
            self.left = {job: left for job, left in self.left.items() if left > step_s / 100}
        return now_s


@given(st.lists(st.integers(1, 6), min_size=2, max_size=3), st.integers(1, 4), st.booleans())
def test_pieces_take_what_their_execution_takes(phases, slices, common):
    """Of a phase every wire is busy while it works, or none that another needs; steps are small against phases."""
    shared = apart(len(phases))
    if common:
        shared = tuple(tuple(float(p in (0, len(phases) - 1)) for p in range(len(phases))) for _ in (0,)) + shared
    executed_s = Wires([float(each) for each in phases], slices, shared).run(1 / 64)
    assert in_slices_s([float(each) for each in phases], slices, shared) == pytest.approx(executed_s, abs=1 / 8)


def test_short_vectors_are_not_cut_where_a_machine_says_so():
    machine = topology.cluster("dl1.24xlarge x4")
    assert plan("all_reduce", 32_000_000, machine).slices == 1
    assert plan("all_gather", 1_024_000_000, machine).slices > 1
