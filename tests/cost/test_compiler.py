"""The compiler of the runtime: what is chosen, and what is requested_algorithm on."""

import numpy as np
import pytest
import trio

import topology
from overlap.collectives.call import call
from overlap.runtime.engine.compiler import Compiler, cluster_for_prices
from overlap.runtime.engine.real_engine import RealEngine
from transports import NeuronLink, Router, Transport, nearest
from transports import efa as sockets
from transports.factory import Bootstrap

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


def everything_is_alike(name, own):
    return [own]


def transports(placement):
    """Return the transports of process 0: by sockets alone, and by memory where there is any."""
    bootstrap = Bootstrap(member=0, placement=placement, secret=b"of this test", exchange=everything_is_alike, job="")
    return [Router([NeuronLink(list(placement[0])), make(bootstrap)]) for make in (sockets.factory, nearest.factory)]


def chosen(transport: Transport, elements: int) -> str:
    """Return the algorithm of an all_reduce of the plain machine, in a world whose processes a transport joins."""

    async def choose() -> str:
        cluster = topology.cluster("local", ranks=2)
        engine = RealEngine(transport, cluster, trio.lowlevel.current_trio_token(), algorithm=None)
        asked = call("all_reduce", "sum", FLOAT32, (elements,), 2)
        return Compiler(engine.compiler.cluster, None).compile(asked, (0, 1), 0).schedule.algorithm

    return trio.run(choose)


def test_processes_of_one_host_choose_by_the_price_of_the_sockets_that_join_them():
    alone, near = transports(((0,), (1,)))
    assert [chosen(each, 1 << 18) for each in (alone, near)] == ["ring", "recursive_doubling"]
    asked = call("all_reduce", "sum", FLOAT32, (1 << 18,), 2)
    two_hosts = Compiler(topology.cluster("local x2", ranks=2), None).compile(asked, (0, 1), 0)
    assert two_hosts.schedule.algorithm == "ring"


@pytest.mark.parametrize(
    ("name", "ranks", "processes", "expected"),
    [
        ("local", 4, ((0, 1), (2, 3)), "local x2"),
        ("local x2", 4, ((0,), (1,), (2,), (3,)), "local x4"),
        ("local x2", 4, ((0, 1), (2, 3)), "local x2"),
        ("local", 3, ((0, 1), (2,)), "local"),  # nodes have equally many ranks, in their order
        ("local", 2, ((1,), (0,)), "local"),
        ("local", 2, (), "local"),
        ("trn1.32xlarge", 2, ((0,), (1,)), "trn1.32xlarge"),  # a machine that the program insists on
    ],
)
def test_processes_that_sockets_join_are_nodes_of_this_computer_alone(name, ranks, processes, expected):
    cluster = cluster_for_prices(topology.cluster(name, ranks=ranks), processes)
    assert (cluster.name, cluster.world_size) == (expected, ranks)
