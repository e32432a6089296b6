"""Single collectives to try: what goes in on every rank, how it is called, and what must come out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from zlib import crc32

import numpy as np

import overlap

from .reference import REFERENCES, Array, Result, Results

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
SCATTERING = ("reduce_scatter", "all_to_all", "scatter")
JOINING = ("all_gather", "gather")
KINDS = tuple(REFERENCES)

FLOAT64 = np.dtype(np.float64)


def operators(dtype: np.dtype) -> list[str]:
    """The names of the operators that a dtype has."""
    return [op for op, operator in overlap.OPS.items() if operator.refuses(dtype) is None]


OPS = operators(FLOAT64)
MANY = 10_000  # elements that take longer to draw than to reduce

# Sizes nobody thinks of: primes; then no axis, nothing at all, one, an empty axis behind a full one.
SHAPES = ((7,), (13,), (2, 3), (1, 5, 2), (), (0,), (1,), (0, 3), (3, 0))
_FULL = 4  # of these shapes the first ones, which have data on every axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One collective, without its data, which follows from the rest."""

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype = FLOAT64
    kwargs: dict[str, object] = field(default_factory=dict)

    def input(self, rank: int) -> Array:
        """Small whole numbers, so that sums and products are exact in every order."""
        return whole_numbers(self.shape, self.dtype, crc32(f"{self} {rank}".encode()))

    def expected(self, size: int) -> Results:
        """What each rank gets."""
        return REFERENCES[self.kind]([self.input(rank) for rank in range(size)], **self.kwargs)

    def issue(self, comm: overlap.Group, x: object, **more: object) -> overlap.CollectiveFuture:
        """Call it with `x` for this rank's input."""
        return getattr(comm, self.kind)(x, **self.kwargs, **more)

    def __str__(self) -> str:
        said = "".join(f", {name}={value!r}" for name, value in self.kwargs.items())
        return f"{self.kind}({self.dtype} {self.shape}{said})"


def whole_numbers(shape: Sequence[int], dtype: np.dtype, seed: int) -> Array:
    """Numbers from -7 to 7 as far as the dtype has them; powers of two for the dtype that has nothing else."""
    rng = np.random.default_rng(seed)
    if dtype.name == "float8_e8m0fnu":
        return (2.0 ** rng.integers(0, 4, shape)).astype(dtype).reshape(shape)
    low, high = (0, 2) if dtype.kind == "b" else (0, 8) if dtype.kind == "u" else (-7, 8)
    if prod(shape) > MANY:
        return ((np.arange(prod(shape)) * 7919 + seed % 104729) // 3 % (high - low) + low).astype(dtype).reshape(shape)
    numbers = np.asarray(rng.integers(low, high, shape))
    if dtype.kind == "c":
        numbers = numbers + 1j * rng.integers(low, high, shape)
    return np.asarray(numbers).astype(dtype)


def shapes(kind: str, size: int) -> Iterator[tuple[int, ...]]:
    """The awkward shapes that a collective can take on `size` ranks."""
    for shape in SHAPES:
        if kind in SCATTERING:
            shape = (shape[0] * size, *shape[1:]) if shape else ()
        if shape or kind not in (*SCATTERING, *JOINING):
            yield shape


def variants(kind: str, size: int) -> Iterator[dict[str, object]]:
    """All operators, all roots, and pairs that are full, partial, crossing, to oneself, and none."""
    if kind == "permute":
        shift = [(rank, (rank + 1) % size) for rank in range(size)]
        for pairs in (shift, shift[1:], [(dst, src) for src, dst in shift], [(0, 0)], [(0, size - 1)], []):
            yield {"pairs": pairs}
        return
    for op in OPS if kind in REDUCING else (None,):
        for root in range(size) if kind in ROOTED else (None,):
            yield {name: value for name, value in (("op", op), ("root", root)) if value is not None}


def cases(kind: str, size: int, *, every: int = 4) -> Iterator[Case]:
    """Every variant of a collective with one shape of each `every`, and every shape that it can take at least once.

    Shapes with little or nothing in them, which all variants treat alike, come with fewer variants.
    """
    todo = list(variants(kind, size))
    for index, shape in enumerate(shapes(kind, size)):
        apart = every if index < _FULL else min(every * every, len(todo))
        for place, kwargs in enumerate(todo):
            if len(todo) == 1 or (place + index) % apart == 0:
                yield Case(kind=kind, shape=shape, kwargs=kwargs)


def differs(got: Result, want: Result) -> str | None:
    """Say how a result is not exactly the expected one, in type, dtype, shape and value."""
    if want is None or got is None:
        return None if got is want else f"got {got!r}, expected {want!r}"
    if type(got) is not np.ndarray or (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"got {type(got).__name__} {got!r}, expected {want.dtype} {want.shape}"
    if not got.flags.writeable:
        return "the result cannot be written"
    wrong = (got != want) & ((got == got) | (want == want))  # two NaNs agree, of every dtype
    count = int(np.count_nonzero(wrong))
    return f"{count} of {prod(want.shape)} elements differ; got {got!r}, expected {want!r}" if count else None
