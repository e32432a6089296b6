"""A fabric on the kernel's time: what begins in one instant begins together, whatever the order of the calls."""

import random

import numpy as np
import pytest
import trio

import topology
from overlap.cost.select import plan
from overlap.simulation import Conditions, EventOrder, FabricDriver, Kernel, SimulatedFabric

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
            traffic.begin(fabric.collective(key, "all_reduce", option, NBYTES, range(32), arrivals[key]), done)

    def done(reached):
        told.append((kernel.now_ns, reached.transfer.key, reached.positions.tolist(), reached.last))
        if reached.last:
            events[reached.transfer.key].set()

    counts, events = {}, {}

    async def rank(number):
        jitter = conditions.jitter_of(number)
        for step in range(3):
            await kernel.sleep_until(kernel.now_ns + jitter.compute_ns(1_000_000), rank=number)
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
        fabric.collective((n,), "all_reduce", plan("all_reduce", NBYTES, RING).option, NBYTES, range(32),
                          np.zeros(32, np.int64)) for n in (0, 1)
    ]  # fmt: skip
    fabric.start(0, both)
    together_ns = 0
    while (next_ns := fabric.update_rates(together_ns)) is not None:
        together_ns = next_ns
        fabric.advance(together_ns)
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
    traffic, started, real_start = FabricDriver(kernel, fabric), [], fabric.start

    def start(now_ns, transfers):
        started.append((now_ns, [each.key for each in transfers]))
        real_start(now_ns, transfers)

    monkeypatch.setattr(fabric, "start", start)

    def begin(number):
        traffic.begin(fabric.message((number,), 0, 1, 8), lambda reached: None)

    async def main():
        for order in (EventOrder.WAKE, EventOrder.TRANSFER, EventOrder.COMPUTE):
            kernel.call_at(500, 0, lambda order=order: begin(int(order)), order=order)
        await kernel.sleep_until(10**9)

    kernel.run(main)
    assert started[0] == (500, [(0,), (1,), (2,)])
    assert [transfers for _, transfers in started[1:]] == [[]] * (len(started) - 1)
