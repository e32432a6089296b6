"""The profiler of torch: a process has one, so the first rank that starts it has it until it stops it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .torch_rank import TorchRank


class NoEvents:
    """Result of a profiler that a rank started while another rank had the profiler of torch: no events."""

    def events(self) -> list[Any]:
        """Return no events."""
        return []

    experimental_event_tree = events

    def trace_start_ns(self) -> int:
        """Return 0: nothing was recorded."""
        return 0

    def save(self, path: str) -> None:
        """Write an empty trace."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": []}, file)


class Profiler:
    """Owner of torch's profiler: one rank at a time."""

    def __init__(self) -> None:
        self._owner: TorchRank | None = None

    def start(self, rank: TorchRank, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Prepare or start the profiler for a rank; if another rank has it, do nothing, and return None."""
        if self._owner is not None and self._owner is not rank:
            return None
        self._owner = rank
        return original(*args, **options)

    def stop(self, rank: TorchRank, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Stop the profiler, and return its result; for a rank that does not have it, return `NoEvents`."""
        if self._owner is not rank:
            return NoEvents()
        self._owner = None
        return original(*args, **options)
