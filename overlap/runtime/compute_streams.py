"""The compute streams of one rank: the default one, and those that run functions beside it."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UsageError, shown
from .compute import DEFAULT_LANE, ComputeFuture, ComputeStream


class ComputeStreams:
    """The compute streams of one rank, made when they are first used.

    Args:
        make: Returns a new stream, given its lane in the timeline.
    """

    def __init__(self, make: Callable[[str], ComputeStream]) -> None:
        self._make = make
        self.default = make(DEFAULT_LANE)
        self._streams = {DEFAULT_LANE: self.default}

    @property
    def current(self) -> ComputeFuture[object] | None:
        """What a thread works on now, if one does."""
        return next((each.current for each in self._streams.values() if each.current is not None), None)

    def find(self, name: str | None) -> ComputeStream:
        """Return the stream of that name, or the default one; the loop's thread only."""
        if name is None:
            return self.default
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = self._make(name)
        return found

    def stop(self) -> None:
        """Let the functions that are running finish, and no other start."""
        for stream in self._streams.values():
            stream.stop()

    async def ended(self) -> None:
        """Wait until nothing runs any more; `stop` first."""
        for stream in self._streams.values():
            await stream.ended()


def check_stream(name: str | None) -> None:
    """Refuse what cannot name a compute stream.

    Raises:
        UsageError: If it is no text, or an empty one.
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise UsageError(f"stream: expected the name of a compute stream, got {shown(name)}")
