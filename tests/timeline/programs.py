"""Programs in virtual time, for predictions to be held against."""

import numpy as np

import overlap
from overlap import Virtual
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
