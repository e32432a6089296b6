"""Parameters of most tests of worlds; a test that names values of its own has these."""

import pytest

from .worlds import FEW_PATHS


@pytest.fixture(params=FEW_PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Return how the bytes get there: one of `PATHS`."""
    return str(request.param)
