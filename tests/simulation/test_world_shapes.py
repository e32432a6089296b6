"""Worlds without data: arrays have a shape and a dtype, and computes a cost that is stated, modelled or recorded."""

from math import inf, nan

import ml_dtypes
import numpy as np
import pytest

import overlap
import topology
from overlap import UsageError, shape_only
from overlap.simulation.compute_cost import ComputeCosts, Profile, Roofline
from overlap.timeline.files.trace import write_trace
from overlap.timeline.span import Span
from overlap.timeline.spans import Timeline
from tests.errors import error_of

from .worlds import KB, MS, now_ns, simulate

# -- worlds without data: arrays have a shape and a dtype, so that any model fits --------------------------------------

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def test_arrays_without_data():
    many = shape_only((70_000_000_000,), BFLOAT16)
    assert (many.shape, many.dtype, many.nbytes) == ((70_000_000_000,), BFLOAT16, 140_000_000_000)
    assert not many.flags.writeable
    assert many[5:7].tolist() == [0, 0]
    assert shape_only((), np.float32).shape == ()
    assert shape_only(3, bool).tolist() == [False] * 3
    assert shape_only((0, 2), "c16").size == 0


@pytest.mark.parametrize(("shape", "dtype"), [((-1,), "f4"), ((2,), object)])
def test_there_are_no_such_arrays(shape, dtype):
    with pytest.raises(UsageError, match=r"^shape_only: expected sides from 0 and a dtype of numbers, got "):
        shape_only(shape, dtype)


@pytest.mark.slow
def test_a_model_of_seventy_billion_parameters():
    layers, parameters = 80, 70_000_000_000 // 80

    async def main(rank):
        pending = []
        for layer in range(layers):
            grad = rank.compute(rank.empty, (parameters,), BFLOAT16, flops=1e15, name=f"backward {layer}")
            pending.append(rank.all_reduce(grad))
        results = [await each for each in pending]
        assert {(result.shape, result.dtype, result.strides) for result in results} == {((parameters,), BFLOAT16, (0,))}
        return now_ns(rank)

    results, timeline = simulate(main, 64, cluster="trn2.48xlarge", shapes_only=True, efficiency=0.5)
    compute_ns = round(1e15 / (667e12 / 4 * 0.5) * 1e9)
    transfers = [span.info.transfer_ns for span in timeline.for_rank(0) if span.info]
    assert results[0] == layers * compute_ns + transfers[-1]
    assert sum(span.info.nbytes for span in timeline.for_rank(0) if span.info) == 140_000_000_000


SHAPES = [
    ("all_reduce", {}, (8, 3), [(8, 3)] * 4),
    ("reduce_scatter", {}, (8, 3), [(2, 3)] * 4),
    ("all_gather", {}, (8, 3), [(32, 3)] * 4),
    ("all_to_all", {}, (8, 3), [(8, 3)] * 4),
    ("permute", {"pairs": [(0, 1)]}, (8, 3), [(8, 3)] * 4),
    ("broadcast", {"root": 1}, (8, 3), [(8, 3)] * 4),
    ("scatter", {"root": 1}, (8, 3), [(2, 3)] * 4),
    ("reduce", {"root": 1}, (8, 3), [None, (8, 3), None, None]),
    ("gather", {"root": 1}, (8, 3), [None, (32, 3), None, None]),
]


@pytest.mark.parametrize("given", ["nothing", "out", "future", "from the root"])
@pytest.mark.parametrize(("kind", "kwargs", "shape", "expected"), SHAPES, ids=[kind for kind, *_ in SHAPES])
def test_results_have_shape_and_dtype(kind, kwargs, shape, expected, given):
    if given == "from the root" and kind not in ("broadcast", "scatter"):
        given = "nothing"

    async def main(rank):
        want, x, more = expected[rank.rank], rank.empty(shape, BFLOAT16), dict(kwargs)
        if given == "out" and want is not None:
            more["out"] = rank.empty(want, BFLOAT16)
        if given == "future":
            x = rank.compute(rank.empty, shape, BFLOAT16, seconds=0.001)
        if given == "from the root" and rank.rank != kwargs["root"]:
            x = None
        result = await getattr(rank, kind)(x, **more)
        assert "out" not in more or result is more["out"]
        return None if result is None else (result.shape, result.dtype)

    results, _ = simulate(main, 4, shapes_only=True)
    assert results == [None if want is None else (want, BFLOAT16) for want in expected]


def test_times_are_those_with_data():
    async def main(rank):
        grads = [rank.compute(rank.empty, (2 * KB,), np.float32, seconds=0.001) for _ in range(3)]
        for total in [rank.all_reduce(grad) for grad in grads]:
            await total
        neighbour = rank.rank ^ 1
        rank.send(rank.empty((KB,), np.uint8), neighbour)
        received = await rank.recv(((KB,), np.uint8), neighbour)
        return received.shape, now_ns(rank)

    results, timeline = simulate(main, 4)
    without, same = simulate(main, 4, shapes_only=True)
    assert results == without
    assert results[0] == ((KB,), 14 * MS)
    assert timeline.spans == same.spans


def test_disagreement_is_noticed_without_data():
    async def main(rank):
        await rank.all_reduce(rank.empty((2 + rank.rank,)))

    with pytest.raises(overlap.RankFailedError, match=r"operation #0 on group 'world' differs"):
        simulate(main, 2, shapes_only=True)


def test_a_result_that_does_not_fit_is_noticed_without_data():
    async def main(rank):
        with pytest.raises(UsageError, match=r"^out: expected float32"):
            rank.all_gather(rank.empty((2,)), out=rank.empty((2,)))

    simulate(main, 2, shapes_only=True)


def test_empty_is_zeros_where_there_is_data():
    async def main(rank):
        x = rank.empty((2, 3))
        x += 1
        return x.dtype.name, x.tolist()

    assert simulate(main, 1)[0] == [("float32", [[1.0] * 3] * 2)]


def test_a_receive_makes_no_data():
    async def main(rank):
        if rank.rank:
            await rank.send(rank.empty(10**12, np.float32), 0)
            return None
        received = await rank.recv(((10**12,), np.float32), 1)
        return received.shape, received.strides

    assert simulate(main, 2, shapes_only=True)[0][0] == ((10**12,), (0,))


def test_a_split_knows_what_ranks_choose():
    async def main(rank):
        once, again = await rank.split(rank.rank % 2, -rank.rank), await rank.split(0 if rank.rank else None)
        return once.ranks, again and again.ranks

    results, _ = simulate(main, 4, shapes_only=True)
    assert results == [((2, 0), None), ((3, 1), (1, 2, 3)), ((2, 0), (1, 2, 3)), ((3, 1), (1, 2, 3))]
    assert results == simulate(main, 4)[0]


# -- what computes cost: stated, by the roofline, or as recorded -------------------------------------------------------

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
