"""What waits in the system: little between near hosts, and what cannot be had is said."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from transports.efa import tcp

from .processes import open_world

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="this system does not let programs choose"
)


@contextmanager
def joined(near: str = "127.0.0.1", far: str = "127.0.0.2") -> Iterator[socket.socket]:
    """A connection between two addresses; on one host, but that is not known by them."""
    with (
        socket.create_server((far, 0)) as listener,
        socket.create_connection(listener.getsockname(), source_address=(near, 0)) as connection,
        listener.accept()[0],
    ):
        yield connection


def settings(connection: socket.socket) -> tuple[int, int, bytes]:
    return (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0"),
    )


def paces(connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whatever the system has chosen count as what paces."""
    monkeypatch.setattr(tcp, "_PACING", settings(connection)[2])
    monkeypatch.setattr(tcp, "_NEAR_CONGESTION", b"reno")


def test_between_near_hosts_little_waits_and_nothing_is_paced(monkeypatch, tmp_path) -> None:
    reports: list[str] = []
    with joined() as connection:
        paces(connection, monkeypatch)
        limit = tmp_path / "wmem_max"
        limit.write_text("524288\n")
        monkeypatch.setattr(tcp, "_WMEM_MAX", limit)
        monkeypatch.setattr(tcp, "_FAR_BUFFER_BYTES", 64 << 10)  # every system allows that
        tcp.bound_queue(connection, reports.append)
        assert settings(connection) == (128 << 10, 128 << 10, b"reno")
    assert reports == []


def test_a_buffer_that_cannot_be_set_stays_as_it_was_and_that_is_said(monkeypatch, tmp_path) -> None:
    reports: list[str] = []
    limit = tmp_path / "wmem_max"
    limit.write_text("212992\n")
    monkeypatch.setattr(tcp, "_WMEM_MAX", limit)
    with joined() as connection:
        before = settings(connection)[0]
        tcp.bound_queue(connection, reports.append)
        assert settings(connection)[0] == before
    assert reports == [
        "send buffers stay as the system sizes them, for 524288 bytes cannot be set (net.core.wmem_max is 212992); "
        "urgent messages may wait longer behind others"
    ]


def test_a_congestion_control_that_cannot_be_had_is_said(monkeypatch) -> None:
    reports: list[str] = []
    with joined() as connection:
        monkeypatch.setattr(tcp, "_PACING", settings(connection)[2])
        monkeypatch.setattr(tcp, "_NEAR_CONGESTION", b"nosuch")
        tcp.bound_queue(connection, reports.append)
        kept = settings(connection)[2].decode()
    assert reports[-1] == (
        f"TCP keeps congestion control {kept!r}, for 'nosuch' cannot be set (No such file or directory); it paces more"
    )


def test_a_long_way_keeps_what_the_system_has_chosen(monkeypatch) -> None:
    monkeypatch.setattr(tcp, "_NEAR_S", -1.0)
    with joined() as connection:
        paces(connection, monkeypatch)
        before = settings(connection)
        tcp.bound_queue(connection, pytest.fail)
        assert settings(connection) == before


async def test_it_is_said_once_for_all_connections(monkeypatch) -> None:
    monkeypatch.setattr(tcp, "_WMEM_MAX", Path("/nowhere"))
    async with open_world(unix=False, rails=3, host="127.0.0.2") as world:
        for lines in world.reports:
            assert [line for line in lines if "/nowhere" in line and "send buffers stay" in line] == list(lines)
            assert len(lines) == 1
