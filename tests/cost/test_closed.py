"""Tables around a switch cost what the closed forms say, to the picosecond."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from overlap.collectives import generate
from overlap.cost import CostParameters, Resolution, cost, on, rounds

from .closed_forms import closed_form
from .star import Star

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
    return int(Resolution().ticks(np.array(duration_s)))


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
        found = cost(on(star, rounds(generate(collective, algorithm, size)), parameters=parameters), nbytes)
        expected_s = closed_form(collective, algorithm, size).total_s(
            nbytes, alpha_s=ALPHA_S, beta_s_per_byte=1 / BYTES_PER_S, gamma_s_per_byte=gamma_s
        )
        assert ticks(found.total_s) == ticks(expected_s), size


@pytest.mark.parametrize("algorithm", ["ring", "mesh", "rdh"])
def test_latency_of_wires_is_alpha_too_where_nothing_is_pipelined(algorithm):
    star = Star(8, latency_s=ALPHA_S, bytes_per_s=BYTES_PER_S)
    found = cost(on(star, rounds(generate("all_reduce", algorithm, 8))), 800_000)
    form = closed_form("all_reduce", algorithm, 8)
    assert ticks(found.total_s) == ticks(form.total_s(800_000, alpha_s=ALPHA_S, beta_s_per_byte=1 / BYTES_PER_S))


def test_a_reducer_that_keeps_up_costs_nothing_more():
    star = Star(4, latency_s=0.0, bytes_per_s=BYTES_PER_S)
    table = rounds(generate("reduce_scatter", "ring", 4))
    for gamma_s, expected_s in ((0.5e-9, 3e-3), (1e-9, 3e-3), (4e-9, 12e-3)):
        assert cost(on(star, table, parameters=CostParameters(reduction_s_per_byte=gamma_s)), 4e6).total_s == expected_s


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
    table = rounds(generate("reduce_scatter", "ring", 4))
    for overlaps in (True, False):  # what goes round in pieces is reduced while more arrives, in any case
        placed = on(star, table, parameters=replace(PIECES, reduction_overlaps=overlaps))
        found = cost(placed, 4 * chunk_bytes, explain=True)
        alone_s = 0.0 if overlaps else wire_s  # of the last step
        assert ticks(found.total_s) == ticks(2 * step_s + last_s + alone_s)
        assert ticks(sum(asdict(found.breakdown).values())) == ticks(found.total_s)
    gathers = on(star, rounds(generate("all_gather", "ring", 4)), parameters=PIECES)
    assert ticks(cost(gathers, 4 * chunk_bytes).total_s) == ticks(3 * (delay_s + wire_s))


def test_reducing_starts_after_what_comes_in_one_message_and_behind_gaps_of_several():
    star = Star(4, latency_s=0.0, bytes_per_s=BYTES_PER_S)
    alone, several = (rounds(generate("reduce_scatter", algorithm, 4)) for algorithm in ("rdh", "mesh"))
    assert ticks(cost(on(star, alone, parameters=PIECES), 0).total_s) == ticks(2 * (3e-6 + 5e-6))
    assert ticks(cost(on(star, several, parameters=PIECES), 0).total_s) == ticks(3e-6 + 2 * 1e-6 + 5e-6 - 2 * 1e-6)
