"""What joins processes best: memory inside a host, sockets beyond."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from transports.base import Transport
from transports.efa import factory as sockets
from transports.factory import Bootstrap
from transports.router import Router
from transports.shared_memory import SharedMemory


def wants_sockets(bootstrap: Bootstrap) -> bool:
    """Whether the user has chosen what only sockets have, or no shared memory: then sockets join all processes."""
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
    """Make a process's end of both: who can share memory does, all others are joined by sockets.

    Raises:
        ArgumentError: An option that cannot be meant.
    """
    if wants_sockets(bootstrap):
        return sockets(bootstrap)
    near = SharedMemory(
        member=bootstrap.member,
        placement=bootstrap.placement,
        secret=bootstrap.secret,
        exchange=bootstrap.exchange,
        job=bootstrap.job,
        epoch=bootstrap.epoch,
        limit_bytes=cast("int | None", bootstrap.options.get("shared_memory")),
        report=bootstrap.report,
    )
    return Router([near, sockets(replace(bootstrap, spared=near.links.keys))])
