"""Console of commands: that of rich, except that a broken pipe raises an error, which `launch.report` handles."""

from __future__ import annotations

from typing import Any

import rich.console

_USUAL_WIDTH = 80
_MOST_WIDTH = 10_000  # rich builds lines in full width: more columns take minutes, or fail


class Console(rich.console.Console):
    """A console that raises `BrokenPipeError` for a broken pipe; rich would end the process.

    Args:
        width: Columns, 10,000 at most; None: those of the terminal, or 80 if COLUMNS is 0.
        options: Further arguments of rich's console.
    """

    def __init__(self, *, width: int | None = None, **options: Any) -> None:
        super().__init__(width=width, **options)
        if self.width > _MOST_WIDTH:  # only then: a width that is set does not follow the terminal any more
            self.width = _MOST_WIDTH
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
        """Raise the error that rich is handling."""
        raise  # rich calls this method in its `except` block
