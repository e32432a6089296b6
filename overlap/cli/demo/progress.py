"""How far the demo is: one line that changes on a terminal, a few lines in a log."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

CELLS = 24
LOGGED = 4  # lines in a log


class Bar:
    """Shows finished steps and the loss; use it in a `with` statement.

    It draws only when told to, between steps, so that drawing takes no time from what is being measured.

    Args:
        console: Where to; a terminal gets a bar, anything else plain lines.
        steps: How many there will be.
        ascii: Draw with `#` and `.` only.
    """

    def __init__(self, console: Console, *, steps: int, ascii: bool) -> None:
        self._console, self._steps = console, steps
        self._glyphs = "#." if ascii or console.options.ascii_only else "█░"
        self._done = 0
        live = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(Text(""), console=console, auto_refresh=False, transient=True) if live else None

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print something above the bar."""
        self._console.print(text, soft_wrap=True)

    def advance(self, loss: float) -> None:
        """Count a step."""
        self._done += 1
        done = f"step {self._done} of {self._steps}, loss {loss:.3f}"
        if self._live is not None:
            filled = CELLS * self._done // self._steps
            bar = self._glyphs[0] * filled + self._glyphs[1] * (CELLS - filled)
            self._live.update(Text(f"{bar} {done}", no_wrap=True, overflow="crop"), refresh=True)
        elif self._done * LOGGED // self._steps > (self._done - 1) * LOGGED // self._steps:
            self.say(done)
