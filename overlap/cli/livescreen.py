"""Screens of `overlap top`: the whole terminal, the lines below a program's output, or plain lines."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import localtime, monotonic, strftime
from typing import TextIO

from rich.text import Text

from ..live.screen import Line, brief, lines, title
from ..live.worlds import RunningWorld, Sampler
from .console import Console

_PANEL_LINES = 12
_LOOK_S = 0.2  # delay until the end of the job, a key or a signal is noticed


def is_terminal(file: TextIO) -> bool:
    """Whether a file is a terminal with a movable cursor."""
    console = Console(file=file)
    return console.is_terminal and not console.is_dumb_terminal and file.isatty()


class Show:
    """Looks at a world, as text.

    Args:
        world: The world.
        looks: How it is looked at.
        ascii: Whether to draw without block characters.
    """

    looks: Sampler

    def __init__(self, world: RunningWorld, looks: Sampler, *, ascii: bool) -> None:
        self.looks, self._world, self._ascii = looks, world, ascii

    @property
    def lives(self) -> bool:
        """Whether the world runs."""
        return self._world.lives

    def once(self, file: TextIO) -> None:
        """Print one look, in as many rows as the screen has."""
        console = Console(file=file)
        height = console.height if console.is_terminal else 1 << 30
        file.write("".join(line + "\n" for line in self.frame(console, height - 1)))
        file.flush()

    def frame(self, console: Console, height: int) -> list[str]:
        """Take a look, and return its lines for a console, with its colours."""
        ascii = self._ascii or console.plain
        taken = self.looks.take()  # before the title, which may say what came of it
        drawn = lines(taken, self._title(), width=console.width, height=max(height, 6), ascii=ascii)
        return [_styled(console, line) for line in drawn]

    def line(self) -> str:
        """Take a look, and return it in one line."""
        return brief(self.looks.take())

    def _title(self) -> str:
        world = self._world
        return title(
            job=world.job, script=os.path.basename(world.script), ranks=world.size, where=world.where, age_s=world.age_s
        )


def _styled(console: Console, line: Line) -> str:
    if not console.coloured:
        return "".join(text for text, _ in line)
    with console.capture() as capture:
        console.print(Text.assemble(*line, no_wrap=True, overflow="crop"), end="")
    return capture.get()


class Paper:
    """Plain lines, for pipes and for terminals on which nothing can be drawn."""

    def __init__(self, show: Show, file: TextIO) -> None:
        self._show, self._file = show, file

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Write a line after each pause, as long as `goes_on` says so."""
        while _pause(self._show.looks.pause_s, goes_on):
            print(f"overlap: {strftime('%H:%M:%S', localtime())} {self._show.line()}", file=self._file, flush=True)


def full_screen(show: Show, file: TextIO) -> None:
    """Draw on the whole screen until q, Ctrl-C, or the end of the world; then leave the last look."""
    last: list[str] = []
    with _keys() as pressed:
        file.write("\x1b[?1049h\x1b[?25l")
        try:
            while show.lives:
                console = Console(file=file)
                last = show.frame(console, console.height - 1)
                file.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in last) + "\x1b[J")
                file.flush()
                if not _pause(show.looks.pause_s, lambda: show.lives and not pressed()):
                    break
        finally:
            file.write("\x1b[?25h\x1b[?1049l")
            file.write("".join(f"{line}\n" for line in last))
            file.flush()


class Panel:
    """The lowest lines of a terminal; output of programs scrolls above them."""

    def __init__(self, show: Show, file: TextIO) -> None:
        self._show, self._file = show, file

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Draw after each pause, as long as `goes_on` says so; then free the lines."""
        ended: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
        size = (0, 0)
        try:
            while not ended and goes_on():
                console = Console(file=self._file)
                height = min(_PANEL_LINES, console.height // 2)
                if height < 6:
                    return  # there is no room for it
                drawn = self._show.frame(console, height)
                if (console.height, height) != size:
                    size = console.height, height
                    self._file.write("\n" * height + f"\x1b7\x1b[1;{console.height - height}r\x1b8\x1b[{height}A")
                self._file.write(panel_frame(drawn, rows=console.height, height=height))
                self._file.flush()
                _pause(self._show.looks.pause_s, lambda: not ended and goes_on())
        finally:
            if size[0]:
                self._file.write("\x1b7\x1b[r\x1b8" + panel_frame([], rows=size[0], height=size[1]))
                self._file.flush()
            signal.signal(signal.SIGTERM, before)
            if ended:
                sys.exit(0)


def panel_frame(drawn: list[str], *, rows: int, height: int) -> str:
    """Return the control codes that write lines at the bottom of a screen and restore the cursor.

    >>> panel_frame(["a", "b"], rows=24, height=2)
    '\\x1b7\\x1b[23;1Ha\\x1b[K\\x1b[24;1Hb\\x1b[K\\x1b8'
    """
    texts = [*drawn, *[""] * (height - len(drawn))]
    placed = (f"\x1b[{rows - height + 1 + at};1H{text}\x1b[K" for at, text in enumerate(texts))
    return "\x1b7" + "".join(placed) + "\x1b8"


def _pause(for_s: float, goes_on: Callable[[], bool]) -> bool:
    """Wait as long as `goes_on` says so; return what it says at the end."""
    end_s = monotonic() + for_s
    while goes_on():
        left_s = end_s - monotonic()
        if left_s <= 0:
            return True
        select.select([], [], [], min(left_s, _LOOK_S))
    return False


@contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether q was pressed."""
    if not sys.stdin.isatty():
        yield lambda: False
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def pressed() -> bool:
        ready, _, _ = select.select([descriptor], [], [], 0)
        return bool(ready) and os.read(descriptor, 1) in (b"q", b"Q", b"")

    try:
        yield pressed
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
