"""With exact=True the weights have the same bits, whatever buckets, order, bound, algorithm and wires."""

import numpy as np
import pytest

import overlap
from overlap import parallel
from transports import NeuronLink, Recording

from .programs import train, weights

PLANS = ({"bucket_bytes": 1}, {"bucket_bytes": 300, "in_flight": 1}, {"bucket_bytes": 1 << 20, "order": "fifo"})


def trained(plan, *, exact=True, steps=12, **options):
    def make(rank):
        params = weights(dtype=np.float32)
        return parallel.DataParallel(rank, params, optimizer=parallel.SGD(0.1), exact=exact, **plan)

    async def main(rank):
        return await train(rank, make, steps, dtype=np.float32)

    found = overlap.run(main, ranks=4, timeout_s=60, **options)
    assert len({tuple(w.tobytes() for w in each.values()) for each in found}) == 1
    return [w.tobytes() for w in found[0].values()]


@pytest.fixture(scope="module")
def reference():
    return trained({})


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_buckets_and_order_do_not_matter(plan, clock, reference):
    algorithm = "ring" if clock == "real" else None
    assert trained(plan, clock=clock, algorithm=algorithm) == reference


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_nor_do_they_after_fifty_steps(plan):
    assert trained(plan, steps=50, algorithm="ring") == trained({}, steps=50)


def test_wires_do_not_matter(reference):
    assert trained({}, transport=Recording(NeuronLink(4))) == reference


def test_without_it_a_ring_adds_up_otherwise(reference):
    """Else nothing above would be shown."""
    assert trained({}, exact=False, algorithm="ring") != reference


def test_a_hook_has_its_own_way():
    async def main(rank):
        with pytest.raises(overlap.UsageError) as caught:
            parallel.DataParallel(rank, weights(), optimizer=parallel.SGD(0.1), exact=True, hook=print)
        assert str(caught.value) == "exact: a hook makes the mean in a way of its own; leave out one of the two"

    overlap.run(main, ranks=1)
