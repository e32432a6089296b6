"""Interrupts at chosen lines of our own packages, as if Ctrl-C came there."""

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from linecache import getline
from opcode import opmap
from random import Random
from types import FrameType
from typing import Any, TypeAlias

from overlap.diagnostics import is_ours
from overlap.threads import read_frames

Line: TypeAlias = tuple[str, int]


class Tracer:
    """Counts the lines of our packages that the main thread passes, and interrupts it at one of them.

    Args:
        line: The line; with None, none.
        turn: How often the line has been passed then, counted from 1.
        after_calls: Whether a line counts once more after each of its calls that unpack arguments, as in `f(*args)`:
            Python 3.11 looks for signals there.
    """

    def __init__(self, line: Line | None = None, turn: int = 0, *, after_calls: bool = False) -> None:
        self.passed, self._line, self._turn = Counter[Line](), line, turn
        self._after_calls = after_calls
        self.interrupted = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        frame.f_trace_opcodes = self._after_calls
        return self._on_line if is_ours(frame.f_code) else None

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        before = frame.f_code.co_code[max(frame.f_lasti - 2, 0)]
        if event == "line" or (event == "opcode" and before == opmap["CALL_FUNCTION_EX"]):
            line = frame.f_code.co_filename, frame.f_lineno
            self.passed[line] += 1
            if line == self._line and self.passed[line] == self._turn:
                self.interrupted = True
                sys.settrace(None)
                handler: Any = signal.getsignal(signal.SIGINT)
                handler(signal.SIGINT, frame)
                return None
        return self._on_line

    def run(self, program: Callable[[], object]) -> type[BaseException] | None:
        """Run a program; return the type of the error that ends it."""
        before = sys.gettrace()
        try:
            sys.settrace(self)
            program()
        except BaseException as error:
            return type(error)
        finally:
            sys.settrace(before)
        return None


def sample(passed: Counter[Line], count: int, seed: int) -> list[tuple[Line, int]]:
    """Return some of the lines that a program has passed, and for each the turn at which to interrupt it.

    Where a turn is returned, and at a `try:`, also one within a `finally:`, the interpreter looks for no signals: no
    call and no loop comes right before it.
    """
    chance, never = Random(seed), ("try:", "leave()")
    lines = [each for each in sorted(passed.items()) if not getline(*each[0]).strip().startswith(never)]
    return [(line, chance.randint(1, turns)) for line, turns in chance.sample(lines, count)]


def interrupt_wait(thread: int, ended: threading.Event) -> None:
    """Send one interrupt to a thread once it waits in a function of ours."""
    while not ended.wait(0.001):
        frames = read_frames(thread)
        if (
            frames
            and is_ours(frames[0].f_code)
            and frames[0].f_code.co_name in ("wait", "wait_in_engine", "wait_for_lock", "_wait")
        ):
            signal.pthread_kill(thread, signal.SIGINT)
            return
