"""How a connection ends that a program has left open."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest

from overlap.embedded import connection


class Open:
    def __init__(self) -> None:
        self.ends: list[Any] = []

    def fail(self, error: BaseException) -> None:
        self.ends.append(error)

    def close(self) -> None:
        self.ends.append("closed")


@pytest.mark.parametrize(
    ("before", "at_exit", "interactive", "fails"),
    [
        (None, None, False, False),
        (None, ValueError("bad"), False, True),
        (ValueError("earlier"), None, False, False),  # still the earlier one
        (ValueError("earlier"), ValueError("bad"), False, True),
        (None, ValueError("typed"), True, False),  # a prompt goes on after an error
    ],
)
@pytest.mark.everyday(5)
def test_only_the_error_that_ends_the_program_is_that_of_its_connection(
    monkeypatch: pytest.MonkeyPatch,
    before: BaseException | None,
    at_exit: BaseException | None,
    interactive: bool,
    fails: bool,
) -> None:
    for name in ("last_exc", "last_value", "ps1"):
        monkeypatch.delattr(sys, name, raising=False)
    if at_exit is not None or before is not None:
        monkeypatch.setattr(sys, "last_value", at_exit or before, raising=False)
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    one = Open()
    connection._end_at_exit(weakref.ref(one), before)  # type: ignore[arg-type]
    assert one.ends == [at_exit if fails else "closed"]
