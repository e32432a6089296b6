"""How far the demo is: one line that changes on a terminal, a few lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...timeline.draw.theme import ASCII_BAR, BLOCK_BAR

CELLS = 24
LOGGED = 4  # lines in a log


@contextmanager
def progress(console: Console, *, steps: int, ascii: bool) -> Iterator[Callable[[float], None]]:
    """Give a function that counts a step and shows its loss; a terminal gets a bar, anything else plain lines.

    Nothing is drawn but in that function, between steps, so that drawing takes no time from what is being measured.
    """
    full, empty = tuple(ASCII_BAR if ascii else BLOCK_BAR)
    terminal = console.is_terminal and not console.is_dumb_terminal
    done = 0

    def advance(loss: float) -> None:
        nonlocal done
        done += 1
        text = f"step {done} of {steps}, loss {loss:.3f}"
        if live is not None:
            filled = CELLS * done // steps
            bar = f"{full * filled}{empty * (CELLS - filled)} {text}"
            live.update(Text(bar, no_wrap=True, overflow="crop"), refresh=True)
        elif done * LOGGED // steps > (done - 1) * LOGGED // steps:
            console.print(text, soft_wrap=True)

    with Live(console=console, auto_refresh=False, transient=True) if terminal else nullcontext() as live:
        yield advance
