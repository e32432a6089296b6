"""Where the weights of a rank lie in the model that all ranks have together, so that others can go on from its part.

Tensor-parallel ranks have blocks of matrices, and pipeline ranks some of the layers, under names of their own. What is
saved says which block of which weight it is; who loads it takes blocks of other sizes, and other layers, out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where one weight of a rank lies in the whole model."""

    name: str  # Of the weight there: the same on all ranks that have a block of it, however many they are
    axis: int = 0  # Along which it is cut
    index: int = 0  # Which of the blocks this is
    of: int = 1  # How many blocks there are, all of one size; 1 is the whole weight

    def __post_init__(self) -> None:
        """Refuse what is no block.

        Raises:
            UsageError: Naming the number.
        """
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"name: expected that of a weight, got {self.name!r}")
        for name, value, least in (("axis", self.axis, 0), ("of", self.of, 1), ("index", self.index, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name}: expected a whole number from {least}, got {value!r}")
        if self.index >= self.of:
            raise UsageError(f"index: expected less than the {self.of} blocks of {self.name!r}, got {self.index}")

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole weight, from that of this block."""
        return tuple(size * self.of if axis == self.axis else size for axis, size in enumerate(shape))

    def block(self, whole: Array) -> Array:
        """Return this block of the whole weight, as a view.

        Raises:
            UsageError: If it does not divide.
        """
        each, rest = divmod(whole.shape[self.axis], self.of)
        if rest:
            raise UsageError(f"cuts: {whole.shape[self.axis]} of {self.name!r} do not divide by {self.of}")
        return whole[(slice(None),) * self.axis + (slice(self.index * each, (self.index + 1) * each),)]
