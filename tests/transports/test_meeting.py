"""Listening sockets of a process: what their error names."""

from __future__ import annotations

import socket

import pytest

from transports import TransportError
from transports.meeting import ListeningSockets


def test_a_taken_port_is_named_with_its_address() -> None:
    sockets = ListeningSockets(["127.0.0.1"], unix=False, pending=1, reopens=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sockets.ports = (port,)
        line = rf"^cannot listen at 127\.0\.0\.1:{port}: Address already in use; another process has the port$"
        with pytest.raises(TransportError, match=line):
            sockets.listen()


def test_an_address_of_another_machine_is_named_alone() -> None:
    sockets = ListeningSockets(["127.0.0.1", "192.0.2.1"], unix=False, pending=1, reopens=False)
    reason = r"Cannot assign requested address; name addresses of this machine"
    with pytest.raises(TransportError, match=rf"^cannot listen at 192\.0\.2\.1: {reason}$"):
        sockets.listen()
