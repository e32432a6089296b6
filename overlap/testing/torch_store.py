"""Stores that ranks of a test share, in place of the stores of torch, through which processes meet."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import trio

from .threads import RankThread

# Seconds of a request, in which other ranks have their turns. A repeated request takes twice as long each time, up to
# the second figure: a rank may poll for seconds of virtual time.
_REQUEST_S, _LONGEST_REQUEST_S = 1e-6, 1e-2
# Ports from here on are given to servers that ask for any.
_FIRST_PORT = 49152
_TIMEOUT = timedelta(minutes=5)


class SharedStore(dist.Store):  # type: ignore[misc]
    """Store that the ranks of a test share; each request lets others go on, and `get` waits up to `timeout`."""

    def __init__(self, values: dict[str, bytes], timeout: timedelta = _TIMEOUT) -> None:
        super().__init__()
        self._values = values
        self._timeout = timeout
        self._polled: object = None
        self._request_s = _REQUEST_S
        _stores.append(self)  # C++, such as a PrefixStore, holds only its own part

    def set(self, key: str, value: Any) -> None:
        """Set a value, and notify the ranks that wait for it."""
        self._request()
        self._put(key, _value_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        self.wait([key], self._timeout)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key, 0 at first, and return the sum."""
        self._request(None if amount else key)
        number = int(self._values.get(key, b"0")) + amount
        self._put(key, str(number).encode())
        return number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if the present one, or its absence as "", is expected; return the present value."""
        expected, desired = _value_bytes(expected), _value_bytes(desired)
        self._request((key, expected, desired))
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
        return bytes(self._values.get(key, expected))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        self._request(tuple(keys))
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        self._request()
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of values."""
        self._request("")
        return len(self._values)

    deleteKey, getNumKeys = delete_key, num_keys  # names by which C++ calls these

    def append(self, key: str, value: Any) -> None:
        """Append to a value, which may be missing."""
        self._request()
        self._put(key, self._values.get(key, b"") + _value_bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values, and return them."""
        self.wait(keys, self._timeout)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Set several values."""
        self._request()
        for key, value in zip(keys, values, strict=True):
            self._put(key, _value_bytes(value))

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` exist."""
        return True

    def list_keys(self) -> list[str]:
        """Return the keys of all values."""
        self._request("")
        return list(self._values)

    def clone(self) -> SharedStore:
        """Return another store of the same values."""
        return SharedStore(self._values, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Longest time that `get` waits."""
        return self._timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values; a DistStoreError names late ones."""
        self._request(tuple(keys))
        limit_s = (timeout or self._timeout).total_seconds()
        here = RankThread.current()

        def has_all() -> bool:
            return all(key in self._values for key in keys)

        if not has_all() and (here is None or not here.wait_until(has_all, _change_event, limit_s)):
            missing = [key for key in keys if key not in self._values]
            raise dist.DistStoreError(f"wait timeout after {limit_s:g} s, keys: {', '.join(missing)}")

    def _request(self, polled: object = None) -> None:
        """Let other ranks go on, before a request takes effect; `polled` is the question, None for a change."""
        repeated = polled is not None and polled == self._polled
        self._request_s = min(2 * self._request_s, _LONGEST_REQUEST_S) if repeated else _REQUEST_S
        self._polled = polled
        here = RankThread.owner()
        if here is not None:
            here.let_others_run(self._request_s, at_once=not repeated)

    def _put(self, key: str, value: bytes) -> None:
        """Set a value, and notify waiting ranks if it is another one."""
        if self._values.get(key) != value:
            self._values[key] = value
            _notify_change()


class TCPStore(SharedStore):
    """Store of a server that a program starts: stores that name its port are its clients.

    Arguments are those of `torch.distributed.TCPStore`; the host may have any name, because all ranks are on one.
    """

    host: str
    port: int

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = _TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        *others: object,
        **more: object,
    ) -> None:
        rank = RankThread.owner()
        number = -1 if rank is None else rank.rank.rank
        if is_master:
            port = port or max(_FIRST_PORT, *(taken_port + 1 for taken_port in _servers), 0)
            before = _servers.get(port)
            if before is not None and not multi_tenant and before[0] != number:
                raise dist.DistNetworkError(
                    f"The server socket has failed to listen on any local network address. port: {port}, name: "
                    f"EADDRINUSE, message: address already in use by the store of rank {before[0]}"
                )
            _servers[port] = before if before is not None and multi_tenant else (number, {})
            _notify_change()
        elif port not in _servers:
            limit_s = timeout.total_seconds()
            if rank is None or not rank.wait_until(lambda: port in _servers, _change_event, limit_s):
                raise dist.DistNetworkError(
                    f"The client socket has timed out after {limit_s:g} s while trying to connect to ({host_name}, "
                    f"{port}): no rank has started a TCPStore with is_master=True there"
                )
        super().__init__(_servers[port][1], timeout)
        self.host, self.port = host_name, port
        self.add("init/", 1)
        if is_master and wait_for_workers and world_size is not None:
            self._wait_for_clients(world_size)

    def _wait_for_clients(self, count: int) -> None:
        """Wait until that many stores, this one included, use the server."""
        rank, limit_s = RankThread.owner(), self._timeout.total_seconds()

        def have_joined() -> bool:
            return int(self._values["init/"]) >= count

        if rank is not None and not rank.wait_until(have_joined, _change_event, limit_s):
            joined = self._values["init/"].decode()
            raise dist.DistStoreError(f"Timed out after {limit_s:g} s waiting for clients. {joined}/{count} joined.")


class FileStore(SharedStore):
    """Store of all ranks that name the same file, which is not written."""

    path: str

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        self.path = file_name
        super().__init__(_files.setdefault(os.path.abspath(file_name), {}))


class HashStore(SharedStore):
    """Store of one rank."""

    def __init__(self) -> None:
        super().__init__({})


STORES = {"TCPStore": TCPStore, "FileStore": FileStore, "HashStore": HashStore}
"""Stores that take the places of those of torch.distributed, by name."""

_servers: dict[int, tuple[int, dict[str, bytes]]] = {}  # by port: the rank of the server, and its values
_files: dict[str, dict[str, bytes]] = {}
_stores: list[SharedStore] = []
_events: list[trio.Event] = []


def _value_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _change_event() -> trio.Event:
    """Return the event of the next change of any store."""
    if not _events:
        _events.append(trio.Event())
    return _events[0]


def _notify_change() -> None:
    here = RankThread.current()
    if _events and here is not None:
        event = _events.pop()
        here.call(event.set)


def is_used() -> bool:
    """Whether a rank has written to a store that ranks share."""
    return any(store._values for store in _stores if not isinstance(store, HashStore))


def clear_stores() -> None:
    """Remove all stores, servers and waits, after a run."""
    for collection in (_servers, _files, _stores, _events):
        collection.clear()
