"""Process groups that live as long as the tests of a file."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def pair() -> "Iterator[Ranks]":  # noqa: F821 (whose import needs torch)
    """Return the process groups of two ranks of one world."""
    from .pairs import ranks

    with ranks(2) as two:
        yield two
