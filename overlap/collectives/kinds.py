"""The collectives by name: what goes in, what comes out, on which rank. Pure shapes, no data.

A *block* is the unit of a collective's semantics: `all_gather` takes one block and returns n, `reduce_scatter` the
other way round, `all_reduce` works on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import UsageError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    scatters: bool = False  # the input holds one block for each rank
    gathers: bool = False  # the result holds one block of each rank
    reduces: bool = False
    rooted: bool = False
    busbw_factor: str = "1"  # "2(n-1)/n", "(n-1)/n" or "1", as nccl-tests defines bus bandwidth


class Collective(Enum):
    """Every operation of a group. The value is its public name."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    PERMUTE = "permute"
    BARRIER = "barrier"
    P2P = "send/recv"

    traits: _Traits
    text: str  # the value: that of an enum takes three times as long to read

    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw for a group of `ranks` (nccl-tests: doc/PERFORMANCE.md)."""
        return {"1": 1.0, "(n-1)/n": (ranks - 1) / ranks, "2(n-1)/n": 2 * (ranks - 1) / ranks}[self.traits.busbw_factor]


_TRAITS = {
    Collective.ALL_REDUCE: _Traits(reduces=True, busbw_factor="2(n-1)/n"),
    Collective.REDUCE_SCATTER: _Traits(reduces=True, scatters=True, busbw_factor="(n-1)/n"),
    Collective.ALL_GATHER: _Traits(gathers=True, busbw_factor="(n-1)/n"),
    Collective.ALL_TO_ALL: _Traits(scatters=True, gathers=True, busbw_factor="(n-1)/n"),
    Collective.BROADCAST: _Traits(rooted=True),
    Collective.REDUCE: _Traits(reduces=True, rooted=True),
    Collective.GATHER: _Traits(gathers=True, rooted=True),
    Collective.SCATTER: _Traits(scatters=True, rooted=True),
    Collective.PERMUTE: _Traits(),
    Collective.BARRIER: _Traits(),
    Collective.P2P: _Traits(),
}
for _kind, _traits in _TRAITS.items():
    _kind.traits, _kind.text = _traits, _kind.value

# The same as plain names: where each operation asks for its kind, to read a member of an enum takes ten times as long.
(
    ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST, REDUCE, GATHER, SCATTER, PERMUTE, BARRIER, P2P
) = Collective  # fmt: skip


def check_input(kind: Collective, shape: Shape, ranks: int) -> None:
    """Refuse shapes that the collective cannot cut into blocks.

    Raises:
        UsageError: If axis 0 is missing, or not divisible by the number of ranks where it must be.
    """
    traits = kind.traits
    if (traits.scatters or traits.gathers) and not shape:
        raise UsageError(f"x: {kind.value} works along axis 0, got a 0-dimensional array; pass x.reshape(1)")
    if traits.scatters and shape[0] % ranks:
        raise UsageError(f"x: {kind.value} needs axis 0 divisible by the group's {ranks} ranks, got shape {shape}")


def result_shape(kind: Collective, shape: Shape, ranks: int) -> Shape:
    """Return the shape that a rank which receives a result gets, for an input of `shape`."""
    traits = kind.traits
    if traits.scatters and not traits.gathers:
        return (shape[0] // ranks, *shape[1:])
    if traits.gathers and not traits.scatters:
        return (shape[0] * ranks, *shape[1:])
    return shape
