"""Tables around a switch and of two levels cost what the closed forms say."""

from dataclasses import asdict, replace

import numpy as np
import pytest

import topology
from overlap.collectives import generate
from overlap.collectives.placement import place_group
from overlap.collectives.proof import verify
from overlap.cost.clocks import Resolution, cost
from overlap.cost.composed import rooted_options, two_level_options
from overlap.cost.flat import PlanRequest
from overlap.cost.geometry import Geometry
from overlap.cost.parameters import IDEAL, CostParameters
from overlap.cost.pipeline import pipelined_time_s
from overlap.cost.placed import place_rounds
from overlap.cost.rounds import read_rounds

from .closed_forms import apart, closed_form
from .star import Star

# -- two levels: pipelined phases, and that they cost what their table costs -------------------------------------------


def options(name, collective, ranks=None, parameters=IDEAL, root=0, make=two_level_options):
    cluster = topology.cluster(name)
    group = tuple(range(cluster.world_size)) if ranks is None else ranks
    request = PlanRequest(collective=collective, geometry=Geometry(cluster=cluster, ranks=group), root=root)
    placement = place_group(cluster, group)
    return placement, *make(request, placement, parameters)


def test_the_published_point_lies_between_serial_and_overlapped():
    """4 GiB on four nodes of eight B200: 16.1 ms overlapped, 26.25 ms serial, 22.05 ms measured."""
    inside_ms, between_ms = 26.25 - 16.1, 16.1
    times = [pipelined_time_s([inside_ms / q, between_ms / q], q, apart(2)) for q in (1, 2, 3, 1000)]
    assert times == sorted(times, reverse=True)
    assert times[0] == 26.25
    assert times[2] < 22.05 < times[0]
    assert times[3] == pytest.approx(16.1, rel=1e-3)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_in_one_piece_it_costs_what_its_table_costs(collective):
    """Where phases are the same for all ranks; elsewhere a table may start a phase early on some."""
    placement, found, _ = options("trn1.32xlarge x4", collective)
    assert len(found) == 5 * (5 if collective == "all_reduce" else 3)
    same = 0
    for option in found:
        inside, between = option.detail.split(" inside nodes, ")
        table = read_rounds(option.schedule(1))
        whole = cost(place_rounds(placement, table), 128e6).total_s
        phases = sum(part.total_s(128e6) for part in option.parts)
        assert table.steps == option.steps, option.detail
        assert whole <= phases * (1 + 1e-12), option.detail
        # A fold of steps into one, or of whole vectors into slots, is beyond the phases' arithmetic.
        if between.split()[0] in ("mesh", "ring", "rdh") and inside in ("mesh", "rdh"):
            assert whole == pytest.approx(phases, abs=1e-9), option.detail
            same += 1
    assert same == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "collective", ["all_reduce", *(pytest.param(op, marks=pytest.mark.slow) for op in ("reduce_scatter", "all_gather"))]
)
def test_every_table_is_proved_in_slices_too(collective):
    _, found, _ = options("trn1.32xlarge x2", collective, tuple(range(8)) + tuple(range(32, 40)))
    for option in found:
        whole, sliced = option.schedule(1), option.schedule(3)
        verify(whole)
        verify(sliced)
        assert sliced.slots_per_block == 3 * whole.slots_per_block


def test_slices_pay_for_large_vectors_only():
    _, found, _ = options("trn2.48xlarge x4", "all_reduce")
    small, large = ([option.price(nbytes) for option in found] for nbytes in (1e3, 1e9))
    assert {price.slices for price in small} == {1}
    assert {price.slices for price in large} <= {2, 3}


def test_the_parts_of_a_price_add_up():
    _, found, _ = options("trn2.48xlarge x2", "all_reduce", parameters=CostParameters(launch_s=1e-3))
    for option in found[:6]:
        for nbytes in (1e4, 1e8):
            price = option.price(nbytes)
            terms = option.breakdown(nbytes, price.slices)
            total = sum(getattr(terms, name) for name in type(terms).__slots__)
            assert total == pytest.approx(price.total_s, rel=1e-9)
            assert terms.launch_s == 1e-3


@pytest.mark.parametrize(
    ("name", "ranks", "why"),
    [
        ("trn1.32xlarge", None, "all ranks are on one node"),
        ("trn1.32xlarge x2", (0, 32), "nodes have one rank each"),
        ("trn1.32xlarge x2", (0, 1, 32), "nodes have different numbers of ranks"),
        ("trn1.32xlarge x2", (0, 32, 1, 33), "ranks are not numbered node by node"),
    ],
)
def test_groups_that_are_no_nodes(name, ranks, why):
    _, found, rejected = options(name, "all_reduce", ranks)
    assert found == []
    assert [(each.algorithm, each.why) for each in rejected] == [("hierarchical", why)]


def test_a_permute_has_no_levels():
    assert options("trn1.32xlarge x2", "permute")[1:] == ([], [])


HALVES = tuple(range(8)) + tuple(range(32, 40))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("root", [5, *(pytest.param(root, marks=pytest.mark.slow) for root in (0, 11))])
@pytest.mark.parametrize("collective", ["broadcast", "reduce", "all_to_all", "gather", "scatter"])
def test_blocks_and_roots_have_levels_too(collective, root):
    """Their tables are proved, whole and in slices, and take the phases' steps; phases that meet nowhere add up."""
    placement, found, _ = options(
        "trn1.32xlarge x2", collective, HALVES, root=0 if collective == "all_to_all" else root
    )
    assert len(found) == {"broadcast": 60, "reduce": 60, "all_to_all": 9, "gather": 6, "scatter": 6}[collective]
    for option in found:
        table = option.schedule(1)
        verify(table)
        verify(option.schedule(3))
        assert (table.collective, table.size) == (collective, 16)
        asked = read_rounds(table)
        assert asked.steps == option.steps, option.detail
        whole, phases = cost(place_rounds(placement, asked), 128e6).total_s, sum(p.total_s(128e6) for p in option.parts)
        if collective in ("all_to_all", "gather", "scatter"):
            assert whole == pytest.approx(phases, rel=1e-12), option.detail


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_handing_out_and_gathering(collective):
    """A rank that has handed something on need not get it again, so tables are at most as dear as their phases."""
    placement, found, _ = options("trn1.32xlarge", collective, tuple(range(8)), root=3, make=rooted_options)
    assert len(found) == 15
    same = 0
    for option in found:
        table = option.schedule(1)
        verify(table)
        verify(option.schedule(3))
        asked = read_rounds(table)
        assert asked.steps == option.steps
        whole, phases = cost(place_rounds(placement, asked), 128e6).total_s, sum(p.total_s(128e6) for p in option.parts)
        assert whole <= phases * (1 + 1e-12), option.detail
        same += whole == pytest.approx(phases, rel=1e-12)
    assert same


def test_phases_share_what_they_work_on():
    _, found, _ = options("trn1.32xlarge x2", "all_reduce")
    assert [part.share for part in found[0].parts] == [1.0, 1 / 32, 1.0]
    assert np.isclose(found[0].sent_share, 2 * 31 / 32 + 1 / 32)


# -- tables around a switch cost what the closed forms say, to the picosecond ------------------------------------------

ANY = [2, 3, 4, 5, 7, 8, 12, 16]
POWERS = [2, 4, 8, 16, 32]
CASES = [
    *((collective, algorithm, ANY) for collective in ("all_reduce", "reduce_scatter", "all_gather")
      for algorithm in ("ring", "multi_ring", "mesh")),
    *((collective, algorithm, POWERS) for collective in ("all_reduce", "reduce_scatter", "all_gather")
      for algorithm in ("rdh", "bruck")),
    ("all_reduce", "recursive_doubling", POWERS),
    ("all_reduce", "one_shot", ANY),
    ("broadcast", "binomial", POWERS),
    ("broadcast", "mesh", ANY),
    ("broadcast", "chain", ANY),
    ("reduce", "binomial", POWERS),
    ("all_to_all", "mesh", ANY),
    ("all_to_all", "pairwise", ANY),
    ("all_to_all", "bruck", POWERS),
    ("gather", "binomial", POWERS),
    ("scatter", "binomial", POWERS),
]  # fmt: skip

ALPHA_S, BYTES_PER_S, GAMMA_S = 3e-6, 1e9, 2e-9


def ticks(duration_s):
    return int(Resolution().to_ticks(np.array(duration_s)))


@pytest.mark.parametrize(("collective", "algorithm", "sizes"), CASES)
@pytest.mark.parametrize("gamma_s", [0.0, GAMMA_S])
def test_equal_to_the_closed_form(collective, algorithm, sizes, gamma_s):
    for size in sizes:
        nbytes = 96_000 * size
        # Alpha keeps the sender busy, as in Hockney's model: so pipelines pay it for every slice.
        parameters = CostParameters(
            start_s=(("ethernet", ALPHA_S),), reduction_s_per_byte=gamma_s, reduction_overlaps=False
        )
        star = Star(size, latency_s=0.0, bytes_per_s=BYTES_PER_S)
        found = cost(
            place_rounds(star, read_rounds(generate(collective, algorithm, size)), parameters=parameters), nbytes
        )
        expected_s = closed_form(collective, algorithm, size).total_s(
            nbytes, alpha_s=ALPHA_S, beta_s_per_byte=1 / BYTES_PER_S, gamma_s_per_byte=gamma_s
        )
        assert ticks(found.total_s) == ticks(expected_s), size


@pytest.mark.parametrize("algorithm", ["ring", "mesh", "rdh"])
def test_latency_of_wires_is_alpha_too_where_nothing_is_pipelined(algorithm):
    star = Star(8, latency_s=ALPHA_S, bytes_per_s=BYTES_PER_S)
    found = cost(place_rounds(star, read_rounds(generate("all_reduce", algorithm, 8))), 800_000)
    form = closed_form("all_reduce", algorithm, 8)
    assert ticks(found.total_s) == ticks(form.total_s(800_000, alpha_s=ALPHA_S, beta_s_per_byte=1 / BYTES_PER_S))


def test_a_reducer_that_keeps_up_costs_nothing_more():
    star = Star(4, latency_s=0.0, bytes_per_s=BYTES_PER_S)
    table = read_rounds(generate("reduce_scatter", "ring", 4))
    for gamma_s, expected_s in ((0.5e-9, 3e-3), (1e-9, 3e-3), (4e-9, 12e-3)):
        assert (
            cost(place_rounds(star, table, parameters=CostParameters(reduction_s_per_byte=gamma_s)), 4e6).total_s
            == expected_s
        )


PIECES = CostParameters(
    start_s=(("ethernet", 3e-6),), gap_s=(("ethernet", 1e-6),), reduce_s=(("ethernet", 5e-6),),
    reduction_s_per_byte=2e-9, chunk_pieces=2,
)  # fmt: skip


@pytest.mark.parametrize("chunk_bytes", [1000, 6000, 100_000])
def test_a_ring_that_reduces_in_pieces_hides_starts_and_latencies_behind_bytes(chunk_bytes):
    """Half of a chunk is on the wire while the other half is reduced; the last step has nothing to hide behind."""
    star = Star(4, latency_s=4e-6, bytes_per_s=BYTES_PER_S)
    wire_s, reducing_s, delay_s = chunk_bytes / BYTES_PER_S, 2e-9 * chunk_bytes, 3e-6 + 4e-6
    step_s = max(reducing_s, delay_s + 1e-6 + (wire_s + reducing_s) / 2)
    last_s = delay_s + reducing_s + 5e-6
    table = read_rounds(generate("reduce_scatter", "ring", 4))
    for overlaps in (True, False):  # what goes round in pieces is reduced while more arrives, in any case
        placed = place_rounds(star, table, parameters=replace(PIECES, reduction_overlaps=overlaps))
        found = cost(placed, 4 * chunk_bytes, explain=True)
        alone_s = 0.0 if overlaps else wire_s  # of the last step
        assert ticks(found.total_s) == ticks(2 * step_s + last_s + alone_s)
        assert ticks(sum(asdict(found.breakdown).values())) == ticks(found.total_s)
    gathers = place_rounds(star, read_rounds(generate("all_gather", "ring", 4)), parameters=PIECES)
    assert ticks(cost(gathers, 4 * chunk_bytes).total_s) == ticks(3 * (delay_s + wire_s))


def test_reducing_starts_after_what_comes_in_one_message_and_behind_gaps_of_several():
    star = Star(4, latency_s=0.0, bytes_per_s=BYTES_PER_S)
    alone, several = (read_rounds(generate("reduce_scatter", algorithm, 4)) for algorithm in ("rdh", "mesh"))
    assert ticks(cost(place_rounds(star, alone, parameters=PIECES), 0).total_s) == ticks(2 * (3e-6 + 5e-6))
    assert ticks(cost(place_rounds(star, several, parameters=PIECES), 0).total_s) == ticks(
        3e-6 + 2 * 1e-6 + 5e-6 - 2 * 1e-6
    )
