"""Who is at fault: from the error that surfaced to the rank and the line that caused it."""

from __future__ import annotations

import os
from traceback import extract_tb

from .errors import PeerError, PeerFailedError, RemoteError

__all__ = ["first", "only", "origin", "where"]


def only(group: BaseException) -> BaseException:
    """Unwrap the groups that nurseries make around one error; consequences of other ranks' errors do not count."""
    error = group
    while isinstance(error, BaseExceptionGroup):
        own = [e for e in error.exceptions if not isinstance(e, PeerError)] or list(error.exceptions)[:1]
        if len(own) > 1:
            return error
        error = own[0]
    return error


def first(group: BaseException) -> BaseException:
    """Take one error out of a group whose errors have one cause, such as both directions of a link that was cut."""
    error = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def origin(rank: int, error: BaseException) -> tuple[int, BaseException]:
    """Follow an error to the rank that caused it."""
    if isinstance(error, PeerError) and error.culprit >= 0:
        return error.culprit, error.__cause__ if isinstance(error, PeerFailedError) and error.__cause__ else error
    return rank, error


def where(error: BaseException) -> str:
    """Return " at file:line" of the innermost frame outside this package."""
    if isinstance(error, RemoteError):
        return error.place
    here = os.path.dirname(__file__)
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(here)]
    return f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
