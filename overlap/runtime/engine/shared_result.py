"""One rank's end of a collective with a shared result, which lies once in memory that all ranks of a host map.

Each rank puts its part there: of an all-reduce it reduces a slice, of what is gathered it copies its own input, and of
a broadcast the root does all. Nobody reads what others have written before the operation is over. The processes take
turns at giving the memory; where one has no more of it, each rank gets an array of its own.
"""

from __future__ import annotations

from math import prod
from typing import cast

import numpy as np

from ...collectives.kinds import Collective
from ...collectives.reduce import Array
from ..match import Match
from ..memory.arrays import held
from ..operation import Operation
from .meeting import DONE, Meeting, Mode
from .on_host import HostRun, Posted, Stage
from .pulls import laid


class SharedRun(HostRun):
    """One rank's end of an operation with a result in common."""

    __slots__ = ("_dtype", "_nbytes", "_owner", "_shape")

    def __init__(self, meeting: Meeting, match: Match, operation: Operation) -> None:
        super().__init__(meeting, match, operation)
        self._owner = self._number % self._call.size  # whose turn it is to give the memory
        self._dtype, self._shape = cast("np.dtype[np.generic]", self._call.dtype), self._call.result_at(self._position)
        self._nbytes = prod(self._shape) * self._dtype.itemsize

    def _give(self) -> Posted:
        """Return where the input is, as far as others need it, and make room for the result on this rank's turn."""
        source, nbytes = self._operation.source, self._nbytes
        self._source = None if source is None else source.reshape(-1)
        self._target = None
        if self._owner == self._position and nbytes:
            home = self._board.lend_to_all(nbytes)
            if home is None:
                return Posted(0, Mode.HOMELESS)
            self._home = home
        if self._source is not None and nbytes and self._call.kind is Collective.ALL_REDUCE:
            return self._offer(self._source)
        return Posted(0, Mode.NOWHERE)

    def _plan(self, modes: set[int]) -> None:
        """Find the result, and plan what this rank puts there."""
        operation, nbytes = self._operation, self._nbytes
        self._lent = Mode.MAPPED in modes
        part = laid(self._call, self._position) if nbytes else []
        self._stages = [Stage(part, slicing=False, phase=DONE, waits=True)]
        # should it fail from now on, nobody gets the array, and so it is dropped
        operation.out = operation.target = self._result_here() if nbytes else np.empty(self._shape, self._dtype)

    def _result_here(self) -> Array:
        """Return the result, which cannot be written; this rank's part of it goes to `_target`."""
        home, owner, nbytes = self._board.result(self._owner, self._number), self._owner, self._nbytes
        view = self._board.mapped(owner, home, nbytes)
        self._target = np.frombuffer(view, np.uint8).view(self._dtype)
        left = self._board.left(self._position, owner, home, nbytes)
        return held(view.toreadonly(), self._shape, self._dtype, left)
