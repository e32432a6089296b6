"""Programs in virtual time, for predictions to be held against."""

import numpy as np

import overlap
from overlap import Virtual
from overlap.config import overriding_config

MIB = 1 << 18  # elements of float32


def nothing():
    """Compute, as far as results go."""


def run(main, ranks=4, algorithm=None):
    """Run a program on a modelled instance and return its timeline."""
    seen = []
    with overriding_config(watcher=seen.append):
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


def in_buckets(count):
    """All gradients of a step in some buckets, each reduced as soon as its part of backward is over."""

    async def main(rank):
        for step in range(3):
            with rank.step(step):
                pending = []
                for _ in range(count):
                    gradient = np.zeros(64 * MIB // count, "f4")
                    back = rank.compute(lambda gradient=gradient: gradient, name="backward", seconds=8e-3 / count)
                    pending.append(rank.all_reduce(back))
                for reduced in pending:
                    await reduced
                rank.compute(nothing, name="update", seconds=1e-4)

    return main


CHANGES = {
    "a late rank shares its work": ("waiting", data_parallel(late_s=9e-3), data_parallel(late_s=9e-3, shared=True)),
    "a late rank shares its work, no operation hidden": (
        "waiting", data_parallel(late_s=9e-3, awaits="each"), data_parallel(late_s=9e-3, shared=True, awaits="each")),
    "operations are awaited at the end": ("wire", data_parallel(awaits="each"), data_parallel()),
    "large operations are awaited at the end": ("wire", data_parallel(awaits="each", mib=32), data_parallel(mib=32)),
    "one bucket becomes eight": ("wire", in_buckets(1), in_buckets(8)),
    "two buckets become sixteen": ("wire", in_buckets(2), in_buckets(16)),
}  # fmt: skip
"""Changes of programs: the cause that they take away, the program, and the changed one."""
