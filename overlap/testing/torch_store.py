"""Stores that the ranks of a test share, in place of those of torch, through which processes find each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
import trio

from .threads import RankThread

# Virtual seconds that a request takes, in which other ranks run. Each repetition takes twice as long as the one before,
# up to the second figure, as a rank may poll for seconds.
_REQUEST_S, _LONGEST_REQUEST_S = 1e-6, 1e-2
# First port for servers that ask for any free port.
_FIRST_PORT = 49152
_TIMEOUT = timedelta(minutes=5)


class SharedStore(dist.Store):  # type: ignore[misc]
    """Store that the ranks of a test share. During each request other ranks run; `get` waits up to `timeout`.

    Args:
        values: The values by key; stores with the same dict share them.
        timeout: Longest time that `get` waits, in virtual time.
    """

    def __init__(self, values: dict[str, bytes], timeout: timedelta = _TIMEOUT) -> None:
        super().__init__()
        self._values = values
        self._timeout = timeout
        self._last_question: object = None
        self._request_s = _REQUEST_S
        _stores.append(self)  # keeps the Python object alive: C++ refers only to its own part

    def set(self, key: str, value: Any) -> None:
        """Set a value, and notify the ranks that wait for it."""
        self._let_others_run()
        self._set_value(key, _value_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        self.wait([key], self._timeout)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, 0 at first, and return the sum."""
        # Adding 0 only reads the number, which a rank may repeat.
        self._let_others_run(None if amount else key)
        number = int(self._values.get(key, b"0")) + amount
        self._set_value(key, str(number).encode())
        return number

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if the present one is `expected`.

        Args:
            key: The key.
            expected: The value that must be there; "": none.
            desired: The new value.

        Returns:
            The value under the key after the call; `expected` if there is none.
        """
        expected, desired = _value_bytes(expected), _value_bytes(desired)
        self._let_others_run((key, expected, desired))
        if self._values.get(key, b"") == expected:
            self._set_value(key, desired)
        return bytes(self._values.get(key, expected))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        self._let_others_run(tuple(keys))
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether there was one."""
        self._let_others_run()
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of values."""
        self._let_others_run("all keys")
        return len(self._values)

    deleteKey = delete_key  # names by which C++ calls these
    getNumKeys = num_keys

    def append(self, key: str, value: Any) -> None:
        """Append to a value, which may be missing."""
        self._let_others_run()
        self._set_value(key, self._values.get(key, b"") + _value_bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values, and return them."""
        self.wait(keys, self._timeout)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Set several values."""
        self._let_others_run()
        for key, value in zip(keys, values, strict=True):
            self._set_value(key, _value_bytes(value))

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` exist."""
        return True

    def list_keys(self) -> list[str]:
        """Return the keys of all values."""
        self._let_others_run("all keys")
        return list(self._values)

    def clone(self) -> SharedStore:
        """Return another store with the same values: a value that one sets, both have."""
        return SharedStore(self._values, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` waits."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Longest time that `get` waits."""
        return self._timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Args:
            keys: The keys.
            timeout: Longest virtual time; None: that of the store.

        Raises:
            DistStoreError: Some have none in time; the message names them.
        """
        self._let_others_run(tuple(keys))
        limit_s = (timeout or self._timeout).total_seconds()
        here = RankThread.current()

        def has_all() -> bool:
            return all(key in self._values for key in keys)

        if not has_all() and (here is None or not here.wait_until(has_all, _next_change_event, limit_s)):
            missing = [key for key in keys if key not in self._values]
            raise dist.DistStoreError(
                f"wait timeout after {limit_s:g} s, keys: {', '.join(missing)}; no rank has set these in time: "
                "call store.set for them, or raise the timeout"
            )

    def _let_others_run(self, question: object = None) -> None:
        """Let other ranks run before a request; a repeated question takes twice as long each time.

        None stands for a request that changes a value.
        """
        is_repeated = question is not None and question == self._last_question
        self._request_s = min(2 * self._request_s, _LONGEST_REQUEST_S) if is_repeated else _REQUEST_S
        self._last_question = question
        here = RankThread.owner()
        if here is not None:
            here.let_others_run(self._request_s, at_once=not is_repeated)

    def _set_value(self, key: str, value: bytes) -> None:
        """Set a value; if it differs from the present one, notify waiting ranks."""
        if self._values.get(key) != value:
            self._values[key] = value
            _notify_change()


class TCPStore(SharedStore):
    """Replacement of `torch.distributed.TCPStore`: all stores with the port of a server share its values.

    The host may have any name, as all ranks are on one.

    Args:
        host_name: Only for messages.
        port: Port of the server; 0: a free one, if this store starts it.
        world_size: Number of stores that use the server; None: any number.
        is_master: Whether this store starts the server.
        timeout: How long to wait for the server, for clients, and in `get`.
        wait_for_workers: Whether a store that starts the server waits for the other stores.
        multi_tenant: Whether to use a server that another store has started on this port.
        others: Ignored.
        more: Ignored.

    Raises:
        DistNetworkError: The port is taken, or no rank has started a server there in time.
        DistStoreError: Not all stores have joined the server in time.
    """

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
            if before is not None and not multi_tenant and before.rank != number:
                raise dist.DistNetworkError(
                    f"The server socket has failed to listen on any local network address. port: {port}, name: "
                    f"EADDRINUSE, message: address already in use by the store of rank {before.rank}"
                )
            _servers[port] = before if before is not None and multi_tenant else _Server(number, {})
            _notify_change()
        elif port not in _servers:
            limit_s = timeout.total_seconds()
            if rank is None or not rank.wait_until(lambda: port in _servers, _next_change_event, limit_s):
                raise dist.DistNetworkError(
                    f"The client socket has timed out after {limit_s:g} s while trying to connect to ({host_name}, "
                    f"{port}): no rank has started a TCPStore with is_master=True there"
                )
        super().__init__(_servers[port].values, timeout)
        self.host: str = host_name
        self.port: int = port
        self.add("init/", 1)
        if is_master and wait_for_workers and world_size is not None:
            self._wait_for_clients(world_size)

    def _wait_for_clients(self, count: int) -> None:
        """Wait until `count` stores, this one included, use the server; raise DistStoreError after the timeout."""
        rank, limit_s = RankThread.owner(), self._timeout.total_seconds()
        have_joined = rank is None or rank.wait_until(
            lambda: int(self._values["init/"]) >= count, _next_change_event, limit_s
        )
        if not have_joined:
            joined = self._values["init/"].decode()
            raise dist.DistStoreError(f"Timed out after {limit_s:g} s waiting for clients. {joined}/{count} joined.")


class FileStore(SharedStore):
    """Replacement of `FileStore`: stores with the same file name share values; the file is not written."""

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        self.path: str = file_name
        super().__init__(_files.setdefault(os.path.abspath(file_name), {}))


class HashStore(SharedStore):
    """Replacement of `HashStore`: values of one rank alone."""

    def __init__(self) -> None:
        super().__init__({})


STORES: dict[str, type[SharedStore]] = {"TCPStore": TCPStore, "FileStore": FileStore, "HashStore": HashStore}
"""Replacements of the stores of torch.distributed, by name."""


class _Server(NamedTuple):
    """A server: the rank that has started it, and the values that all stores with its port share."""

    rank: int
    values: dict[str, bytes]


_servers: dict[int, _Server] = {}  # by port
_files: dict[str, dict[str, bytes]] = {}
_stores: list[SharedStore] = []
# The event of the next change, which all waiting ranks share; empty while no rank waits.
_next_change: list[trio.Event] = []


def _value_bytes(value: Any) -> bytes:
    """Return a value, text or bytes, as bytes."""
    return value.encode() if isinstance(value, str) else bytes(value)


def _next_change_event() -> trio.Event:
    """Return the event of the next change of any store."""
    if not _next_change:
        _next_change.append(trio.Event())
    return _next_change[0]


def _notify_change() -> None:
    """Notify the ranks that wait for a change of a store; only a rank's thread can, as it calls the event loop.

    After a change by another thread, they go on at the next change by a rank, or at their time limit.
    """
    here = RankThread.current()
    if _next_change and here is not None:
        event = _next_change.pop()  # the next wait makes a new one
        here.call(event.set)


def is_used() -> bool:
    """Whether a rank has written to a store that ranks share."""
    return any(store._values for store in _stores if not isinstance(store, HashStore))


def clear_stores() -> None:
    """Remove all stores, servers and waits, after a run."""
    for collection in (_servers, _files, _stores, _next_change):
        collection.clear()
