"""What a model is made of, for checkpoints: pieces of tensors, whoever has them and however they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from .cuts import Cut

if TYPE_CHECKING:
    import numpy as np

    from .tree import Array

Tensors: TypeAlias = "Mapping[str, tuple[str, Sequence[int]]]"
"""Name of dtype, and shape, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements `start` to `stop` of a tensor, flat."""

    tensor: str  # Its name: that of a weight, or "optimizer:KEY:WEIGHT"
    shape: tuple[int, ...]  # Of the whole tensor
    start: int  # First element
    stop: int  # Behind the last one
    data: Array  # (stop - start,) The model's own memory, or a copy of it
    cut: Cut | None = None  # Which block of a larger tensor of that name the `shape` is; None if it is all of it

    @property
    def key(self) -> str:
        """What tells the tensor, or this block of it, from others."""
        cut = self.cut
        return self.tensor if cut is None else f"{self.tensor}|{cut.axis}:{cut.index}/{cut.of}"

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Of the tensor."""
        return self.data.dtype

    @classmethod
    def whole(cls, tensor: str, shape: tuple[int, ...], data: Array) -> Piece:
        """Return all of a tensor."""
        return cls(tensor=tensor, shape=shape, start=0, stop=prod(shape), data=data)

    def between(self, start: int, stop: int) -> Piece:
        """Return the elements of it that are from `start` on and before `stop`, counted in the tensor; maybe none."""
        first = min(max(start, self.start), self.stop)
        last = max(first, min(stop, self.stop))
        return replace(self, start=first, stop=last, data=self.data[first - self.start : last - self.start])


def state_name(key: str, weight: str) -> str:
    """Return the name of what an optimizer keeps of a weight."""
    return f"optimizer:{key}:{weight}"


def of_weight(tensor: str) -> str:
    """Return the weight that a tensor is, or that an optimizer keeps it of."""
    return tensor.split(":", 2)[2] if tensor.startswith("optimizer:") else tensor


def renamed(tensor: str, weight: str) -> str:
    """Return the name that a tensor has if its weight has that name."""
    return state_name(tensor.split(":", 2)[1], weight) if tensor.startswith("optimizer:") else weight


def divided(pieces: Sequence[Piece], rank: int, ranks: int) -> list[Piece]:
    """Return a rank's share, in bytes, of what all ranks have alike: every element is one rank's."""
    sizes = [piece.data.nbytes for piece in pieces]
    total, found = sum(sizes), []
    for piece, before in zip(pieces, accumulate(sizes, initial=0), strict=False):
        size = piece.dtype.itemsize
        first, last = (-(-max(0, total * at // ranks - before) // size) for at in (rank, rank + 1))
        part = piece.between(piece.start + first, piece.start + last)
        if part.stop > part.start:
            found.append(part)
    return found


def copied(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces with memory of their own."""
    return [replace(piece, data=piece.data.copy()) for piece in pieces]
