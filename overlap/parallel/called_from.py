"""Where in the user's program a strategy was called: what it issues is told under that line."""

from __future__ import annotations

import os
from sys import _getframe
from types import FrameType

import outcome
import trio

_HERE = os.path.dirname(__file__) + os.sep
_TASKS = tuple(os.path.dirname(str(each.__file__)) + os.sep for each in (trio, outcome))


def users_frame() -> FrameType:
    """Return the innermost frame outside this package; in a task of its own, which nobody has called, that of the call.

    Cost: 0.2 us and 0.1 us for each frame in between.
    """
    own = frame = _getframe(1)
    while frame.f_code.co_filename.startswith(_HERE):
        if frame.f_back is None:
            return own
        frame = frame.f_back
    return own if frame.f_code.co_filename.startswith(_TASKS) else frame
