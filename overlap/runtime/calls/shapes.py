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

    # The element type of an array, kept from argument to result; of None, any
    S = TypeVar("S", bound=np.generic, default=np.generic)
    # A tree of arrays, and of its results
    Arrays = TypeVar("Arrays", bound="Tree")
    # The `out` of a call, which is its result; without one, the result is an array
    Out = TypeVar("Out", bound="Output", default="Array")
    # An object that travels to other ranks; or the values of a dict or sequence of futures
    V = TypeVar("V")

Op: TypeAlias = Literal["sum", "mean", "max", "min", "prod", "band", "bor", "bxor"] | str
"""A name in `overlap.OPS`. Editors offer the names that are always there; a program may add entries."""


class SupportsArray(Protocol):
    """An object that numpy can make an array of."""

    def __array__(self) -> NDArray[np.generic]:
        """Return its array."""


class SupportsDLPack(Protocol):
    """An object that exports its memory by DLPack, such as a tensor of PyTorch."""

    def __dlpack__(self) -> object:
        """Return a capsule of its memory."""


Of: TypeAlias = "NDArray[S] | S | Future[NDArray[S]] | Future[S]"
"""An array of known element type, or a future of one."""

Numbers: TypeAlias = "complex | Sequence[Numbers] | Future[complex]"
"""Plain numbers, which numpy makes an array of; for type checkers, `complex` includes the other types."""

Memory: TypeAlias = "Buffer | SupportsArray | SupportsDLPack"
"""An object that exports its memory, which is used without a copy."""

Tree: TypeAlias = "Mapping[str, object] | Mapping[int, object] | Sequence[object]"
"""A dict, list or tuple of arrays or futures of them, at any depth."""

Output: TypeAlias = "Array | Memory"
"""An object that a result may be written to."""

SingleInput: TypeAlias = "Array | np.generic | Numbers | Memory | Future[object]"
"""Any input of a collective but a tree."""

Input: TypeAlias = "SingleInput | Tree"
"""Any input of a collective."""

Like: TypeAlias = "tuple[Shape, str | type[float] | type[np.generic] | np.dtype[np.generic]]"
"""Shape and element type of a new array."""

Rows: TypeAlias = "Sequence[int] | NDArray[np.integer]"
RowTable: TypeAlias = "Sequence[Rows] | NDArray[np.integer]"
DTypeOf: TypeAlias = "type[S] | np.dtype[S]"
Shape: TypeAlias = "int | Sequence[int]"


class Options(TypedDict, total=False):
    """Keywords of every operation; see `GroupCalls`."""

    priority: int
    stream: Stream | str | None
    name: str | None
    timeout_s: float | None
    call_site: CallSite | None


class Chosen(Options, total=False):
    """Keywords of operations that have several algorithms."""

    algorithm: str | None


class Exact(Chosen, total=False):
    """Keywords of reductions of trees."""

    exact: bool


class ExactShared(Exact, total=False):
    """Keywords of `all_reduce`."""

    shared: bool


class CountsExact(Exact, total=False):
    """Keywords of `reduce_scatter`."""

    counts: Rows | None


class Shared(Chosen, total=False):
    """Keywords of `broadcast`."""

    shared: bool


class CountsShared(Shared, total=False):
    """Keywords of `all_gather`."""

    counts: Rows | None


class Counts(Chosen, total=False):
    """Keywords of `all_to_all`."""

    counts: RowTable | None
