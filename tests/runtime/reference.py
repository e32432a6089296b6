"""What every collective computes, in up to three lines of numpy each."""

from collections.abc import Callable, Sequence

import numpy as np

from overlap import OPS

Array = np.ndarray
Result = Array | None
Results = list[Result]


@np.errstate(all="ignore")
def fold(op: str, xs: Sequence[Array]) -> Array:
    """Combine in rank order; narrow floats in float32, means of integers in 64 bits, truncated."""
    dtype, count, operator = xs[0].dtype, len(xs), OPS[op]
    if operator.divides and dtype.kind in "iu":
        total = sum(x.astype(object) for x in xs)
        return np.array(np.sign(total) * (abs(total) // count), dtype)
    wide = np.dtype(np.float32) if dtype.itemsize <= 2 and dtype.kind in "fV" else dtype
    total = operator.reference(np.stack([x.astype(wide) for x in xs]))
    return np.asarray(total / count if operator.divides else total).astype(dtype)


def blocks(x: Array, count: int) -> list[Array]:
    """Cut axis 0 evenly."""
    return np.split(x, count)


def all_reduce(xs: Sequence[Array], op: str = "sum") -> Results:
    return [fold(op, xs)] * len(xs)


def reduce(xs: Sequence[Array], root: int = 0, op: str = "sum") -> Results:
    return [fold(op, xs) if rank == root else None for rank in range(len(xs))]


def reduce_scatter(xs: Sequence[Array], op: str = "sum") -> Results:
    return [*blocks(fold(op, xs), len(xs))]


def all_gather(xs: Sequence[Array]) -> Results:
    return [np.concatenate(xs)] * len(xs)


def gather(xs: Sequence[Array], root: int = 0) -> Results:
    return [np.concatenate(xs) if rank == root else None for rank in range(len(xs))]


def all_to_all(xs: Sequence[Array]) -> Results:
    return [np.concatenate(column) for column in zip(*(blocks(x, len(xs)) for x in xs), strict=True)]


def broadcast(xs: Sequence[Array], root: int = 0) -> Results:
    return [xs[root]] * len(xs)


def scatter(xs: Sequence[Array], root: int = 0) -> Results:
    return [*blocks(xs[root], len(xs))]


def permute(xs: Sequence[Array], pairs: Sequence[tuple[int, int]]) -> Results:
    source = {dst: src for src, dst in pairs}
    return [xs[source[rank]] if rank in source else np.zeros_like(xs[0]) for rank in range(len(xs))]


REFERENCES: dict[str, Callable[..., Results]] = {
    f.__name__: f
    for f in (all_reduce, reduce, reduce_scatter, all_gather, gather, all_to_all, broadcast, scatter, permute)
}
