"""Programs in virtual time, for predictions to be held against."""

import numpy as np

import overlap
from overlap import Virtual
from overlap.requested import overriding

MIB = 1 << 18  # elements of float32


def nothing():
    """Compute, as far as results go."""


def run(main, ranks=4):
    """Run a program on a modelled instance and return its timeline."""
    seen = []
    with overriding(watcher=seen.append):
        overlap.run(main, ranks=ranks, cluster="trn1.32xlarge", clock=Virtual(shapes_only=True))
    return seen[0]


def data_parallel(*, forward_s=2e-3, backward_s=1e-3, mib=8, late_s=0.0, awaits="end"):
    """Four gradients a step, each reduced as soon as it is there; rank 3 may come late."""

    async def main(rank):
        gradients = [np.zeros(mib * MIB, "f4") for _ in range(4)]
        for step in range(3):
            with rank.step(step):
                if rank.rank == 3 and late_s:
                    rank.compute(nothing, name="tokenise", seconds=late_s)
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
