"""The model against published measurements, and what documents say of the order of algorithms."""

import statistics

import pytest

import topology
from overlap.collectives.cost import on, parameters, rounds
from overlap.collectives.cost.maxplus import cost
from overlap.collectives.cost.parameters import itemsize_of, measured
from overlap.collectives.generators import generate
from overlap.collectives.placement import place
from overlap.collectives.select import plan
from overlap.errors import UsageError

# davidshtian/xpu-perf: trn2.48xlarge, 64 ranks, float32; MiB to microseconds.
ALL_GATHER = {1: 34.56, 4: 46.77, 16: 121.00, 32: 221.62, 128: 512.58, 512: 1667.02, 2048: 6181.50}
REDUCE_SCATTER = {1: 30.05, 4: 65.36, 16: 146.61, 32: 252.00, 128: 539.80, 512: 1971.83, 2048: 7805.91}
# inf2.xlarge, 2 ranks, uint8: bytes to microseconds.
ALL_REDUCE = {1 << 20: 23.5, 2516582: 50.48, 3984588: 77.85, 5452594: 105.03, 8 << 20: 160.0}


def errors(op, rows, machine, unit=1, **options):
    cluster = topology.cluster(machine)
    return [plan(op, size * unit, cluster, **options).predicted_s * 1e6 / us - 1 for size, us in rows.items()]


def test_errors_on_the_published_rows():
    found = [
        *errors("all_gather", ALL_GATHER, "trn2.48xlarge", 1 << 20),
        *errors("reduce_scatter", REDUCE_SCATTER, "trn2.48xlarge", 1 << 20),
        *errors("all_reduce", ALL_REDUCE, "inf2.xlarge", dtype="uint8"),
    ]
    assert statistics.median(map(abs, found)) < 0.05
    assert max(map(abs, found)) < 0.22


@pytest.mark.parametrize(
    ("op", "peer_direct", "expected_ms"),
    # Four dl1.24xlarge, 32 MB; hccl_demo bandwidths turned into times.
    [
        ("all_reduce", False, 5.12),
        ("reduce_scatter", False, 2.93),
        ("all_reduce", True, 3.35),
        ("reduce_scatter", True, 1.78),
    ],
)
def test_dl1(op, peer_direct, expected_ms):
    found = plan(op, 32_000_000, topology.cluster("dl1.24xlarge x4"), peer_direct=peer_direct)
    assert found.algorithm == "hierarchical"
    assert found.predicted_s * 1e3 == pytest.approx(expected_ms, rel=0.03)
    assert not found.extrapolated


def crossovers(op, machine, names):
    """Return the sizes in MB from which each of some algorithms wins, and the order in which they do."""
    cluster, order, sizes = topology.cluster(machine), [], []
    for eighth in range(14 * 8, 31 * 8):
        nbytes = round(2 ** (eighth / 8))
        name = plan(op, nbytes, cluster).algorithm
        if name in names and name not in order:
            order.append(name)
            sizes.append(nbytes / 1e6)
        assert name in names, (op, nbytes)
        assert name == order[-1], "an algorithm wins in one range only"
    return order, sizes


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
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
    assert measured(machine, 64, "all_gather", 1 << 25)
    assert not measured(machine, 64, "all_reduce", 1 << 25)
    assert not measured(machine, 64, "all_gather", 1 << 10)
    assert not measured(machine, 32, "all_gather", 1 << 25)
    assert not measured(topology.cluster("trn2.48xlarge x4"), 64, "all_gather", 1 << 25)


def test_reducers_work_by_the_element():
    machine = topology.cluster("trn2.48xlarge")
    full, half = (parameters(machine, dtype=dtype).reduction_s_per_byte for dtype in ("float32", "bfloat16"))
    assert half == 2 * full
    assert parameters(topology.cluster("trn2.48xlarge", lnc=1)).reduction_s_per_byte == 2 * full


def test_dtypes():
    assert [itemsize_of(name) for name in ("uint8", "float8_e4m3", "bfloat16", "float64", "complex64")] == [
        1,
        1,
        2,
        8,
        8,
    ]
    with pytest.raises(UsageError, match="dtype: 'float99' is unknown"):
        itemsize_of("float99")
