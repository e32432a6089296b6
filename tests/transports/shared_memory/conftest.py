"""Without compiled code no process is reached through memory."""

import pytest

from transports.shared_memory.engine import BUILT


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if not BUILT:
        pytest.skip("the engine was not compiled")
