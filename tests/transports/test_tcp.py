"""TCP below Efa: what waits in the system is little, and heavy losses are said once."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from transports import tcp
from transports.tcp import Health, TcpInfo, tcp_info

from .efa.processes import open_world


@pytest.fixture(autouse=True)
def _this_host_is_near(monkeypatch) -> None:
    """A busy machine answers itself late."""
    report_round_trip(1000, monkeypatch)


def report_round_trip(round_trip_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system report a round trip."""

    def report(connection: socket.socket) -> TcpInfo | None:
        seen = tcp_info(connection)
        return None if seen is None else seen._replace(round_trip_s=round_trip_us / 1e6)

    monkeypatch.setattr(tcp, "tcp_info", report)


# -- what waits in the system: little between near hosts, and what cannot be had is said -------------------------------

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
        monkeypatch.setattr(tcp, "_NEAR_BUFFER_BYTES", 64 << 10)  # every system allows that
        tcp.tune_connection(connection, reports.append)
        assert settings(connection) == (128 << 10, 128 << 10, b"reno")
    assert reports == []


def test_a_buffer_that_cannot_be_set_stays_as_it_was_and_that_is_said(monkeypatch, tmp_path) -> None:
    reports: list[str] = []
    limit = tmp_path / "wmem_max"
    limit.write_text("212992\n")
    monkeypatch.setattr(tcp, "_WMEM_MAX", limit)
    with joined() as connection:
        before = settings(connection)[0]
        tcp.tune_connection(connection, reports.append)
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
        tcp.tune_connection(connection, reports.append)
        kept = settings(connection)[2].decode()
    assert reports[-1] == (
        f"TCP keeps congestion control {kept!r}, for 'nosuch' cannot be set (No such file or directory); it paces more"
    )


def test_a_long_way_keeps_what_the_system_has_chosen(monkeypatch) -> None:
    report_round_trip(1001, monkeypatch)
    with joined() as connection:
        paces(connection, monkeypatch)
        before = settings(connection)
        tcp.tune_connection(connection, pytest.fail)
        assert settings(connection) == before


async def test_it_is_said_once_for_all_connections(monkeypatch) -> None:
    monkeypatch.setattr(tcp, "_WMEM_MAX", Path("/nowhere"))
    async with open_world(unix=False, rails=3, host="127.0.0.2") as world:
        for lines in world.reports:
            assert [line for line in lines if "/nowhere" in line and "send buffers stay" in line] == list(lines)
            assert len(lines) == 1


# -- connections that lose much of what they send: that is said once, and TCP is told to take it for what it is --------


class ProvedSocket:
    """A socket that remembers what it was told, if it may be."""

    def __init__(self, *, may: bool = True) -> None:
        self.chosen: list[tuple[int, int, object]] = []
        self._may = may

    def setsockopt(self, level: int, option: int, value: object) -> None:
        if not self._may:
            raise PermissionError
        self.chosen.append((level, option, value))


def told(counts: list[tuple[int, int]], connection: ProvedSocket) -> list[str]:
    health = Health()
    return [
        health.record_losses(cast("socket.socket", connection), TcpInfo(False, 0.0, 0.0, *count)) for count in counts
    ]


def test_much_that_is_lost_again_and_again_is_said_once_and_paced() -> None:
    connection = ProvedSocket()
    counts = [(1000, 50), (2000, 150), (2050, 160), (3000, 250), (4000, 400), (5000, 500)]
    assert told(counts, connection) == [
        *[""] * 3,  # of these, the last one has sent too little to tell
        "loses packets: 10% of them are sent again, from now on by bbr and after 10 ms",
        *[""] * 2,
    ]
    options = {option: value for _, option, value in connection.chosen}
    assert options == {socket.TCP_CONGESTION: b"bbr", 44: 1000, 45: 10_000}  # as linux/tcp.h numbers them


def test_who_may_not_choose_hears_why_it_is_slow_all_the_same() -> None:
    counts = [(1000 * each, 60 * each) for each in range(1, 4)]
    assert told(counts, ProvedSocket(may=False))[-1] == "loses packets: 6% of them are sent again"


@pytest.mark.parametrize("lost", [[0, 0, 0, 0], [29, 29, 29, 29], [400, 0, 400, 0], [400, 400, 0, 400]])
def test_queues_that_overflow_now_and_then_change_nothing(lost: list[int]) -> None:
    connection = ProvedSocket()
    counts = [(1000 * (index + 1), sum(lost[: index + 1])) for index in range(len(lost))]
    assert told(counts, connection) == [""] * 4
    assert connection.chosen == []


class Told:
    """A socket of which the kernel tells what it is told to."""

    family = socket.AF_INET

    def __init__(self, again: int, sent: int, had: int) -> None:
        told = struct.pack("=100xI52xI56xI", again, sent, had)  # as linux/tcp.h lays it out
        self._told = told.ljust(232, b"\0")

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        return self._told[:nbytes]


@pytest.mark.parametrize(("had", "lost"), [(0, 157), (156, 1), (157, 0), (200, 0)])
def test_what_the_receiver_already_had_was_not_lost(had: int, lost: int) -> None:
    """A host that is merely busy acknowledges late: the sender repeats segments, and the receiver says it has them."""
    seen = tcp_info(cast("socket.socket", Told(157, 4000, had)))
    assert seen is not None
    assert (seen.repeated_segments, seen.sent_segments) == (lost, 4000)


def test_a_busy_host_hears_nothing_and_keeps_its_congestion_control() -> None:
    connection, health = ProvedSocket(), Health()
    for look in range(1, 6):
        seen = tcp_info(cast("socket.socket", Told(157 * look, 4000 * look, 156 * look)))
        assert health.record_losses(cast("socket.socket", connection), seen) == ""
    assert connection.chosen == []


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system does not let programs choose")
def test_the_system_counts_segments() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
        listener.accept()[0] as other,
    ):
        for _ in range(5):
            connection.sendall(b"x")
            other.recv(1)
        seen = tcp_info(connection)
    assert seen is not None
    assert seen.sent_segments - seen.repeated_segments == 5
    assert tcp_info(connection) is None  # closed
    with socket.socket(socket.AF_UNIX) as local:
        assert tcp_info(local) is None
