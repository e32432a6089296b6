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
"""Name of the dtype, and shape, of each tensor, by the tensor's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Elements `start` to `stop` (exclusive) of a tensor, flat; the tensor may itself be a block of a larger one."""

    tensor: str  # Name of the tensor: that of a weight, or "optimizer:KEY:WEIGHT"
    shape: tuple[int, ...]  # Shape of the tensor; with a cut, of the block
    start: int  # Flat index of the first element
    stop: int  # Flat index after the last one
    data: Array  # (stop - start,) The model's own memory, or a copy of it
    cut: Cut | None = None  # The block that `shape` describes, in the larger tensor; None: the tensor is whole

    @property
    def key(self) -> str:
        """Name of the tensor; of a block with axis, index and number of blocks, such as "w|0:1/4"."""
        cut = self.cut
        return self.tensor if cut is None else f"{self.tensor}|{cut.axis}:{cut.index}/{cut.of}"

    @property
    def name(self) -> str:
        """Name of these elements in a file, such as "w[0:128]"."""
        return f"{self.key}[{self.start}:{self.stop}]"

    @property
    def saved_piece(self) -> Piece:
        """Place of these elements in the tensor, in the form that the file saves."""
        return Piece(self.key, self.shape, self.start, self.stop, astuple(self.cut) if self.cut else None)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the tensor."""
        return self.data.dtype

    @classmethod
    def of_whole_tensor(cls, tensor: str, shape: tuple[int, ...], data: Array) -> Shard:
        """Return the shard that has all elements of a tensor.

        Args:
            tensor: Its name.
            shape: Its shape.
            data: (elements,) Its memory, flat.
        """
        return cls(tensor=tensor, shape=shape, start=0, stop=prod(shape), data=data)

    def part_between(self, start: int, stop: int) -> Shard:
        """Return the part of this piece that lies in `start` to `stop`, flat indices of the tensor; it may be empty."""
        first = min(max(start, self.start), self.stop)
        last = max(first, min(stop, self.stop))
        return replace(self, start=first, stop=last, data=self.data[first - self.start : last - self.start])


def state_name(key: str, weight: str) -> str:
    """Return the name of an optimizer's state of a weight, such as "optimizer:mean:w"."""
    return f"optimizer:{key}:{weight}"


def weight_name(tensor: str) -> str:
    """Return the weight's name, given the name of a weight or of an optimizer's state of a weight."""
    return tensor.split(":", 2)[2] if tensor.startswith("optimizer:") else tensor


def rename_tensor(tensor: str, weight: str) -> str:
    """Return the tensor's name with the weight's name in it replaced by `weight`.

    >>> rename_tensor("optimizer:mean:w", "blocks.0.w")
    'optimizer:mean:blocks.0.w'
    """
    return state_name(tensor.split(":", 2)[1], weight) if tensor.startswith("optimizer:") else weight


def pieces_of_rank(pieces: Sequence[Shard], rank: int, ranks: int) -> list[Shard]:
    """Return a rank's share of pieces that all ranks have: about equal bytes for each rank, and no element twice.

    Args:
        pieces: All pieces, in the same order on all ranks.
        rank: Index of the rank.
        ranks: Number of ranks.
    """
    sizes = [piece.data.nbytes for piece in pieces]
    total, share = sum(sizes), []
    # `before`: bytes of all earlier pieces. `accumulate` yields the total as well, hence strict=False.
    for piece, before in zip(pieces, accumulate(sizes, initial=0), strict=False):
        size = piece.dtype.itemsize
        # Share r begins at byte total * r // ranks of all pieces. An element belongs to the share that has its first
        # byte, so the quotients -(-bytes // size) round up.
        first, last = (-(-max(0, total * at // ranks - before) // size) for at in (rank, rank + 1))
        part = piece.part_between(piece.start + first, piece.start + last)
        if part.stop > part.start:
            share.append(part)
    return share


@dataclass(frozen=True, slots=True)
class Cut:
    """Position of a rank's block of one weight in the whole model: block `index` of `of` equal ones along `axis`."""

    name: str  # Name of the weight in the whole model, the same on all ranks with a block of it
    axis: int = 0  # Axis along which the weight is cut
    index: int = 0  # Index of this rank's block
    of: int = 1  # Number of blocks, all of one size; 1: the whole weight

    def __post_init__(self) -> None:
        """Refuse an invalid name or number.

        Raises:
            UsageError: Naming the field.
        """
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"Cut(name=...): expected the name of a weight, a non-empty string, got {self.name!r}")
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
            UsageError: The axis does not divide into `of` equal blocks.
        """
        rows, rest = divmod(whole.shape[self.axis], self.of)
        if rest:
            length = whole.shape[self.axis]
            raise UsageError(
                f"cuts: axis {self.axis} of {self.name!r} has {length} elements, which {self.of} blocks cannot share "
                f"equally; restore on a number of ranks that divides {length}"
            )
        return whole[(slice(None),) * self.axis + (slice(self.index * rows, (self.index + 1) * rows),)]
