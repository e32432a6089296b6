"""What every collective computes, in one numpy expression each, and inputs to try it on."""

from collections.abc import Sequence

import numpy as np

from overlap.collectives import Schedule

Ints = np.ndarray


def expected(schedule: Schedule, inputs: Sequence[Ints]) -> list[Ints | None]:
    size, root = schedule.size, schedule.root
    blocks = [np.split(x, schedule.blocks[0]) for x in inputs]
    arrived = {dst: src for src, dst in schedule.pairs}
    at_root = [rank == root for rank in range(size)]
    return {
        "all_reduce": lambda: [sum(inputs)] * size,
        "reduce": lambda: [sum(inputs) if here else None for here in at_root],
        "reduce_scatter": lambda: [sum(b[rank] for b in blocks) for rank in range(size)],
        "all_gather": lambda: [np.concatenate(inputs)] * size,
        "gather": lambda: [np.concatenate(inputs) if here else None for here in at_root],
        "broadcast": lambda: [inputs[root]] * size,
        "scatter": lambda: blocks[root],
        "all_to_all": lambda: [np.concatenate([b[rank] for b in blocks]) for rank in range(size)],
        "permute": lambda: [inputs[arrived[r]] if r in arrived else 0 * inputs[0] for r in range(size)],
    }[schedule.collective]()


def random_inputs(schedule: Schedule, block_elements: int, seed: int = 0) -> list[Ints]:
    rng = np.random.default_rng(seed)
    count = schedule.blocks[0] * block_elements
    return [rng.integers(-(2**40), 2**40, count) for _ in range(schedule.size)]


def same(got: Sequence[Ints | None], want: Sequence[Ints | None]) -> bool:
    pairs = list(zip(got, want, strict=True))
    return all((g is None) == (w is None) and (g is None or np.array_equal(g, w)) for g, w in pairs)
