"""Screens of `overlap top`: the whole terminal, or plain lines."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import localtime, monotonic, strftime
from typing import TextIO

from rich.live import Live
from rich.text import Text

from ..live.screen import brief, lines, title
from ..live.worlds import RunningWorld, Sampler
from .console import Console

_LOOK_S = 0.2  # delay until the end of the job or a key is noticed


def is_terminal(file: TextIO) -> bool:
    """Whether a file is a terminal with a movable cursor."""
    console = Console(file=file)
    return console.is_terminal and not console.is_dumb_terminal and file.isatty()


class Show:
    """Pictures of a world.

    Args:
        world: The world.
        looks: Samples of its work.
        file: Output.
        ascii: Whether to draw without block characters.
    """

    def __init__(self, world: RunningWorld, looks: Sampler, file: TextIO, *, ascii: bool) -> None:
        self._world, self._looks, self._console = world, looks, Console(file=file, highlight=False)
        self._ascii = ascii or self._console.plain

    def once(self) -> None:
        """Print one picture of the world, in as many rows as the screen has."""
        height = self._console.height if self._console.is_terminal else 1 << 30
        self._console.print(self._draw_picture(height - 1))

    def full_screen(self) -> None:
        """Draw on the whole screen until q, Ctrl-C, or the end of the world; then leave the last picture."""
        last = Text()
        screen = Live(console=self._console, screen=True, auto_refresh=False, redirect_stdout=False)
        try:
            with _keys() as is_q_pressed, screen:
                while self._world.lives:
                    last = self._draw_picture(self._console.height - 1)
                    screen.update(last, refresh=True)
                    if not _pause(self._looks.pause_s, lambda: self._world.lives and not is_q_pressed()):
                        break
        finally:
            self._console.print(last)

    def on_paper(self) -> None:
        """Print a line after each pause until the end of the world, for pipes and simple terminals."""
        while _pause(self._looks.pause_s, lambda: self._world.lives):
            text = brief(self._looks.take_sample())
            print(f"overlap: {strftime('%H:%M:%S', localtime())} {text}", file=self._console.file, flush=True)

    def _draw_picture(self, height: int) -> Text:
        """Return one picture of at least six lines: the title with the world's age, and the figures of its ranks."""
        figures, world = self._looks.take_sample(), self._world  # before the title, which has the world's age
        head = title(
            job=world.job, script=os.path.basename(world.script), ranks=world.size, where=world.where, age_s=world.age_s
        )
        drawn = lines(figures, head, width=self._console.width, height=max(height, 6), ascii=self._ascii)
        return Text("\n", no_wrap=True, overflow="crop").join(Text.assemble(*line) for line in drawn)


def _pause(for_s: float, goes_on: Callable[[], bool]) -> bool:
    """Wait until the time is over or `goes_on` is false; return the last value of `goes_on`."""
    end_s = monotonic() + for_s
    while goes_on():
        left_s = end_s - monotonic()
        if left_s <= 0:
            return True
        select.select([], [], [], min(left_s, _LOOK_S))
    return False


@contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether q was pressed; the terminal passes keys at once within the block."""
    if not sys.stdin.isatty():
        yield lambda: False
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def is_q_pressed() -> bool:
        """Return whether q was pressed, or the input has ended, since the last call; it never waits."""
        ready, _, _ = select.select([descriptor], [], [], 0)
        return bool(ready) and os.read(descriptor, 1) in (b"q", b"Q", b"")

    try:
        yield is_q_pressed
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
