"""What computes cost: stated, by the roofline, or as recorded."""

from math import inf, nan

import pytest

import topology
from overlap.errors import UsageError
from overlap.simulation import ComputeCosts, Profile, Roofline
from overlap.timeline.files.trace import write_trace
from overlap.timeline.span import Span
from overlap.timeline.spans import Timeline
from tests.errors import error_of

TRN2 = topology.cluster("trn2.48xlarge")
COSTS = ComputeCosts(roofline=Roofline.of(TRN2))


def span(name, duration_ns, rank=0, kind="compute"):
    return Span(rank=rank, kind=kind, lane=kind, name=name, start_ns=5, end_ns=5 + duration_ns)


def timeline(*spans):
    return Timeline(spans=list(spans), world_size=2)


def test_stated_seconds():
    assert COSTS.duration_ns("f", seconds=0.1) == (100_000_000, "seconds")
    assert COSTS.duration_ns("f", seconds=0) == (0, "seconds")
    assert COSTS.duration_ns("f", seconds=1.5e-9, flops=1e15) == (2, "seconds")


def test_the_roofline_takes_the_longer_one():
    # A logical core of trn2 is a quarter of a chip: 667 Tflop/s and 2.9 TB/s in all.
    assert COSTS.duration_ns("f", flops=667e9 / 4) == (1_000_000, "flops")
    assert COSTS.duration_ns("f", bytes_moved=2.9e9 / 4) == (1_000_000, "memory")
    assert COSTS.duration_ns("f", flops=667e9 / 4, bytes_moved=2.9e9 / 2) == (2_000_000, "memory")
    assert COSTS.duration_ns("f", flops=667e9, bytes_moved=2.9e9 / 2) == (4_000_000, "flops")
    assert COSTS.duration_ns("f", flops=0) == (0, "flops")


def test_efficiencies_and_dtypes():
    half = Roofline.of(TRN2, dtype="float32", efficiency=0.5, memory_efficiency=0.25)
    costs = ComputeCosts(roofline=half)
    assert costs.duration_ns("f", flops=181e9 / 4) == (2_000_000, "flops")
    assert costs.duration_ns("f", bytes_moved=2.9e9 / 4) == (4_000_000, "memory")
    assert Roofline.of(TRN2, dtype="bfloat16").flops_per_s == Roofline.of(TRN2, dtype="bf16").flops_per_s
    with pytest.raises(
        UsageError, match="no peak is known for 'int7' on Trainium2; known are float32, float16, bfloat16"
    ):
        Roofline.of(TRN2, dtype="int7")
    for efficiency in (0, 1.01, nan):
        with pytest.raises(UsageError, match=r"^efficiency: expected more than 0, at most 1"):
            Roofline.of(TRN2, efficiency=efficiency)


def test_a_machine_without_figures():
    costs = ComputeCosts(roofline=Roofline.of(topology.cluster("local", ranks=2)))
    assert costs.duration_ns("f", seconds=1e-3) == (1_000_000, "seconds")
    assert str(error_of(UsageError, costs.duration_ns, "f", flops=1e9)) == (
        "flops: compute 'f' states 1e+09, but CPU core has no known rate; state seconds=, or name a machine "
        'that has one: cluster="trn2.48xlarge"'
    )
    assert costs.duration_ns("f", bytes_moved=25e3) == (1_000, "memory"), "its memory is that of this computer"


@pytest.mark.parametrize("amount", [-1, -1e-9, nan, inf, True, "3", [3.0]])
@pytest.mark.parametrize("what", ["seconds", "flops", "bytes_moved"])
def test_amounts_that_cannot_be_meant(what, amount):
    with pytest.raises(UsageError, match=f"^{what}: compute 'backward' needs a finite number, 0 or more"):
        COSTS.duration_ns("backward", **{what: amount})


def test_no_cost_names_the_compute():
    with pytest.raises(
        UsageError, match="compute 'backward' has no cost on the virtual clock; pass seconds=, or flops="
    ):
        COSTS.duration_ns("backward")
    computer = ComputeCosts(roofline=Roofline.of(topology.cluster("local", ranks=2)))
    with pytest.raises(UsageError, match="has no cost on the virtual clock; pass seconds=, or a profile of a real run"):
        computer.duration_ns("backward")


def test_a_profile_has_medians_of_all_ranks():
    found = Profile.of(timeline(span("f", 30), span("f", 10), span("f", 90, rank=1), span("g", 7), span("g", 9)))
    assert found.median_ns == {"f": 30, "g": 7}


def test_a_profile_wins_where_it_knows_the_name(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(timeline(span("f", 30), span("h", 5, kind="comm")), path)
    costs = ComputeCosts(roofline=COSTS.roofline, profile=Profile.read(path))
    assert costs.duration_ns("f") == (30, "seconds")
    assert costs.duration_ns("f", seconds=1) == (30, "seconds")
    assert costs.duration_ns("h", seconds=1) == (10**9, "seconds")
    with pytest.raises(UsageError, match=r"compute 'h' has no cost .* knows f$"):
        costs.duration_ns("h")


def test_a_profile_needs_computes(tmp_path):
    with pytest.raises(UsageError, match="no compute in a timeline"):
        Profile.of(timeline(span("f", 30, kind="comm")))
    with pytest.raises(UsageError, match="cannot be read"):
        Profile.read(tmp_path / "missing.json")
