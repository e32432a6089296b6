"""Store that all ranks of a test share, in place of the one in which processes meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
import trio

from .threads import RankThread


class Store(dist.Store):  # type: ignore[misc]
    """Store that the ranks of a test share; a rank that waits for a key lets others go on.

    Args:
        values: Of all ranks.
    """

    def __init__(self, values: dict[str, bytes]) -> None:
        super().__init__()
        self._values = values
        self._timeout = timedelta(minutes=5)

    def set(self, key: str, value: Any) -> None:
        """Set a value, and wake the ranks that wait for it."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        _changed()

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key], self._timeout)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        number = int(self._values.get(key, b"0")) + amount
        self.set(key, str(number))
        return number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if it is as expected, or if there is none and nothing is expected; return the present value."""
        expected, desired = (each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired))
        if self._values.get(key, b"") == expected:
            self.set(key, desired)
        return bytes(self._values.get(key, expected))

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are there."""
        _let_others_go_on()
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many values there are."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Longest time that `get` waits."""
        return self._timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all values are there.

        Raises:
            DistStoreError: If they are not in time.
        """
        limit_s = (timeout or self._timeout).total_seconds()
        here = RankThread.here()

        def there() -> bool:
            return all(key in self._values for key in keys)

        if not there() and (here is None or not here.wait_until(there, _change, limit_s)):
            missing = [key for key in keys if key not in self._values]
            raise dist.DistStoreError(f"wait timeout after {limit_s:g} s, keys: {', '.join(missing)}")


_events: list[trio.Event] = []


def _change() -> trio.Event:
    if not _events:
        _events.append(trio.Event())
    return _events[0]


def _changed() -> None:
    here = RankThread.here()
    if _events and here is not None:
        event = _events.pop()
        here.call(event.set)


def _let_others_go_on() -> None:
    here = RankThread.here()
    if here is not None:
        here.sleep(1e-6)


def forget() -> None:
    """Forget who waits, once a run is over."""
    _events.clear()
