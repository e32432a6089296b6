"""Every schedule that a group of some size can have: the axis along which the tests of this folder run."""

from collections.abc import Iterable, Iterator

from overlap.collectives import GENERATORS, Schedule, fits, generate
from overlap.collectives.schedule import ROOTED

NAMES = [(collective, name) for collective, names in GENERATORS.items() for name in names]


def fitting(sizes: Iterable[int]) -> list[tuple[str, str, int]]:
    """Return every collective and algorithm with each of some sizes that it takes; `test_tables` has them in full."""
    return [(collective, name, size) for size in sizes for collective, name in NAMES if fits(name, size)]


def schedules(collective: str, algorithm: str, size: int) -> Iterator[Schedule]:
    """Yield the algorithm for some roots or pairs."""
    if collective in ROOTED:
        for root in sorted({0, size // 2, size - 1}):
            yield generate(collective, algorithm, size, root=root)
    elif collective == "permute":
        shift = tuple((rank, (rank + 1) % size) for rank in range(size))
        for pairs in (shift, shift[:-1], ((0, 0),), ()):
            yield generate(collective, algorithm, size, pairs=pairs)
    else:
        yield generate(collective, algorithm, size)
