"""The fabric: alone, what the cost model says; together, shares; what begins in one instant begins together."""

import random

import numpy as np
import pytest
import trio

import topology
from overlap.cost.clocks import cost
from overlap.cost.parameters import cost_parameters
from overlap.cost.select import plan
from overlap.simulation.conditions import Conditions, Interference
from overlap.simulation.demand import Resources
from overlap.simulation.fabric import SimulatedFabric
from overlap.simulation.kernel import EventOrder, Kernel
from overlap.simulation.traffic import FabricDriver

# -- collectives and messages in flight: alone they take what the cost model says, together they share -----------------

TRN1 = topology.cluster("trn1.32xlarge")


def option(op, nbytes, cluster=TRN1, ranks=None, algorithm=None):
    return plan(op, nbytes, cluster, ranks, algorithm=algorithm).option


def play(fabric, *starts):
    """Start transfers given as (start_ns, transfer); return when each position of each was done, by its key."""
    done = {each.key: np.full(len(each.ranks), -1) for _, each in starts}
    todo, now_ns = sorted({time for time, _ in starts}), 0
    while True:
        next_ns = fabric.update_rates(now_ns)
        due = [time for time in (next_ns, *todo[:1]) if time is not None]
        if not due:
            return {key: ends.tolist() for key, ends in done.items()}
        now_ns = min(due)
        for reached in fabric.advance_to(now_ns):
            done[reached.transfer.key][reached.positions] = now_ns
        if todo[:1] == [now_ns]:
            del todo[0]
            fabric.start_transfers(now_ns, [each for time, each in starts if time == now_ns])


def stretch(ends, *transfers):
    """Return the time that transfers took over what they take alone."""
    taken_ns = sum(max(ends[each.key]) - each.started_ns for each in transfers)
    return taken_ns / sum(each.alone_ns for each in transfers)


def collective(fabric, op, nbytes, ranks=None, *, key=(0,), arrivals_ns=None, algorithm=None):
    ranks = range(fabric.cluster.world_size) if ranks is None else ranks
    arrivals_ns = np.zeros(len(ranks), np.int64) if arrivals_ns is None else arrivals_ns
    found = option(op, nbytes, fabric.cluster, tuple(ranks), algorithm)
    return fabric.collective_transfer(key, op, found, nbytes, ranks, arrivals_ns)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn1.32xlarge x4", "trn2.48xlarge", "dl1.24xlarge x4"])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"])
@pytest.mark.parametrize("nbytes", [4096, 1 << 26])
def test_alone_it_takes_what_was_planned(name, op, nbytes):
    cluster = topology.cluster(name)
    fabric = SimulatedFabric(cluster)
    transfer = collective(fabric, op, nbytes)
    ends = play(fabric, (0, transfer))
    assert max(ends[0,]) == round(plan(op, nbytes, cluster).predicted_s * 1e9)
    assert min(ends[0,]) >= 0
    assert stretch(ends, transfer) == 1


@pytest.mark.parametrize("algorithm", ["ring", "mesh", "kangaring"])
def test_alone_every_rank_is_done_when_the_cost_model_says(algorithm):
    late_ns = np.arange(32) * 1000 % 7001
    fabric = SimulatedFabric(TRN1)
    ends = play(fabric, (7001, collective(fabric, "all_gather", 1 << 20, arrivals_ns=late_ns + 1,
                                                          algorithm=algorithm)))[0,]  # fmt: skip
    placed = option("all_gather", 1 << 20, algorithm=algorithm).parts[0].placed
    finish_s = cost(placed, 1 << 20, arrivals_s=late_ns / 1e9).finish_s
    assert ends == (np.rint(finish_s * 1e9).astype(np.int64) + 1).tolist()


def test_phases_come_after_the_last_rank():
    cluster = topology.cluster("trn1.32xlarge x4")
    late_ns = np.zeros(128, np.int64)
    late_ns[5] = 1_000_000
    fabric = SimulatedFabric(cluster)
    ends = play(fabric, (1_000_000, collective(fabric, "all_reduce", 1 << 24, arrivals_ns=late_ns)))[0,]
    planned_ns = round(plan("all_reduce", 1 << 24, cluster).predicted_s * 1e9)
    assert min(ends) > 1_000_000
    assert 1_000_000 + planned_ns * 0.9 < max(ends) <= 1_000_000 + planned_ns


def test_nobody_is_done_before_the_last_rank_has_come():
    late_ns = np.zeros(32, np.int64)
    late_ns[31] = 10**9
    fabric = SimulatedFabric(TRN1)
    transfer = collective(fabric, "broadcast", 4096, arrivals_ns=late_ns)
    assert transfer.marks_ns[0] == 0
    assert min(play(fabric, (10**9, transfer))[0,]) == 10**9


def test_it_is_costed_once_for_each_skew():
    fabric, skewed = SimulatedFabric(TRN1), np.zeros(32, np.int64)
    skewed[3] = 12_345
    together, later, late = (
        collective(fabric, "all_gather", 4096, arrivals_ns=arrivals_ns, algorithm="ring")
        for arrivals_ns in (np.zeros(32, np.int64), np.full(32, 777), skewed)
    )
    assert later.demand is together.demand
    assert late.marks_ns != together.marks_ns


def test_two_at_once_share_wires():
    fabric = SimulatedFabric(TRN1)
    one, two = (collective(fabric, "all_gather", 1 << 28, key=(n,), algorithm="ring") for n in (1, 2))
    ends = play(fabric, (0, one), (0, two))
    assert len(one.sections) == 2  # the first step also copies a rank's own part
    together_ns = crowded_ns(one.demand, 2)
    assert together_ns > 1.9 * one.alone_ns
    assert max(ends[1,]) == max(ends[2,]) == pytest.approx(together_ns, abs=1)
    assert stretch(ends, one, two) == pytest.approx(together_ns / one.alone_ns, rel=1e-6)


def crowded_ns(demand, count):
    """Return what so many operations take at once that need the same: each section as much longer as they lack."""
    lengths_ns = np.diff(demand.ends_ns, prepend=0)
    return float(sum(np.maximum(1, count * demand.shares.max(axis=1)) * lengths_ns))


def test_groups_with_wires_of_their_own_do_not():
    cluster = topology.cluster("trn1.32xlarge x2")
    fabric = SimulatedFabric(cluster)
    first, second = tuple(range(32)), tuple(range(32, 64))
    both = [
        collective(fabric, "all_gather", 1 << 28, ranks, key=(n,), algorithm="ring")
        for n, ranks in enumerate((first, second))
    ]
    ends = play(fabric, *((0, each) for each in both))
    assert ends[0,] == ends[1,]
    assert stretch(ends, *both) == 1


def test_collective_processors_are_shared_out():
    """A rank of trn1 has three: of six small operations in flight each gets on at half its speed, while it can."""
    fabric = SimulatedFabric(TRN1)
    assert TRN1.cc_cores_per_rank == 3
    six = [collective(fabric, "all_reduce", 256, key=(n,)) for n in range(6)]
    ends = play(fabric, *((0, each) for each in six))
    assert max(six[0].sections[0].needs.values()) == pytest.approx(1 / 3, rel=1e-4)
    together_ns = crowded_ns(six[0].demand, 6)
    assert [max(each) for each in ends.values()] == [pytest.approx(together_ns, abs=1)] * 6


def test_a_message_takes_latency_and_bytes():
    cluster = topology.cluster("local", ranks=4, nodes=2)
    fabric = SimulatedFabric(cluster)
    ends = [play(fabric, (0, fabric.message_transfer((n,), 0, 3, n)))[n,] for n in (10**3, 10**9)]
    wire = cluster.link("efa")
    # Both ends are done when it is there; the sender a latency earlier.
    for nbytes, (sent, arrived) in zip((10**3, 10**9), ends, strict=True):
        assert arrived - sent == round(wire.latency_s.value * 1e9)
        assert sent >= nbytes / wire.bandwidth_bytes_per_s.value * 1e9
    assert ends[1][1] - ends[0][1] == pytest.approx((10**9 - 10**3) / wire.bandwidth_bytes_per_s.value * 1e9, abs=1)


def test_messages_share_an_adapter():
    fabric = SimulatedFabric(topology.cluster("local", ranks=4, nodes=2))
    two = [fabric.message_transfer((n,), n, 2 + n, 10**9) for n in (0, 1)]
    apart = play(fabric, (0, two[0]))[0,]
    two[0] = fabric.message_transfer((0,), 0, 2, 10**9)
    together = play(fabric, (0, two[0]), (0, two[1]))
    assert together[0,][1] == together[1,][1]
    nics = 1.99 if fabric.cluster.nic_of(0) == fabric.cluster.nic_of(1) else 1.0
    assert together[0,][1] == pytest.approx(nics * apart[1], rel=0.01)


def test_a_message_to_oneself_is_a_copy():
    fabric = SimulatedFabric(topology.cluster("trn2.48xlarge"))
    sent, received = play(fabric, (0, fabric.message_transfer((0,), 3, 3, 10**9)))[0,]
    rate = fabric.cluster.machine.chip.memory_bytes_per_s.value * cost_parameters(fabric.cluster).memory_efficiency
    assert sent == received == round((cost_parameters(fabric.cluster).launch_s + 2e9 / rate) * 1e9)


def test_no_wire_no_message():
    with pytest.raises(topology.TopologyError):
        SimulatedFabric(topology.cluster("inf2.48xlarge x2")).message_transfer((0,), 0, 30, 8)


def test_computes_and_communication_slow_each_other_down():
    fabric = SimulatedFabric(
        TRN1, interference=Interference(compute={"flops": 2.0}, communication={"all_gather": 1.25})
    )
    transfer = collective(fabric, "all_gather", 1 << 20)
    alone_ns = transfer.alone_ns
    compute = fabric.compute_transfer((1,), "flops", 7, alone_ns)
    elsewhere = fabric.compute_transfer((2,), "memory", 8, 10)
    ends = play(fabric, (0, transfer), (0, compute), (0, elsewhere))
    # The compute outlasts the collective: at half its speed for 5/4 of the time, then alone.
    assert max(ends[0,]) == round(alone_ns * 1.25)
    assert ends[1,] == [pytest.approx(alone_ns * (1.25 + 1 - 1.25 / 2), abs=1)]
    assert ends[2,] == [10], "no coefficient for its class"


def test_interference_is_off_unless_stated():
    fabric = SimulatedFabric(TRN1)
    transfer = collective(fabric, "all_gather", 1 << 20)
    ends = play(fabric, (0, transfer), (0, fabric.compute_transfer((1,), "flops", 7, 12345)))
    assert ends[1,] == [12345]
    assert max(ends[0,]) == transfer.alone_ns


def test_slow_wires_slow_what_crosses_them():
    def alone_ns(conditions, name="trn1.32xlarge x4", op="all_reduce"):
        fabric = SimulatedFabric(topology.cluster(name), conditions=conditions)
        return max(play(fabric, (0, collective(fabric, op, 1 << 26)))[0,])

    perfect = alone_ns(Conditions())
    assert alone_ns(Conditions(slow_wire_share=1.0)) == perfect, "slow wires with all their bandwidth"
    half = alone_ns(Conditions(slow_wire_share=1.0, slow_wire_factor=0.5))
    assert 1.2 * perfect < half <= 2 * perfect
    some = {seed: alone_ns(Conditions(seed=seed, slow_wire_share=0.05, slow_wire_factor=0.5)) for seed in (1, 2, 1)}
    assert all(perfect < each <= half for each in some.values())
    assert alone_ns(Conditions(seed=1, slow_wire_share=0.05, slow_wire_factor=0.5)) == some[1]


def test_peer_direct_off_takes_longer():
    cluster = topology.cluster("dl1.24xlarge x4")
    ends = []
    for peer_direct in (True, False):
        fabric = SimulatedFabric(cluster, peer_direct=peer_direct)
        ends.append(play(fabric, (0, fabric.message_transfer((0,), 0, 8, 32_000_000)))[0,][1])
    assert ends[1] > ends[0]


def test_resources_are_told_apart():
    resources = Resources(topology.cluster("trn1.32xlarge x2"))
    ranks = np.arange(64)
    memories, cores, wires = (
        resources.memory_numbers(ranks),
        resources.cc_core_numbers(ranks),
        resources.wire_numbers(np.arange(9)),
    )
    numbers = {*memories.tolist()}, {*cores.tolist()}, {*wires.tolist()}
    assert [len(kind) for kind in numbers] == [32, 64, 9]
    assert len(set.union(*numbers)) == 32 + 64 + 9
    assert memories[63] == 31
    of_host = Resources(topology.cluster("local", ranks=4, nodes=2))
    assert of_host.memory_numbers(np.arange(4)).tolist() == [0, 0, 2, 2]


def test_names():
    fabric = SimulatedFabric(TRN1)
    assert repr(fabric) == "<SimulatedFabric of trn1.32xlarge: 0 in flight>"
    assert repr(fabric.compute_transfer((4,), "flops", 1, 10)) == "<Flow (4,): 0 of 1 marks, rate 1>"


# -- A fabric on the kernel's time: what begins in one instant begins together, whatever the order of the calls --------

RING = topology.cluster("trn1.32xlarge")
NBYTES = 1 << 26


def step_times(shuffled, *, jitter=0.0):
    """Let 32 ranks compute and then all-reduce on two streams at once, three times; return who was done when."""
    kernel, fabric = Kernel(), SimulatedFabric(RING)
    traffic, conditions = FabricDriver(kernel, fabric), Conditions(seed=3, jitter=jitter)
    option = plan("all_reduce", NBYTES, RING).option
    arrivals, told = {}, []

    def arrive(key, rank):
        arrivals.setdefault(key, np.zeros(32, np.int64))[rank] = kernel.now_ns
        counts[key] = counts.get(key, 0) + 1
        if counts[key] == 32:
            events[key] = trio.Event()
            traffic.begin_transfer(
                fabric.collective_transfer(key, "all_reduce", option, NBYTES, range(32), arrivals[key]), done
            )

    def done(reached):
        told.append((kernel.now_ns, reached.transfer.key, reached.positions.tolist(), reached.last))
        if reached.last:
            events[reached.transfer.key].set()

    counts, events = {}, {}

    async def rank(number):
        jitter = conditions.jitter_of(number)
        for step in range(3):
            await kernel.sleep_until(kernel.now_ns + jitter.next_compute_ns(1_000_000), rank=number)
            keys = [(step, stream) for stream in ("dp", "tp")]
            for key in shuffled(keys):
                arrive(key, number)
            for key in keys:
                while key not in events:
                    await kernel.sleep_until(kernel.now_ns + 1000)
                await events[key].wait()

    async def main():
        async with trio.open_nursery() as nursery:
            for number in range(32):
                nursery.start_soon(rank, number)

    kernel.run(main)
    assert repr(traffic) == f"<FabricDriver at {kernel.now_ns} ns: 0 in flight>"
    return told


def test_steps_take_what_computes_and_shared_wires_take():
    told = step_times(lambda keys: keys)
    fabric = SimulatedFabric(RING)
    both = [
        fabric.collective_transfer((n,), "all_reduce", plan("all_reduce", NBYTES, RING).option, NBYTES, range(32),
                          np.zeros(32, np.int64)) for n in (0, 1)
    ]  # fmt: skip
    fabric.start_transfers(0, both)
    together_ns = 0
    while (next_ns := fabric.update_rates(together_ns)) is not None:
        together_ns = next_ns
        fabric.advance_to(together_ns)
    assert together_ns > both[0].alone_ns
    expected = [
        ((step + 1) * (1_000_000 + together_ns), (step, stream), [*range(32)], True)
        for step in range(3)
        for stream in ("dp", "tp")
    ]
    assert told == expected


@pytest.mark.slow
def test_the_order_of_calls_does_not_matter():
    shuffle = random.Random(5)
    for jitter in (0.0, 0.05):
        expected = step_times(lambda keys: keys, jitter=jitter)
        assert step_times(lambda keys: keys[::-1], jitter=jitter) == expected
        for _ in range(2):
            assert step_times(lambda keys: shuffle.sample(keys, 2), jitter=jitter) == expected
    assert len(expected) >= 6


def test_what_begins_in_one_instant_begins_together(monkeypatch):
    kernel, fabric = Kernel(), SimulatedFabric(RING)
    traffic, started, real_start = FabricDriver(kernel, fabric), [], fabric.start_transfers

    def start(now_ns, transfers):
        started.append((now_ns, [each.key for each in transfers]))
        real_start(now_ns, transfers)

    monkeypatch.setattr(fabric, "start_transfers", start)

    def begin(number):
        traffic.begin_transfer(fabric.message_transfer((number,), 0, 1, 8), lambda reached: None)

    async def main():
        for order in (EventOrder.WAKE, EventOrder.TRANSFER, EventOrder.COMPUTE):
            kernel.call_at(500, 0, lambda order=order: begin(int(order)), order=order)
        await kernel.sleep_until(10**9)

    kernel.run(main)
    assert started[0] == (500, [(0,), (1,), (2,)])
    assert [transfers for _, transfers in started[1:]] == [[]] * (len(started) - 1)
