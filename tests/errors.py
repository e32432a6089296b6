"""Errors that calls must raise."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

E = TypeVar("E", bound=BaseException)


class Mute(Exception):
    """Has neither a text nor a representation."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def error_of(kind: type[E], call: Callable[..., object], *args: Any, **kwargs: Any) -> E:
    """Call a function that must raise an error of a kind; return the error."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return caught.value


async def error_from(kind: type[E], awaitable: Awaitable[object]) -> E:
    """Await what must raise an error of a kind; return the error."""
    with pytest.raises(kind) as caught:
        await awaitable
    return caught.value
