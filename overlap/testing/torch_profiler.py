"""The profiler of torch, which a process has once: the first rank that starts it has it until it stops it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .threads import RankThread


class NoEvents:
    """Result of a profiler that was started while another rank had torch's: it has recorded nothing."""

    def events(self) -> list[Any]:
        """Return no events."""
        return []

    experimental_event_tree = events

    def trace_start_ns(self) -> int:
        """Return the time at which it began."""
        return 0

    def save(self, path: str) -> None:
        """Write an empty trace."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": []}, file)


class Profiler:
    """Which rank has the profiler of torch."""

    def __init__(self) -> None:
        self._holder: RankThread[Any] | None = None

    def start(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Prepare or start it, unless another rank has it."""
        here = RankThread.here()
        if self._holder is not None and self._holder is not here:
            return None
        self._holder = here
        return original(*args, **options)

    def stop(self, original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Stop it, and return the recorded events."""
        if self._holder is not RankThread.here():
            return NoEvents()
        self._holder = None
        return original(*args, **more)
