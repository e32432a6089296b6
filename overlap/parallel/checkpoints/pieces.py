"""Pieces of tensors, and their places in the whole model, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from ...errors import UsageError
from ...state.files import Piece
from ..settings import check_count

if TYPE_CHECKING:
    import numpy as np

    from ..tree import Array

Tensors: TypeAlias = "Mapping[str, tuple[str, Sequence[int]]]"
"""Name of dtype, and shape, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Elements `start` to `stop` of a tensor, flat."""

    tensor: str  # Its name: that of a weight, or "optimizer:KEY:WEIGHT"
    shape: tuple[int, ...]  # Shape of the whole tensor
    start: int  # First element
    stop: int  # Behind the last one
    data: Array  # (stop - start,) The model's own memory, or a copy of it
    cut: Cut | None = None  # Block of a larger tensor that `shape` describes; None: the whole tensor

    @property
    def key(self) -> str:
        """Name of the tensor, with the axis and number of the block if this is a block of it."""
        cut = self.cut
        return self.tensor if cut is None else f"{self.tensor}|{cut.axis}:{cut.index}/{cut.of}"

    @property
    def name(self) -> str:
        """Name of these elements in a file."""
        return f"{self.key}[{self.start}:{self.stop}]"

    @property
    def stored(self) -> Piece:
        """Place of these elements, for the file that has them."""
        return Piece(self.key, self.shape, self.start, self.stop, astuple(self.cut) if self.cut else None)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the tensor."""
        return self.data.dtype

    @classmethod
    def whole(cls, tensor: str, shape: tuple[int, ...], data: Array) -> Shard:
        """Return the shard that has all elements of a tensor."""
        return cls(tensor=tensor, shape=shape, start=0, stop=prod(shape), data=data)

    def between(self, start: int, stop: int) -> Shard:
        """Return the elements of this piece from `start` to `stop`, counted in the whole tensor; maybe none."""
        first = min(max(start, self.start), self.stop)
        last = max(first, min(stop, self.stop))
        return replace(self, start=first, stop=last, data=self.data[first - self.start : last - self.start])


def state_name(key: str, weight: str) -> str:
    """Return the name of an optimizer's state of a weight."""
    return f"optimizer:{key}:{weight}"


def weight_name(tensor: str) -> str:
    """Return the name of the weight of a tensor, which is the weight itself or an optimizer's state of it."""
    return tensor.split(":", 2)[2] if tensor.startswith("optimizer:") else tensor


def rename_tensor(tensor: str, weight: str) -> str:
    """Return the name of a tensor after its weight has another name."""
    return state_name(tensor.split(":", 2)[1], weight) if tensor.startswith("optimizer:") else weight


def share_pieces(pieces: Sequence[Shard], rank: int, ranks: int) -> list[Shard]:
    """Return a rank's share of pieces that all ranks have: equal bytes for each, and no element twice."""
    sizes = [piece.data.nbytes for piece in pieces]
    total, share = sum(sizes), []
    for piece, before in zip(pieces, accumulate(sizes, initial=0), strict=False):
        size = piece.dtype.itemsize
        # Shares begin and end at bytes; an element belongs to the share with its first byte, so quotients round up.
        first, last = (-(-max(0, total * at // ranks - before) // size) for at in (rank, rank + 1))
        part = piece.between(piece.start + first, piece.start + last)
        if part.stop > part.start:
            share.append(part)
    return share


@dataclass(frozen=True, slots=True)
class Cut:
    """Position of a rank's part of one weight in the whole model."""

    name: str  # Name of the weight in the whole model, the same on all ranks with a block of it
    axis: int = 0  # Axis of the cut
    index: int = 0  # Index of this block
    of: int = 1  # Number of blocks, all of one size; 1: the whole weight

    def __post_init__(self) -> None:
        """Refuse numbers that make no block.

        Raises:
            UsageError: Naming the number.
        """
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"name: expected that of a weight, got {self.name!r}")
        for name, value, least in (("axis", self.axis, 0), ("of", self.of, 1), ("index", self.index, 0)):
            check_count(name, value, least=least)
        if self.index >= self.of:
            raise UsageError(f"index: expected less than the {self.of} blocks of {self.name!r}, got {self.index}")

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole weight, given the shape of a block."""
        return tuple(size * self.of if axis == self.axis else size for axis, size in enumerate(shape))

    def block(self, whole: Array) -> Array:
        """Return this block of the whole weight, as a view.

        Raises:
            UsageError: If it does not divide.
        """
        rows, rest = divmod(whole.shape[self.axis], self.of)
        if rest:
            length = whole.shape[self.axis]
            raise UsageError(
                f"cuts: axis {self.axis} of {self.name!r} has {length} elements, which {self.of} blocks cannot share "
                f"equally; restore on a number of ranks that divides {length}"
            )
        return whole[(slice(None),) * self.axis + (slice(self.index * rows, (self.index + 1) * rows),)]
