"""Future of another future's result, with a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .failure import Failure
from .future import Future, Item


class Checked(Item):
    """Future of another future's result, which fails if `check(result)` raises; any thread may call it, repeatedly."""

    __slots__ = ("_check",)

    def __init__(self, whole: Future[object], check: Callable[[Any], object]) -> None:
        super().__init__(whole, None)
        self._check = check

    @property
    def label(self) -> str:
        """Name of the other future."""
        return self._whole.label

    def _outcome(self) -> tuple[object, Failure | None]:
        """Return the outcome of the other future, or the failure of its check."""
        value, failure = self._whole._outcome()
        if failure is None:
            try:
                self._check(value)
            except Exception as error:
                return None, Failure(error)
        return value, failure
