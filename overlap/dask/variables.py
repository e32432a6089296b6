"""Store of a gang on Dask: each value is a `Variable` of the scheduler, with an `Event` for its arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import distributed

from ..errors import OverlapError

_LOOK_S = 0.5


class VariableStore:
    """A store with values in the scheduler; waits end when `stopped` is true. `touched` has the used keys."""

    def __init__(self, client: distributed.Client, stopped: Callable[[], bool]) -> None:
        self._client, self._stopped = client, stopped
        self.touched: set[str] = set()

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        self.touched.add(key)
        _variable(key, self._client).set(bytes(value))
        _event(key, self._client).set()

    def get(self, key: str) -> bytes:
        """Return the value, waiting until there is one.

        Raises:
            OverlapError: If the task is cancelled meanwhile.
        """
        self.touched.add(key)
        while not self._stopped():
            if (value := find_value(key, self._client, _LOOK_S)) is not None:
                return value
        raise OverlapError("store: the task was cancelled while it waited for other ranks")


def remove_values(keys: Iterable[str], client: distributed.Client) -> None:
    """Remove values from the scheduler."""
    for key in keys:
        _event(key, client).clear()
        _variable(key, client).delete()


def find_value(key: str, client: distributed.Client, wait_s: float) -> bytes | None:
    """Return a value if there is one within that many seconds."""
    if not _event(key, client).wait(timeout=wait_s):
        return None
    try:
        return bytes(_variable(key, client).get(timeout=_LOOK_S))
    except (TimeoutError, distributed.TimeoutError):  # it was removed in this moment
        return None


def _variable(key: str, client: distributed.Client) -> distributed.Variable:
    """Return the variable of a key."""
    return distributed.Variable(key, client=client)


def _event(key: str, client: distributed.Client) -> distributed.Event:
    """Return the event of a value: waiting for a variable in vain leaves an error in the scheduler's log."""
    return distributed.Event(key, client=client)
