"""One truth: a program over paced wires and its simulation with the same figures of wires agree.

Three of everything: the runtime in real time, of which only results and order can be asserted; the same runtime, byte
by byte over the same paced wires, on the virtual clock, which makes its times exact; and the model.
"""

from functools import cache
from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest

import overlap
from overlap.config import overriding_config
from overlap.runtime.engine.real_engine import RealEngine
from overlap.runtime.world import World
from overlap.simulation.compute_cost import Profile
from overlap.simulation.simulated_backend import SimulatedBackend
from overlap.timeline.spans import Timeline
from transports import LinkSpeed, NeuronLink, Paced

from .programs import PROGRAMS, Work, data_parallel, numbers
from .worlds import MS, mesh, simulate, spans

RANKS = 4
BYTES_PER_S = 1e6
LATENCIES_S = (0.0, 0.002)
TIMEOUT_S = 60.0  # bounds a hang and decides nothing else


def paced(latency_s, **options):
    speed = LinkSpeed(latency_s=latency_s, bandwidth_bytes_per_s=BYTES_PER_S)
    return Paced(NeuronLink(RANKS, **options), links=lambda src, dst: speed)


def wires(latency_s):
    return mesh(RANKS, latency_s=latency_s, bytes_per_s=BYTES_PER_S)


class Emulation(SimulatedBackend):
    """Virtual time in which bytes travel: the engine of real worlds."""

    def make_engine(self, transport, cluster, token, *, algorithm):
        return RealEngine(transport, cluster, token, algorithm=algorithm)


@cache
def emulate(program, latency_s, algorithm=None):
    """Run the runtime itself over paced wires in virtual time; threads are left out, for which arrays are too small."""
    clock, timelines = Emulation(overlap.Virtual(), wires(latency_s)), []

    async def live():
        transport = paced(latency_s, thread_copy_bytes=None)
        async with transport.open():
            world = World(RANKS, wires(latency_s), transport, algorithm=algorithm, backend=clock)
            clock.kernel.on_stall = world.end_deadlocked
            results = await world.run_to_end(program, (Work(real=False),), None)
            timelines.append(world.timeline())
            return results

    return clock.kernel.run(live), timelines[0]


def run_really(program, latency_s):
    timelines: list[Timeline] = []
    with overriding_config(watcher=timelines.append):
        results = overlap.run(
            program, Work(real=True), ranks=RANKS, cluster=wires(latency_s), transport=paced(latency_s),
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
    return results, timelines[0]


def length_ns(timeline):
    return max(span.end_ns for span in timeline.spans) - min(span.start_ns for span in timeline.spans)


def check_order(found, simulated):
    """Compare the order of starts on every lane; what starts in one instant of virtual time has none."""
    lanes, really = (
        sorted({(span.rank, span.lane) for span in timeline.spans if span.kind != "program"})  # a busy machine's turns
        for timeline in (simulated, found)
    )
    assert lanes == really
    for rank, lane in lanes:
        names = [name for name, *_ in spans(found, rank, lane)]
        for _, together in groupby(spans(simulated, rank, lane), itemgetter(1)):
            expected = sorted(name for name, *_ in together)
            assert sorted(names[: len(expected)]) == expected, (rank, lane)
            del names[: len(expected)]
        assert names == [], (rank, lane)


@pytest.mark.parametrize("program", PROGRAMS)
def test_real_and_virtual_time_give_the_same_results_and_order(program):
    results, timeline = run_really(program, 0.0)
    expected, simulated = simulate(program, RANKS, Work(real=False), cluster=wires(0.0))
    assert results == expected
    check_order(timeline, simulated)


# Programs whose operations take turns agree to the nanosecond, or to what a byte in a barrier takes. Where operations
# of which none fills its wires are in flight together, the model lets them mix like fluids, and messages do not.
@pytest.mark.parametrize("algorithm", [None, "ring", "mesh"])
@pytest.mark.parametrize("latency_s", LATENCIES_S)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_model_takes_as_long_as_the_messages(program, latency_s, algorithm):
    results, timeline = emulate(program, latency_s, algorithm)
    expected, simulated = simulate(
        program, RANKS, Work(real=False), cluster=wires(latency_s), algorithm=algorithm
    )  # fmt: skip
    assert results == expected
    check_order(timeline, simulated)
    assert length_ns(simulated) == pytest.approx(length_ns(timeline), rel=0.05)


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_latency_they_agree_exactly(program):
    emulated, simulated = emulate(program, 0.0)[1], simulate(program, RANKS, Work(real=False), cluster=wires(0.0))[1]
    of_a_barrier_ns = 6000 if program.__name__ == "rooted" else 0
    assert 0 <= length_ns(emulated) - length_ns(simulated) <= of_a_barrier_ns


@pytest.mark.slow
def test_both_choose_the_same_algorithms():
    def algorithms(timeline):
        return {(span.info.op, span.info.algorithm) for span in timeline.spans if span.info}

    for program in PROGRAMS:
        emulated, simulated = emulate(program, 0.002)[1], simulate(program, RANKS, Work(real=False),
                                                                   cluster=wires(0.002))[1]  # fmt: skip
        assert algorithms(simulated) - {("send/recv", "direct")} == algorithms(emulated) - {("send/recv", "mesh")}


def test_a_real_trace_replayed(tmp_path):
    """Computes take what the trace says, whatever the program states; wires what was measured, here what was set."""
    trace = tmp_path / "real.json"
    results = overlap.run(
        data_parallel, Work(real=True), ranks=RANKS, cluster=wires(0.0), transport=paced(0.0), trace=trace,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    profile = Profile.read(trace)
    again, simulated = simulate(data_parallel, RANKS, Work(real=False), cluster=wires(0.0), profile=profile)
    assert again == results
    computes = [span for span in simulated.for_rank(0) if span.kind == "compute"]
    assert {span.name: span.duration_ns for span in computes} == profile.median_ns
    # Layers take at least 15 ms each, which hides all but the last reduction, of two times 6 ms.
    last = [span for span in computes if span.name == "backward 3"][-1]
    reduced = [span for span in simulated.for_rank(0) if span.name == "gradient 3"][-1]
    assert (reduced.start_ns, reduced.info.met_ns, reduced.info.transfer_ns) == (last.end_ns, last.end_ns, 12 * MS)


@pytest.mark.parametrize("latency_s", [0.002, 0.02])
@pytest.mark.parametrize("algorithm", ["one_shot", "recursive_doubling"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_operations_in_flight_wait_for_wires_only(algorithm, count, latency_s):
    """While the bytes of one are under way, those of the next are on the wire."""

    async def program(rank, work):
        pending = [rank.all_reduce(numbers(rank.rank)) for _ in range(count)]
        for each in pending:
            await each

    _, emulated = emulate(program, latency_s, algorithm)
    _, simulated = simulate(program, RANKS, Work(real=False), cluster=wires(latency_s), algorithm=algorithm)
    assert length_ns(simulated) == length_ns(emulated)


@pytest.mark.parametrize("algorithm", ["rdh", "swing", "kangaring"])
def test_messages_to_one_peer_do_not_wait_for_each_other_to_arrive(algorithm):
    """In their last step ranks hand on what they had and what they have just received."""

    async def program(rank, work):
        await rank.all_reduce(numbers(rank.rank))

    _, emulated = emulate(program, 0.02, algorithm)
    _, simulated = simulate(program, RANKS, Work(real=False), cluster=wires(0.02), algorithm=algorithm)
    assert length_ns(simulated) == pytest.approx(length_ns(emulated), rel=0.05)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        ("broadcast", "binary_tree"),
        ("all_reduce", "double_binary_tree"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("broadcast", "chain"),
                ("all_reduce", "chain"),
                ("all_reduce", "binary_tree"),
                ("broadcast", "double_binary_tree"),
            )
        ),
    ],
)
def test_trees_take_what_the_runtime_takes_on_wires_of_their_own(collective, algorithm):
    """A rank sends to both its children at once, and one of two trees does not wait for the other."""

    async def program(rank, work):
        await getattr(rank, collective)(np.ones(1 << 12, np.float32))  # as many in each slice of each tree

    for latency_s in LATENCIES_S:
        _, emulated = emulate(program, latency_s, algorithm)
        _, simulated = simulate(program, RANKS, Work(real=False), cluster=wires(latency_s), algorithm=algorithm)
        assert length_ns(simulated) == length_ns(emulated)
