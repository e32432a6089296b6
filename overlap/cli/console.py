"""The console on which commands draw: rich's, except that a pipe which nobody reads any longer is our own to judge."""

from __future__ import annotations

import rich.console

__all__ = ["Console"]


class Console(rich.console.Console):
    """Raises `BrokenPipeError` where rich would end the process, which from a rank looks like its failure."""

    def on_broken_pipe(self) -> None:
        """Let the error through that rich is handling: `failure.report` knows what it means."""
        raise  # rich calls this where it has caught it
