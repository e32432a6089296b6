"""A rank that does not come to the store is named long before the store's own time-out."""

from __future__ import annotations

import threading

import pytest

from overlap.embedded import rendezvous

from .connecting import MemoryStore


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, "rank 0 has waited 0.01 s at the store for rank 1, which has not connected, or is stopped; the store's "),
        (1, "rank 1 has waited 0.01 s at the store for rank 0, which has not connected, or waits for others; the "),
    ],
)
def test_the_rank_that_is_waited_for(rank: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, told = list[str](), threading.Event()
    monkeypatch.setattr(rendezvous, "LATE_S", 0.01)
    monkeypatch.setattr(rendezvous, "notify", lambda line: (said.append(line), told.set()))

    class Empty(MemoryStore):
        """A store in which no other rank has put anything; it gives up once that was told."""

        def get(self, key: str) -> bytes:
            assert told.wait(60)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        with rendezvous.rendezvous_through_store(Empty(), rank, 2, secret=None, job="late", nodes=None, host=None):
            pass
    assert [line[: len(expected)] for line in said] == [expected]
