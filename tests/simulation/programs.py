"""Programs that run on either clock: on the real one their computes take the time that they state."""

import threading
from collections.abc import Callable

import numpy as np

import overlap

ELEMENTS = 6000  # 24 kB, which take 24 ms at a byte in a microsecond


class Work:
    """Computes of a stated time.

    Args:
        real: Whether to take it; in virtual time stating it is enough.
    """

    def __init__(self, *, real: bool) -> None:
        self._real = real

    def __call__(self, rank: overlap.Rank, name: str, ms: float, function: Callable[..., object], *args: object):
        def work(*args: object) -> object:
            if self._real:
                threading.Event().wait(ms / 1000)  # the work itself: as long as it is said to be, without a core
            return function(*args)

        return rank.compute(work, *args, name=name, seconds=ms / 1000)


def numbers(value):
    """Return what travels."""
    return np.full(ELEMENTS, value, np.float32)


async def data_parallel(rank, work):
    """Reduce the gradient of one layer while another is computed."""
    total = 0.0
    for step in range(2):
        with rank.step(step):
            grad, pending = None, []
            for layer in range(4):
                grad = work(rank, f"backward {layer}", 15, lambda _, n: numbers(n), grad, rank.rank + layer)
                pending.append(rank.all_reduce(grad, name=f"gradient {layer}"))
            for layer, reduced in enumerate(pending):
                update = work(rank, f"update {layer}", 2, lambda x: float(x[0]), reduced)
                total += await update
    return total


async def urgent_first(rank, work):
    """As above; what the next step needs first is the most urgent."""
    pending = []
    for layer in range(4):
        grad = work(rank, f"backward {layer}", 15, numbers, rank.rank + layer)
        pending.append(rank.all_reduce(grad, priority=-layer, name=f"gradient {layer}"))
    return [float((await each)[0]) for each in reversed(pending)]


async def pipeline(rank, work):
    """Hand micro-batches from rank to rank, faster than the wires carry them."""
    n, out = rank.world_size, []
    for micro in range(4):
        x = rank.recv(((ELEMENTS,), np.float32), rank.rank - 1, tag=micro) if rank.rank else numbers(micro)
        y = work(rank, f"forward {micro}", 10, lambda x: x + 1, x)
        if rank.rank < n - 1:
            rank.send(y, rank.rank + 1, tag=micro)
        else:
            out.append(float((await y)[0]))
    return out


async def tensor_parallel(rank, work):
    """Gather activations among pairs on an urgent stream, reduce gradients of all on another."""
    first = rank.rank // 2 * 2
    tensor, urgent = rank.group([first, first + 1], name="tp"), rank.stream("tp", priority=-1)
    pending = []
    for layer in range(4):
        y = work(rank, f"matmul {layer}", 10, numbers, rank.rank)
        both = tensor.all_gather(y, stream=urgent, name=f"activation {layer}")
        grad = work(rank, f"backward {layer}", 12, lambda x: x[:ELEMENTS] + x[ELEMENTS:], both)
        pending.append(rank.reduce_scatter(grad, name=f"gradient {layer}"))
    return [float((await each)[0]) for each in pending]


async def rooted(rank, work):
    """Use every collective that has a root, and those that have none, some of them on ranks that come late."""
    x = await rank.broadcast(numbers(3) if rank.rank == 1 else None, root=1)
    y = await rank.reduce(await work(rank, "twice", 10, lambda x: 2 * x, x), root=2)
    z = await rank.gather(x, root=0)
    await work(rank, "late", 3 * rank.rank, lambda: None)
    w = await rank.scatter(z, root=0)
    await rank.barrier()
    v = await rank.all_to_all(w + rank.rank)
    p = await rank.permute(v, [(0, 3), (3, 1), (1, 2)])
    return [None if each is None else float(each.sum()) for each in (x, y, z, w, v, p)]


async def experts(rank, work):
    """Send tokens to where their experts are, as many as these want, and back; then share what is left over."""
    n, me = rank.world_size, rank.rank
    chosen = np.array([[500 * ((i + 3 * j) % 4) for j in range(n)] for i in range(n)])
    tokens = await work(rank, "route", 5 + me, lambda: np.full((chosen[me].sum(), 2), me + 1, np.float32))
    there = await rank.all_to_all(tokens, counts=chosen)
    done = await work(rank, "expert", 10, lambda x: 2 * x, there)
    back = await rank.all_to_all(done, counts=chosen.T)
    left = [700 * i for i in range(n)]
    shared = await rank.all_gather(np.full(left[me], back.sum(), np.float32), counts=left)
    own = await rank.reduce_scatter(shared, counts=left)
    return [float(x.sum()) for x in (there, back, shared, own)]


PROGRAMS = (data_parallel, urgent_first, pipeline, tensor_parallel, rooted, experts)
