"""Calls: the checked part of an operation that all ranks must agree on.

Calls are interned, so that ranks which agree hold the same object and steady-state checks cost one look-up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from .kinds import (
    Collective,
    Counts,
    Shape,
    check_input,
    describe_counts,
    largest_row_count,
    result_row_count,
    result_shape,
)
from .reduce import Reducer, check_dtype, find_reducer

Pairs = tuple[tuple[int, int], ...]

# An array in the text of a tree.
_LEAF = re.compile(r"'(\w+ \([\d, ]*\))'")


class CallKey(NamedTuple):
    """Values that all ranks of a call must agree on: fields of `Call`, as plain values for other processes."""

    kind: str
    op: str | None
    dtype: str | None
    shape: Shape | None
    size: int
    root: int
    pairs: Pairs
    counts: Counts
    exact: bool
    shared: bool
    algorithm: str | None
    form: str

    def without_data(self) -> CallKey:
        """Return the key without dtype, shape, op and form, as a rank that only receives may lack them."""
        return self._replace(op=None, dtype=None, shape=None, form="")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One collective on one group, without its data."""

    kind: Collective  # The collective
    op: str | None  # Reduction operator, if it reduces
    dtype: np.dtype[np.generic] | None  # Type of the arrays; None if a rank only receives and gave none
    shape: Shape | None  # Shape of a sender's input, or of all blocks if their sizes differ; None like `dtype`
    size: int  # Ranks in the group
    root: int  # Group rank, 0 where there is none
    pairs: Pairs  # (source, destination) ranks of a permute
    counts: Counts  # Rows of every block (see `counts`) where they differ, else ()
    exact: bool  # Whether every element is reduced in the order of ranks
    shared: bool  # Whether the ranks of one host may have one result together, which nobody changes
    algorithm: str | None  # The only algorithm to use; None leaves the choice to the run
    form: str  # Text of a message's tree of arrays, see `runtime.forms`; "" for an array
    reducer: Reducer | None  # The operator on the dtype
    result_shape: Shape  # Shape of a receiver's result, if blocks have one size; see `result_shape_at`
    # Bytes of the larger of input and result, as nccl-tests counts sizes; if blocks differ, of the rank with most.
    nbytes: int
    work_bytes: int  # Bytes of float32 whose reduction takes as long as that of one rank's array
    # Values that all ranks must agree on: the identity of a call, in one process and on the wire.
    key: CallKey

    @property
    def has_all_values(self) -> bool:
        """Whether dtype, shape and all other values that a program needs are known."""
        # dtype and shape become known together; a barrier has no dtype
        return self.dtype is not None or self.kind is Collective.BARRIER

    def result_shape_at(self, position: int) -> Shape:
        """Return the shape of the result that a receiver at a position of the group gets."""
        if not self.counts:
            return self.result_shape
        return (result_row_count(self.kind, self.counts, self.size, position), *self.result_shape[1:])

    def receives_at(self, position: int) -> bool:
        """Whether the member at a position of the group receives anything from another one."""
        traits = self.kind.traits
        if traits.rooted:
            only_root = traits.reduces or traits.gathers  # otherwise all ranks but the root receive
            return (position == self.root) == only_root
        return self.kind is not Collective.PERMUTE or any(target == position for _, target in self.pairs)

    def agrees(self, other: Call) -> bool:
        """Whether two ranks issued the same call; a call without dtype and shape agrees with any."""
        if self.dtype is None or other.dtype is None:
            return self.key.without_data() == other.key.without_data()
        return self.key == other.key

    def __str__(self) -> str:
        if self.kind is Collective.BARRIER:
            return "barrier()"
        arguments = f"{self.dtype} {self.shape}" if self.dtype is not None else "None"
        if self.form:
            arguments = _LEAF.sub(r"\1", self.form)
        if self.op is not None:
            arguments += f", op={self.op!r}"
        if self.kind.traits.rooted:
            arguments += f", root={self.root}"
        if self.kind is Collective.PERMUTE:
            arguments += f", pairs={list(self.pairs)}"
        if self.counts:
            arguments += f", counts={describe_counts(self.counts, self.kind, self.size)}"
        if self.exact:
            arguments += ", exact=True"
        if self.shared:
            arguments += ", shared=True"
        if self.algorithm is not None:
            arguments += f", algorithm={self.algorithm!r}"
        return f"{self.kind.value}({arguments})"


def _make_call(
    kind: str,
    op: str | None,
    dtype: np.dtype[np.generic] | None,
    shape: Shape | None,
    size: int,
    root: int = 0,
    pairs: Pairs = (),
    counts: Counts = (),
    exact: bool = False,
    shared: bool = False,
    algorithm: str | None = None,
    form: str = "",
) -> Call:
    """Check the arguments of a rank's operation, and return its `Call`; the arguments are the fields of `Call`.

    A rank that only receives may lack dtype or shape. Its call then has no dtype, shape, counts or form. `kind` is the
    value of a `Collective`. Raises `UsageError` for a dtype, operator, shape or counts that the collective cannot take.
    """
    collective = Collective(kind)
    traits = collective.traits
    operator: Reducer | None = None
    result: Shape = ()
    nbytes = 0
    if dtype is None or shape is None:
        # The call of a rank that only receives agrees with the call of the sender, whatever dtype and shape that has.
        dtype, shape, counts, form = None, None, (), ""
    else:
        check_dtype(dtype)
        operator = find_reducer(op, dtype) if traits.reduces else None
        if counts:
            result = (largest_row_count(collective, shape, counts, size), *shape[1:])
            elements = prod(result)
        else:
            if traits.scatters or traits.gathers:
                check_input(collective, shape, size)
            result = result_shape(collective, shape, size)
            elements = max(prod(shape), prod(result))
        nbytes = elements * dtype.itemsize
    name = None if dtype is None else dtype.name
    return Call(
        kind=collective, op=op, dtype=dtype, shape=shape, size=size, root=root, pairs=pairs, counts=counts, exact=exact,
        shared=shared, algorithm=algorithm, form=form, reducer=operator, result_shape=result, nbytes=nbytes,
        work_bytes=nbytes * (operator.weight if operator is not None else 1),
        key=CallKey(kind, op, name, shape, size, root, pairs, counts, exact, shared, algorithm, form),
    )  # fmt: skip


call: Callable[..., Call] = lru_cache(maxsize=4096)(_make_call)
# Cache of calls with counts: a table of 64 ranks takes 100 KiB, and the counts of routed experts never repeat.
uneven_call: Callable[..., Call] = lru_cache(maxsize=64)(_make_call)
