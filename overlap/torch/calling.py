"""Where in the user's program a call came from, below torch's frames and ours."""

from __future__ import annotations

import os
import sys
from types import CodeType

import torch

__all__ = ["Site", "users_site"]

_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
# By code object: whether it is torch's or ours. What a program has grows no further than its functions.
_KNOWN: dict[CodeType, bool] = {}


class Site:
    """A line of a program; its text is made when somebody asks."""

    __slots__ = ("code", "instruction")

    def __init__(self, code: CodeType, instruction: int) -> None:
        self.code, self.instruction = code, instruction

    def __str__(self) -> str:
        lines = [line for start, end, line in self.code.co_lines() if start <= self.instruction < end and line]
        return f"{os.path.basename(self.code.co_filename)}:{lines[0] if lines else self.code.co_firstlineno}"


def users_site() -> Site:
    """Return where the innermost frame is that is neither torch's nor ours; the outermost one, where all are."""
    frame = sys._getframe(1)
    known = _KNOWN
    while True:
        code = frame.f_code
        inside = known.get(code)
        if inside is None:
            inside = known[code] = code.co_filename.startswith(_LIBRARIES)
        if not inside or frame.f_back is None:
            return Site(code, frame.f_lasti)
        frame = frame.f_back
