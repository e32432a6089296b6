"""Companies of members for async tests, and a clock that only the test moves."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from tests.interpreters import Python

from .company import Company, MakeCompany, listening


@pytest.fixture
def make_company() -> Iterator[MakeCompany]:
    """Return a function that makes a company of so many members, whose host listens until the end of the test."""
    with listening() as listener:
        yield partial(Company, listener)


@pytest.fixture
def start_python(tmp_path: Path) -> Iterator[Callable[..., Python]]:
    """Return a function that starts `python ARGV`, in the folder of the test by default; none survives the test."""
    started: list[Python] = []

    def start(*argv: object, cwd: Path = tmp_path, **details: Any) -> Python:
        started.append(Python(*argv, cwd=cwd, **details))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def clock() -> MockClock:
    return MockClock()
