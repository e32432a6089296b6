"""Companies of members for async tests, and a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from trio.testing import MockClock

from .company import Company, MakeCompany, listening


@pytest.fixture
def make_company() -> Iterator[MakeCompany]:
    """Return a function that makes a company of so many members, whose host listens until the end of the test."""
    with listening() as listener:
        yield partial(Company, listener)


@pytest.fixture
def clock() -> MockClock:
    return MockClock()
