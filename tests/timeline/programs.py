"""Programs in virtual time, for predictions to be held against."""

import numpy as np

import overlap
from overlap import Virtual, parallel
from overlap.config import overriding

MIB = 1 << 18  # elements of float32


def nothing():
    """Compute, as far as results go."""


def run(main, ranks=4, algorithm=None):
    """Run a program on a modelled instance and return its timeline."""
    seen = []
    with overriding(watcher=seen.append):
        overlap.run(main, ranks=ranks, cluster="trn1.32xlarge", clock=Virtual(shapes_only=True), algorithm=algorithm)
    return seen[0]


def data_parallel(*, forward_s=2e-3, backward_s=1e-3, mib=8, late_s=0.0, shared=False, awaits="end"):
    """Four gradients a step, each reduced as soon as it is there; rank 3 may come late, or share that work out."""

    async def main(rank):
        gradients = [np.zeros(mib * MIB, "f4") for _ in range(4)]
        for step in range(3):
            with rank.step(step):
                if late_s and (shared or rank.rank == 3):
                    rank.compute(nothing, name="tokenise", seconds=late_s / (rank.world_size if shared else 1))
                rank.compute(nothing, name="forward", seconds=forward_s)
                pending = []
                for gradient in gradients:
                    back = rank.compute(lambda gradient=gradient: gradient, name="backward", seconds=backward_s)
                    pending.append(rank.all_reduce(back))
                    if awaits == "each":
                        await pending.pop()
                for reduced in pending:
                    await reduced
                rank.compute(nothing, name="update", seconds=1e-4)

    return main


def by_hand(*, updates="in the loop", name=None):
    """Six gradients a step, each with an update as a compute: in the loop it holds up the next backward."""

    async def main(rank):
        weights = [np.zeros(16 * MIB, "f4") for _ in range(6)]
        for step in range(4):
            with rank.step(step):
                rank.compute(nothing, name="forward", seconds=6e-3)
                sums = []
                for at in range(6):
                    back = rank.compute(lambda w: w, weights[at], name="backward", seconds=2e-3)
                    sums.append(rank.all_reduce(back, op="mean", name=name))
                    if updates == "in the loop":
                        weights[at] = rank.compute(lambda w, _: w, weights[at], sums[at], name="update", seconds=5e-4)
                if updates != "in the loop":
                    for at in range(6):
                        weights[at] = rank.compute(lambda w, _: w, weights[at], sums[at], name="update", seconds=5e-4)
                await weights[-1]

    return main


def tensor_parallel():
    """Each layer's sum is the input of the next layer, whose result is summed in turn."""

    async def main(rank):
        for step in range(3):
            with rank.step(step):
                x = np.zeros(16 * MIB, "f4")
                for _ in range(6):
                    x = rank.all_reduce(rank.compute(lambda x: x, x, name="layer", seconds=1e-3))
                    rank.compute(nothing, name="statistics", seconds=1e-4)

    return main


def bucketed(per):
    """Sixteen gradients of 4 MiB, in buckets of so many."""

    async def main(rank):
        for step in range(3):
            with rank.step(step):
                rank.compute(nothing, name="forward", seconds=2e-3)
                pending = []
                for layer in range(16):
                    back = rank.compute(nothing, name="backward", seconds=5e-4)
                    if layer % per == per - 1:
                        await back
                        pending.append(rank.all_reduce(np.zeros(4 * MIB * per, "f4")))
                pending.append(rank.all_reduce(np.zeros(1024, "f4")))
                for reduced in pending:
                    await reduced

    return main


def of_our_buckets(mib, *, bucket_mib=None, layers=16):
    """Gradients of so many MiB each, reduced and applied by `parallel.DataParallel`."""

    async def main(rank):
        side = int((mib * MIB) ** 0.5)
        weights = {f"layer {number}": np.zeros((side, side), "f4") for number in range(layers)}
        size = {} if bucket_mib is None else {"bucket_bytes": bucket_mib << 20}
        model = parallel.DataParallel(rank, weights, optimizer=parallel.SGD(0.1), **size)
        for step in range(5):
            with rank.step(step):
                x = np.zeros((512, side), "f4")
                for name in weights:
                    x = rank.compute(lambda _, x: x, model[name], x, name="forward", flops=1024 * side**2)
                for name in reversed(weights):
                    back = rank.compute(lambda w, x: (w, x), model[name], x, name="backward", flops=2048 * side**2)
                    x = back[1]
                    model.reduce(name, back[0])
                model.step()
        await model.finish()

    return main


def pipeline(*, stage_s=1e-3, mib=2):
    """Six microbatches pass through all ranks."""

    async def main(rank):
        x, last = np.zeros(mib * MIB, "f4"), rank.world_size - 1
        for step in range(3):
            with rank.step(step):
                out = []
                for tag in range(6):
                    arrived = rank.recv(x, rank.rank - 1, tag=tag) if rank.rank else x
                    y = rank.compute(lambda _: x, arrived, name="stage", seconds=stage_s)
                    out.append(rank.send(y, rank.rank + 1, tag=tag) if rank.rank < last else y)
                for each in out:
                    await each
                await rank.barrier()

    return main


def layered(*, forward=False, mib=16, layers=6, steps=4, backward_s=5e-4, bucket_mib=None):
    """Each layer's forward needs its own sum of the step before; the sums of those needed first may overtake."""
    size = (bucket_mib or mib) * MIB
    parts = {}
    for at, layer in enumerate(reversed(range(layers))):
        parts[layer] = range(int(at * mib * MIB // size), int(((at + 1) * mib * MIB - 1) // size) + 1)
    last = {bucket: layer for layer, buckets in parts.items() for bucket in buckets}

    async def main(rank):
        sums = {}
        for step in range(steps):
            with rank.step(step):
                for layer in range(layers):
                    needed = [sums[bucket] for bucket in parts[layer] if sums]
                    rank.compute(lambda *_: None, *needed, name="forward", seconds=5e-4)
                for layer in reversed(range(layers)):
                    back = rank.compute(nothing, name="backward", seconds=backward_s)
                    for bucket in (each for each in parts[layer] if last[each] == layer):
                        here = int(min(size, layers * mib * MIB - bucket * size))
                        gradient = rank.compute(lambda _, here=here: np.zeros(here, "f4"), back, name="join", seconds=0)
                        sums[bucket] = rank.all_reduce(gradient, priority=layer if forward else 0)
        for each in sums.values():
            await each

    return main


def windowed(window):
    """Many gradients on a stream that works on so many at once."""

    async def main(rank):
        stream = rank.stream("gradients", window=window)
        for step in range(3):
            with rank.step(step):
                pending = []
                for _ in range(24):
                    back = rank.compute(lambda: np.zeros(4 * MIB, "f4"), name="backward", seconds=1e-4)
                    pending.append(rank.all_reduce(back, stream=stream))
                for each in pending:
                    await each

    return main


def with_loss(*, apart=False):
    """The loss of all ranks is waited for by a compute, and stands behind gradients unless it has its own stream."""

    async def main(rank):
        stream = rank.stream("loss") if apart else None
        for step in range(3):
            with rank.step(step):
                rank.compute(nothing, name="forward", seconds=1e-3)
                pending = []
                for _ in range(6):
                    back = rank.compute(lambda: np.zeros(16 * MIB, "f4"), name="backward", seconds=2e-4)
                    pending.append(rank.all_reduce(back))
                loss = rank.compute(lambda *_: np.zeros(1024, "f4"), back, name="loss", seconds=1e-5)
                mean = rank.all_reduce(loss, stream=stream)
                rank.compute(lambda *_: None, mean, name="report", seconds=2e-3)
                for each in pending:
                    await each

    return main


def badly_cut(*, late_s=2e-3, shared=False, head=256 << 10, body=128 << 20):
    """Eight gradients of 16 MiB: two in many small buckets, six in a large one that leaves last; rank 2 is late."""

    async def main(rank):
        for step in range(3):
            with rank.step(step):
                if shared or rank.rank == 2:
                    rank.compute(nothing, name="tokenise", seconds=late_s / (rank.world_size if shared else 1))
                rank.compute(nothing, name="forward", seconds=4e-3)
                pending, ready = [], 0
                for layer in range(8):
                    bucket, ready = head if layer < 2 else body, ready + (16 << 20)
                    await rank.compute(nothing, name="backward", seconds=1e-3)
                    if layer in (1, 7) or ready >= bucket:
                        sizes = [min(bucket, ready - at) for at in range(0, ready, bucket)]
                        pending += [rank.all_reduce(np.zeros(size // 4, "f4")) for size in sizes]
                        ready = 0
                for each in pending:
                    await each
                rank.compute(nothing, name="update", seconds=5e-4)

    return main
