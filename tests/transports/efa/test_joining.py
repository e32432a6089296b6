"""How two processes come together where much is lost on the way."""

import pytest

from transports.efa import joining
from transports.handshake import HandshakeError

from .proxy import ProxiedWorld


@pytest.fixture(autouse=True)
def _short_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "HANDSHAKE_S", 0.2)


@pytest.mark.parametrize("rails", [1, 2])
async def test_who_was_not_heard_in_time_calls_again(rails: int) -> None:
    world = ProxiedWorld(mute=2, rails=rails)
    async with world.open():
        assert [way.entered for way in world.ways] == [3] * rails


@pytest.mark.slow
async def test_whom_nobody_ever_hears_says_so_in_the_end() -> None:
    world, failures = ProxiedWorld(mute=100), []
    try:
        async with world.open():
            raise AssertionError("it has been opened")
    except* HandshakeError as group:
        failures += group.exceptions
    assert len(failures) == 1
    assert [way.entered for way in world.ways] == [5]
