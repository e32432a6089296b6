"""Tables around a switch cost what the closed forms say, to the picosecond."""

import numpy as np
import pytest

from overlap.collectives import generate
from overlap.collectives.cost import Parameters, Resolution, Star, cost, on, rounds
from overlap.errors import UsageError

from .closed_forms import best_slices, closed_form

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
        parameters = Parameters(
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
        assert cost(on(star, table, parameters=Parameters(reduction_s_per_byte=gamma_s)), 4e6).total_s == expected_s


def test_best_slices_are_best():
    hops, nbytes, alpha_s, beta_s = 7, 1e6, 1e-6, 1e-9

    def pipeline_s(slices):
        return (hops + slices - 1) * (alpha_s + beta_s * nbytes / slices)

    best = best_slices(hops, nbytes, alpha_s=alpha_s, beta_s_per_byte=beta_s)
    assert min(range(1, 200), key=pipeline_s) == round(best)


def test_unknown_form():
    with pytest.raises(UsageError, match="no closed form for all_gather 'one_shot'; known are ring, "):
        closed_form("all_gather", "one_shot", 4)
