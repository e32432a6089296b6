"""Where in the user's program a call came from, below torch's frames and ours."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import CodeType, FrameType

import torch
import typing_extensions

# And what torch wraps its functions in: those that are deprecated, and contexts.
_LIBRARIES = (
    *(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__))),
    *(str(module.__file__) for module in (typing_extensions, warnings, contextlib)),
)
# By code object: whether it is torch's or ours. What a program has grows no further than its functions.
_KNOWN: dict[CodeType, bool] = {}


def users_frame() -> FrameType:
    """Return the innermost frame that is neither torch's nor ours; the outermost one, where all are."""
    frame = sys._getframe(1)
    known = _KNOWN
    while True:
        code = frame.f_code
        inside = known.get(code)
        if inside is None:
            inside = known[code] = code.co_filename.startswith(_LIBRARIES)
        if not inside or frame.f_back is None:
            return frame
        frame = frame.f_back


def line_of(frame: FrameType) -> str:
    """Return the line of a frame as messages have it."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
