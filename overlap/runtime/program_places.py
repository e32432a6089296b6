"""Where a rank's program is: the lines at which its tasks stand, found only when somebody asks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import dropwhile, takewhile
from types import CodeType
from typing import TypeAlias

import outcome
import trio
from trio.lowlevel import Task

from ..diagnostics import is_ours, program_point
from ..timeline.recording import call_site

Points: TypeAlias = list[tuple[CodeType, int]]
"""Code and instruction of some frames, outermost first."""

# Frames of what makes tasks wait: trio, and the library by which it hands over what they waited for.
_TRIO = tuple(os.path.join(os.path.dirname(str(module.__file__)), "") for module in (trio, outcome))
_JOINING = ("__aexit__", "_nested_child_finished")  # of a nursery that waits for its children


def tasks_of(task: Task) -> Iterator[Task]:
    """Yield a task, those in its nurseries, those in theirs, and so on."""
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from tasks_of(child)


def program_places(task: Task) -> list[str]:
    """Return "file:line" of each task of a rank that waits for something other than our operations; each place once.

    Args:
        task: The one in which the rank's program runs.
    """
    places: dict[str, None] = {}
    for each in tasks_of(task):
        points = [(frame.f_code, frame.f_lasti) for frame, _ in each.iter_await_frames()]
        if not (each.child_nurseries and _joins(points)):  # else its children stand for it
            places[_outside(points)] = None
    return [place for place in places if place]


def place_in(error: BaseException) -> str:
    """Return "file:line" where the program was when an error reached it; empty if it waited for our operations."""
    points: Points = []
    traceback = error.__traceback__
    while traceback is not None:
        points.append((traceback.tb_frame.f_code, traceback.tb_lasti))
        traceback = traceback.tb_next
    return _outside(points)


def place_of(points: Points) -> str:
    """Return "file:line" of the innermost of them that is the program's, or at least not ours; empty if none is."""
    point = program_point(points)
    return "" if point is None else call_site(*point)


def _outside(points: Points) -> str:
    """Return where a task is that waits for something; empty if that is one of our operations."""
    waits = list(dropwhile(_is_trio, reversed(points)))
    return place_of(points) if waits and not is_ours(waits[0][0]) else ""


def _joins(points: Points) -> bool:
    return any(point[0].co_name in _JOINING for point in takewhile(_is_trio, reversed(points)))


def _is_trio(point: tuple[CodeType, int]) -> bool:
    return point[0].co_filename.startswith(_TRIO)
