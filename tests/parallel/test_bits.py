"""What may change when things happen changes no bit: order, bounds, how far a program is ahead."""

import numpy as np
import pytest

import overlap
from overlap import parallel

from ..core.companies import by_sockets, run_far
from ..core.worlds import TIMEOUT_S
from .programs import train, weights

STEPS = 50


async def digest(rank, **options):
    """Train for `STEPS` steps and return all bits of all weights."""
    bound = options.pop("bound", False)

    def make(rank):
        params = weights(dtype=np.float32)
        return parallel.DataParallel(rank, params, optimizer=parallel.Adam(1e-2), **options)

    found = await train(rank, make, STEPS, dtype=np.float32, bound=bound)
    return b"".join(w.tobytes() for w in found.values())


def in_one_process(ranks=4, **options):
    async def main(rank):
        return await digest(rank, **options)

    bits = overlap.run(main, ranks=ranks, timeout_s=TIMEOUT_S)
    assert len(set(bits)) == 1
    return bits[0]


def over_sockets(nodes=2, ranks=2, **options):
    async def main(rank):
        return await digest(rank, **options)

    bits = set(run_far(main, nodes, ranks, wires=by_sockets))
    assert len(bits) == 1
    return bits.pop()


CHANGES = [{"order": "fifo"}, {"in_flight": 1}, {"ahead": 0, "bound": True}, {"rebuild_buckets": False}]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_after_fifty_steps_nothing_has_changed_in_one_process(change):
    assert in_one_process(bucket_bytes=300, **change) == in_one_process(bucket_bytes=300)


@pytest.mark.slow
def test_after_fifty_steps_nothing_has_changed_between_nodes():
    fifo = over_sockets(bucket_bytes=300, order="fifo", in_flight=1, ahead=0, bound=True)
    assert over_sockets(bucket_bytes=300) == fifo
