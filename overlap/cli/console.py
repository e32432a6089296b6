"""Console of commands: rich's, except that a broken pipe raises an error that `failure` judges."""

from __future__ import annotations

from typing import Any

import rich.console

_USUAL_WIDTH = 80


class Console(rich.console.Console):
    """Raises `BrokenPipeError` where rich would end the process, which from a rank looks like its failure.

    Args:
        width: Columns; None: those of the terminal, and 80 where COLUMNS says 0, with which nothing would be shown.
        options: As rich's.
    """

    def __init__(self, *, width: int | None = None, **options: Any) -> None:
        super().__init__(width=width, **options)
        if width is None and self.width < 1:
            self.width = _USUAL_WIDTH

    @property
    def plain(self) -> bool:
        """Whether the encoding of the output can show only ASCII."""
        return self.options.ascii_only or self.is_dumb_terminal

    @property
    def coloured(self) -> bool:
        """Whether colours and styles are shown."""
        return self.color_system is not None and not self.no_color

    def on_broken_pipe(self) -> None:
        """Raise the error that rich is handling; `failure.report` judges it."""
        raise  # rich calls this where it has caught it
