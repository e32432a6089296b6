"""The compiler of the runtime: what is chosen, and what is requested_algorithm on."""

import numpy as np
import pytest

import topology
from overlap.collectives.call import call
from overlap.runtime.engine.compiler import Compiler

FLOAT32 = np.dtype(np.float32)


def compiled(name, algorithm, kind, ranks, *, root=0, elements=1 << 10):
    compiler = Compiler(topology.cluster(name), algorithm)
    op = "sum" if kind in ("all_reduce", "reduce", "reduce_scatter") else None
    asked = call(kind, op, FLOAT32, (elements * ranks,), ranks, root)
    return compiler.compile(asked, tuple(range(ranks)), 0).schedule


def test_what_is_insisted_on_is_fitted_to_the_machine():
    schedule = compiled("trn2.48xlarge", "kangaring", "all_reduce", 64)
    assert schedule.algorithm == "kangaring"
    assert schedule.channels == 8  # four rings of two cycles
    assert compiled("trn2.48xlarge", "rdh", "all_gather", 64).slots_per_block == 4  # the axes of 16 devices


def test_where_it_does_not_fit_the_wires_its_plain_form_runs():
    schedule = compiled("trn1.32xlarge", "swing", "all_reduce", 8)
    assert (schedule.algorithm, schedule.size) == ("swing", 8)
    assert compiled("trn1.32xlarge", "hierarchical", "broadcast", 8, root=3).algorithm == "hierarchical"


def test_levels_are_the_nodes():
    schedule = compiled("trn1.32xlarge x2", "hierarchical", "broadcast", 64, root=40)
    crosses = schedule.src // 32 != schedule.dst // 32
    assert (schedule.src % 32 == schedule.dst % 32)[crosses].all()


@pytest.mark.parametrize("kind", ["all_reduce", "gather"])
def test_where_there_is_no_such_algorithm_the_cheapest_runs(kind):
    chosen = compiled("trn1.32xlarge", "pairwise", kind, 8)
    assert chosen.algorithm == compiled("trn1.32xlarge", None, kind, 8).algorithm


def test_a_program_is_compiled_where_the_short_cut_would_be_chosen():
    cluster = topology.cluster("local", ranks=4)
    asked = call("all_reduce", "sum", FLOAT32, (8,), 4)
    compiled = Compiler(cluster, None).compile(asked, (0, 1, 2, 3), 2)
    schedule, program = compiled.schedule, compiled.program
    assert schedule.size == 4
    assert program.rank == 2
    odd = call("all_reduce", "sum", FLOAT32, (8,), 3)
    assert Compiler(cluster, "swing").compile(odd, (0, 1, 2), 0).schedule.algorithm != "swing"


def test_long_messages_between_hosts_travel_in_slices():
    cluster = topology.cluster("local x2", ranks=2)

    def slots(elements, *, far):
        asked = call("all_reduce", "sum", FLOAT32, (elements,), 2)
        return Compiler(cluster, "ring", far=lambda _: far).compile(asked, (0, 1), 0).schedule.slots_per_block

    assert [slots(1 << 20, far=far) for far in (False, True)] == [2, 8]
    assert slots(1 << 10, far=True) == 2
