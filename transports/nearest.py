"""The default choice of wires between processes: memory inside a host, sockets beyond."""

from __future__ import annotations

from dataclasses import replace

from transports.base import Transport
from transports.efa import factory as sockets
from transports.factory import Bootstrap
from transports.router import Router
from transports.shared_memory import factory as memory


def wants_sockets(bootstrap: Bootstrap) -> bool:
    """Return whether the user's options ask for sockets alone: without shared memory, or with options of sockets."""
    options = bootstrap.options
    chosen = (
        options.get("shared_memory") == 0,
        options.get("rails", 1) != 1,
        options.get("peer_direct") is False,
        options.get("checksums") is not None,
        options.get("unix") is False,
    )
    return bootstrap.tls is not None or any(chosen)


def factory(bootstrap: Bootstrap) -> Transport:
    """Make the transport of a process: shared memory to processes of this host, sockets to all others.

    Sockets alone, if the user's options ask for that.

    Raises:
        ArgumentError: An option has an impossible value.
    """
    if wants_sockets(bootstrap):
        return sockets(bootstrap)
    near = memory(bootstrap, everybody=False)
    return Router([near, sockets(replace(bootstrap, spared=near.links.keys))])
