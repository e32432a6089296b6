"""Stores that all ranks of a test share, in place of those in which processes meet.

Each look at a value lets others go on before the program has it: programs wait in loops for values of others, and what
they do with a value may come too late.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
import trio

from .threads import RankThread

T = TypeVar("T")


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
        return _seen(self._values[key])

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""
        number = int(self._values.get(key, b"0")) + amount
        self.set(key, str(number))
        return number if amount else _seen(number)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if it is as expected, or if there is none and nothing is expected; return the present value."""
        expected, desired = (each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired))
        wanted = self._values.get(key, b"") == expected
        if wanted:
            self.set(key, desired)
        found = bytes(self._values.get(key, expected))
        return found if wanted else _seen(found)

    def check(self, keys: list[str]) -> bool:
        """Return whether all values are there."""
        return _seen(all(key in self._values for key in keys))

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many values there are."""
        return _seen(len(self._values))

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


class ProgramStore(Store):
    """Store that a program makes itself, as a `TCPStore` or a `FileStore`: no rank may wait in C++ for others.

    Args:
        place: The port or the file where its ranks meet.
        world_size: How many come, if that is known.
        is_master: Whether this rank opens it; None: the first one does.
        timeout: How long it waits.
        wait_for_workers: Whether to wait here until all have come.
    """

    def __init__(
        self, place: int | str, world_size: int | None, is_master: bool | None, timeout: timedelta | None,
        wait_for_workers: bool,
    ) -> None:  # fmt: skip
        if place == 0:
            place = _FIRST_PORT + len(_opened)
        self._place = place
        limit = timeout or timedelta(minutes=5)
        if is_master is not False and place not in _opened:
            _opened[place] = {}
            _changed()
        here = RankThread.here()
        if place not in _opened and not (
            here and here.wait_until(lambda: place in _opened, _change, limit.total_seconds())
        ):
            raise dist.DistNetworkError(f"no rank has opened a store at {place} within {limit.total_seconds():g} s")
        super().__init__(_opened[place])
        self.set_timeout(limit)
        come = self.add(_COME, 1)
        if wait_for_workers and world_size is not None:
            if come == world_size:
                self.set(f"{_COME} all", b"")
            self.wait([f"{_COME} all"], limit)

    def num_keys(self) -> int:
        """Return how many values there are."""
        return super().num_keys() - sum(key.startswith(_COME) for key in self._values)

    @property
    def host(self) -> str:
        """Where its ranks meet."""
        return "127.0.0.1"

    @property
    def port(self) -> int:
        """The port at which its ranks meet."""
        return int(self._place)

    @property
    def path(self) -> str:
        """The file in which its ranks meet."""
        return str(self._place)


def tcp_store(
    original: Any, host_name: str, port: int, world_size: int | None = None, is_master: bool = False,
    timeout: timedelta | None = None, wait_for_workers: bool = True, **more: Any,
) -> Any:  # fmt: skip
    """Return a `TCPStore` of a rank."""
    if RankThread.here() is None:
        more |= {} if timeout is None else {"timeout": timeout}
        return original(host_name, port, world_size, is_master, wait_for_workers=wait_for_workers, **more)
    return ProgramStore(port, world_size, is_master, timeout, wait_for_workers)


def file_store(original: Any, file_name: str, world_size: int = -1) -> Any:
    """Return a `FileStore` of a rank."""
    if RankThread.here() is None:
        return original(file_name, world_size)
    return ProgramStore(os.path.abspath(file_name), None, None, None, wait_for_workers=False)


_COME = "overlap: ranks that have come"
_FIRST_PORT = 40_000
_opened: dict[int | str, dict[str, bytes]] = {}  # stores of programs, by their places
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


def _seen(value: T) -> T:
    """Return what a rank has seen, after others have gone on."""
    here = RankThread.here()
    if here is not None:
        here.sleep(1e-6)
    return value


def forget() -> None:
    """Forget who waits, and the stores of the program, once a run is over."""
    _events.clear()
    _opened.clear()
