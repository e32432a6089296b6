"""The model against published measurements, and what documents say of the order of algorithms."""

from collections import Counter
from dataclasses import replace

import pytest

import topology
from overlap.collectives.generators import generate
from overlap.collectives.placement import place
from overlap.cost import on, parameters, rounds
from overlap.cost.clocks import cost
from overlap.cost.composed import two_level_options
from overlap.cost.flat import PlanRequest, flat_options
from overlap.cost.geometry import Geometry
from overlap.cost.measurements import COLLECTIVES
from overlap.cost.parameters import is_measured, itemsize_bytes
from overlap.cost.select import plan
from overlap.errors import UsageError

from .published import measured_s

# Figures of the model, what they are called where a row fits them, and a part of them that shows.
FIGURES = {
    "wire efficiency": lambda known: {"efficiency": scaled(known.efficiency)},
    "memory efficiency": lambda known: {"memory_efficiency": known.memory_efficiency * 1.05},
    "bytes reduced per second": lambda known: {"reduction_s_per_byte": known.reduction_s_per_byte / 1.05},
    "handshake of the ranks": lambda known: {"launch_s": known.launch_s * 1.2},
    "handshake over the network": lambda known: {"launch_s": known.launch_s * 1.05},
    "adapter share": lambda known: {"efficiency": scaled(known.efficiency)},
    "semaphores of a step": lambda known: {"start_s": scaled(known.start_s)},
    "gap between messages": lambda known: {"gap_s": scaled(known.gap_s)},
    "fixed cost, adapter share": lambda known: {"launch_s": known.launch_s * 1.05},
}


def scaled(figures):
    return tuple((kind, figure * 1.05) for kind, figure in figures)


def priced_s(row, change=None):
    """Return the best time of what the machine's library has, with one figure of the model changed."""
    machine = topology.cluster(row.machine)
    ranks = row.group or tuple(range(row.ranks))
    spans = len({machine.place(rank).node for rank in ranks}) > 1
    known = parameters(machine, peer_direct=row.peer_direct, networked=spans)
    known = replace(known, **change(known)) if change else known
    request = PlanRequest(collective=row.collective, geometry=Geometry(cluster=machine, ranks=ranks))
    placement = place(machine, ranks)
    options = flat_options(request, placement, known)[0] + two_level_options(request, placement, known)[0]
    library = machine.machine.collectives.library
    known_there = [each for each in options if library is None or library.runs(row.collective, each.made_of)]
    return min(option.price(row.nbytes).total_s for option in known_there)


FITTED = [row for row in COLLECTIVES if row.fits]


@pytest.mark.slow
@pytest.mark.parametrize("row", FITTED, ids=lambda row: f"{row.machine} {row.collective} {row.nbytes} {row.fits}")
def test_a_row_that_fits_a_figure_is_hit_and_depends_on_it(row):
    now_s = priced_s(row)
    assert now_s == pytest.approx(measured_s(row), rel=0.05 if row.nbytes == 0 else 0.035)
    assert abs(priced_s(row, FIGURES[row.fits]) / now_s - 1) > 0.01


def test_each_figure_of_a_neuron_machine_is_fitted_to_one_row():
    """But on dl1, where two rows of each setting fit two figures."""
    found = Counter((row.fits, row.machine, row.peer_direct) for row in FITTED)
    assert {count for (name, *_), count in found.items() if name != "fixed cost, adapter share"} == {1}
    assert [count for (name, *_), count in found.items() if name == "fixed cost, adapter share"] == [2, 2]


@pytest.mark.parametrize(
    ("op", "peer_direct", "expected_ms"),
    # Four dl1.24xlarge, 32 MB; hccl_demo bandwidths turned into times.
    [
        ("all_reduce", False, 5.12),
        ("all_reduce", True, 2.93),
        ("reduce_scatter", False, 3.35),
        ("reduce_scatter", True, 1.78),
    ],
)
def test_dl1(op, peer_direct, expected_ms):
    found = plan(op, 32_000_000, topology.cluster("dl1.24xlarge x4"), peer_direct=peer_direct)
    assert found.algorithm == "hierarchical"
    assert found.predicted_s * 1e3 == pytest.approx(expected_ms, rel=0.03)
    assert not found.extrapolated


def first(op, cluster, name, nbytes):
    """Return about the least size from which an algorithm wins, within a third of an octave below one where it does."""
    low, high = round(nbytes / 2 ** (1 / 3)), nbytes
    while high - low > nbytes // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if plan(op, middle, cluster).algorithm == name else (middle, high)
    return high


def crossovers(op, machine, names):
    """Return the sizes in MB from which each of some algorithms wins, and the order in which they do."""
    cluster, order, sizes = topology.cluster(machine), [], []
    for third in range(14 * 3, 31 * 3):
        nbytes = round(2 ** (third / 3))
        name = plan(op, nbytes, cluster).algorithm
        if name in names and name not in order:
            order.append(name)
            sizes.append(first(op, cluster, name, nbytes) / 1e6)
        assert name in names, (op, nbytes)
        assert name == order[-1], "an algorithm wins in one range only"
    return order, sizes


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", ["all_reduce", *(pytest.param(op, marks=pytest.mark.slow) for op in ("all_gather", "reduce_scatter"))]
)
def test_the_documented_order_on_trn2(op):
    """aws-neuron-sdk, intranode-collective-comm: mesh below about 1 MB, RDH to about 56 MB, KangaRing above."""
    order, sizes = crossovers(op, "trn2.48xlarge", ("mesh", "rdh", "kangaring"))
    assert order == ["mesh", "rdh", "kangaring"]
    assert 0.5 < sizes[1] < 2
    assert 28 < sizes[2] < 112


def test_one_shot_for_the_smallest():
    cluster = topology.cluster("trn2.48xlarge")
    assert plan("all_reduce", 256, cluster).algorithm == "one_shot"
    assert plan("all_reduce", 64 << 10, cluster).algorithm == "mesh"


@pytest.mark.everyday(1)
@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 20, 1 << 25, 1 << 30])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_hierarchical_across_nodes(op, nbytes):
    assert plan(op, nbytes, topology.cluster("trn2.48xlarge x4")).algorithm == "hierarchical"


def test_a_ring_where_nothing_better_fits():
    """One rank on each of a group of devices that are no cube: too large for a mesh, no pairs for a KangaRing."""
    cluster = topology.cluster("trn2.48xlarge", strict=False)
    found = plan("all_reduce", 1 << 28, cluster, tuple(range(0, 48, 4)))
    assert found.algorithm in ("ring", "multi_ring", "bucket")
    reasons = {each.algorithm: each.why_not for each in found.alternatives}
    assert reasons["kangaring"] == "it needs all ranks of every device in the group"


def test_floors():
    """Two ranks on a chip 4.1 us, 32-rank all-gather on trn1 6.2 us (published floors)."""
    machine = topology.cluster("trn1.32xlarge")
    for op, algorithm, size, floor_us in (("all_reduce", "one_shot", 2, 4.1), ("all_gather", "mesh", 32, 6.2)):
        placed = on(place(machine, range(size)), rounds(generate(op, algorithm, size)), parameters=parameters(machine))
        assert cost(placed, 64).total_s * 1e6 == pytest.approx(floor_us, rel=0.05)


def test_what_was_measured_and_what_is_extrapolated():
    machine = topology.cluster("trn2.48xlarge")
    assert is_measured(machine, 64, "all_gather", 1 << 25, "float32")
    assert not is_measured(machine, 64, "all_gather", 1 << 25, "float16")
    assert not is_measured(machine, 64, "all_reduce", 1 << 25, "float32")
    assert not is_measured(machine, 64, "all_gather", 1 << 10, "float32")
    assert not is_measured(machine, 32, "all_gather", 1 << 25, "float32")
    assert not is_measured(topology.cluster("trn2.48xlarge x4"), 64, "all_gather", 1 << 25, "float32")
    assert not is_measured(topology.cluster("trn2.48xlarge", lnc=1), 64, "all_gather", 1 << 25, "float32")
    assert is_measured(machine, 64, "reduce_scatter", 1 << 31, "float32")
    assert not is_measured(machine, 64, "reduce_scatter", (1 << 31) + 1, "float32")


def test_reductions_are_priced_by_the_byte():
    """The published slopes of uint8 and float32 are the same, and so are those of bfloat16 and float32."""
    machine = topology.cluster("trn2.48xlarge")
    full, half = (plan("reduce_scatter", 1 << 30, machine, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert half.predicted_s == full.predicted_s
    assert (full.extrapolated, half.extrapolated) == (False, True)


def test_a_logical_core_has_the_reducers_of_its_physical_ones():
    one, two = (parameters(topology.cluster("trn2.48xlarge", lnc=lnc)).reduction_s_per_byte for lnc in (1, 2))
    assert one == 2 * two


def test_dtypes():
    assert [itemsize_bytes(name) for name in ("uint8", "float8_e4m3", "bfloat16", "float64", "complex64")] == [
        1,
        1,
        2,
        8,
        8,
    ]
    with pytest.raises(UsageError, match="dtype: 'float99' is unknown"):
        itemsize_bytes("float99")
