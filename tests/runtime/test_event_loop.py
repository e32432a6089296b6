"""The way from threads to the event loop."""

import sys
from types import FrameType
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from overlap.runtime.handover import Handover


def test_each_thread_that_posts_after_the_end_of_the_loop_hears_of_it() -> None:
    async def main() -> Handover:
        return Handover(trio.lowlevel.current_trio_token())

    handover = trio.run(main)
    for _ in range(3):
        with pytest.raises(trio.RunFinishedError):
            handover.post(print)


def post_interrupted(handover: Handover, line: int, called: list[str]) -> bool:
    """Post a call, and interrupt it before one of its lines; return whether there was such a line."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        if frame.f_code is not Handover.post.__code__:
            return None
        lines += event == "line"
        if event == "line" and lines == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        handover.post(called.append, "interrupted")
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_post_after_one_that_was_interrupted_anywhere_is_called() -> None:
    async def main() -> int:
        line, handover = 1, Handover(trio.lowlevel.current_trio_token())
        while post_interrupted(handover, line, called := list[str]()):
            handover.post(called.append, "later")
            await wait_all_tasks_blocked()
            assert called in (["later"], ["interrupted", "later"])
            line += 1
        return line

    assert trio.run(main) > 4
