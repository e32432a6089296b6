"""Types of the arguments and results of operations, for type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypedDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer, TypeVar  # not at run time: type checkers come with it

    from ...collectives.reduce import Array
    from ..future import Future
    from ..outstanding import CallSite
    from ..stream import Stream

    # Element type of an array: the result has that of the argument.
    S = TypeVar("S", bound=np.generic, default=np.generic)
    # Type of a tree of arrays: the result has that of the argument.
    Arrays = TypeVar("Arrays", bound="Tree")
    # Type of the argument `out`, which becomes the result; without `out`, the result is an array.
    Out = TypeVar("Out", bound="Output", default="Array")
    # Type of an object that travels to other ranks; or of the value of each future in a dict or sequence.
    V = TypeVar("V")

Op: TypeAlias = Literal["sum", "mean", "max", "min", "prod", "band", "bor", "bxor"] | str
"""A name in `overlap.OPS`. Editors suggest the names in this list; a program may add others to `OPS`."""


class SupportsArray(Protocol):
    """An object that numpy can convert to an array."""

    def __array__(self) -> NDArray[np.generic]:
        """Return the object as an array."""


class SupportsDLPack(Protocol):
    """An object that exports its memory by DLPack, such as a tensor of PyTorch."""

    def __dlpack__(self) -> object:
        """Return a DLPack capsule of the object's memory."""


ArrayOf: TypeAlias = "NDArray[S] | S | Future[NDArray[S]] | Future[S]"
"""An array with elements of type S, a single such element, or a future of either."""

Numbers: TypeAlias = "complex | Sequence[Numbers] | Future[complex]"
"""Numbers of Python, which numpy converts to an array. For type checkers, `complex` includes `float` and `int`."""

Memory: TypeAlias = "Buffer | SupportsArray | SupportsDLPack"
"""An object that exports its memory, which is used without a copy."""

Tree: TypeAlias = "Mapping[str, object] | Mapping[int, object] | Sequence[object]"
"""A dict, list or tuple of arrays or futures of them, at any depth."""

Output: TypeAlias = "Array | Memory"
"""An object that a result may be written to."""

SingleInput: TypeAlias = "Array | np.generic | Numbers | Memory | Future[object]"
"""Any input of a collective, except a tree."""

Input: TypeAlias = "SingleInput | Tree"
"""Any input of a collective."""

Like: TypeAlias = "tuple[Shape, str | type[float] | type[np.generic] | np.dtype[np.generic]]"
"""Shape and element type of a new array."""

Rows: TypeAlias = "Sequence[int] | NDArray[np.integer]"
RowTable: TypeAlias = "Sequence[Rows] | NDArray[np.integer]"
DTypeOf: TypeAlias = "type[S] | np.dtype[S]"
Shape: TypeAlias = "int | Sequence[int]"


class Options(TypedDict, total=False):
    """Keyword arguments of every operation; see `GroupCalls`."""

    priority: int
    stream: Stream | str | None
    name: str | None
    timeout_s: float | None
    call_site: CallSite | None


class AlgorithmOptions(Options, total=False):
    """Keyword arguments of operations that have several algorithms."""

    algorithm: str | None


class ExactOptions(AlgorithmOptions, total=False):
    """Keyword arguments of `all_reduce` and `reduce_scatter` of a tree of arrays."""

    exact: bool


class AllReduceOptions(ExactOptions, total=False):
    """Keyword arguments of `all_reduce` of an array."""

    shared: bool


class ReduceScatterOptions(ExactOptions, total=False):
    """Keyword arguments of `reduce_scatter` of an array."""

    counts: Rows | None


class BroadcastOptions(AlgorithmOptions, total=False):
    """Keyword arguments of `broadcast` of an array."""

    shared: bool


class AllGatherOptions(BroadcastOptions, total=False):
    """Keyword arguments of `all_gather` of an array."""

    counts: Rows | None


class AllToAllOptions(AlgorithmOptions, total=False):
    """Keyword arguments of `all_to_all` of an array."""

    counts: RowTable | None
