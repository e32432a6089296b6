"""Keeps the timeline of a world when it ends, well or badly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING

import trio

from .. import trace_files
from ..config import RunConfig
from ..errors import TraceWarning, UsageError
from ..timeline.spans import Timeline

if TYPE_CHECKING:
    from .member import Membership


class Keeper:
    """Keeps the timeline of one run. What it cannot write costs neither the results nor the error that is due."""

    def __init__(self, wanted: RunConfig) -> None:
        self._wanted = wanted
        self._trouble: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether there was something that it could not write."""
        return self._trouble is not None

    async def keep(self, timeline: Callable[[], Timeline], membership: Membership | None) -> None:
        """Hand on what was recorded; of several processes, the first one writes it for all."""
        if self._wanted.watcher is not None:
            self._wanted.watcher(timeline())
        if self._wanted.trace is None:
            return
        with self._minding(), trio.CancelScope(shield=True):
            if membership is None:  # in a thread: there may be much to write, and the loop may be the user's
                await trio.to_thread.run_sync(self._write, timeline, self._wanted.trace)
                return
            from .shared_trace import write_together

            if await write_together(timeline, self._wanted.trace, membership):
                trace_files.keep(self._wanted.trace)

    def keep_now(self, timeline: Callable[[], Timeline]) -> None:
        """Do so for a world in virtual time, whose loop waits for nothing real."""
        if self._wanted.watcher is not None:
            self._wanted.watcher(timeline())
        if self._wanted.trace is not None:
            with self._minding():
                self._write(timeline, self._wanted.trace)

    def _write(self, timeline: Callable[[], Timeline], path: str | PathLike[str]) -> None:
        from ..timeline.files.tracefile import write_trace

        write_trace(timeline(), path)
        trace_files.keep(path)

    @contextmanager
    def _minding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, the run is over, and its results or its error are what counts
            usual = isinstance(error, UsageError)
            self._trouble = str(error) if usual else f"trace: cannot write {self._wanted.trace}: {error!r}"

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note on what the block raises what could not be written."""
        try:
            yield
        except BaseException as error:
            if self._trouble is not None:
                error.add_note(self._trouble)
            raise

    def warn(self) -> None:
        """Warn of what could not be written."""
        if self._trouble is not None:
            warnings.warn(TraceWarning(self._trouble), stacklevel=3)
