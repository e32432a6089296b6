"""Checks of the network: sockets, host name, rails, congestion control; and flight records of failed runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from ...config import unknown_variables
from ...errors import UsageError
from ...flight.folder import ENDING, default_folder, runs
from ...flight.reading import read_flight
from ...units import format_bytes
from .finding import CheckResult

_SLOW_NAME_S = 0.5


def findings() -> Iterator[CheckResult]:
    """Yield the findings about sockets, names, rails, settings and records."""
    yield from _socket_finding()
    yield _host_name_finding()
    yield rails([name for _, name in socket.if_nameindex() if name != "lo"], Path("/sys/class/net"))
    yield from _congestion_finding()
    yield from (CheckResult(subject="setting", state="note", text=text) for text in unknown_variables())
    folder = os.environ.get("OVERLAP_FLIGHT_DIR")
    yield from records(Path(folder) if folder else default_folder())


def _socket_finding() -> Iterator[CheckResult]:
    """Yield the finding about TCP on the loopback address and Unix sockets, each tried once."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=2).close()
    except OSError as error:
        text = f"127.0.0.1 cannot be reached: {error.strerror or error}"
        yield CheckResult(subject="sockets", state="wrong", text=text, fix="ip link set lo up")
        return
    try:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(f"\0overlap-doctor-{os.getpid()}")
    except OSError as error:
        text = f"TCP works; Unix sockets do not ({error.strerror or error}), so TCP joins processes of this host"
        yield CheckResult(subject="sockets", state="slow", text=text)
    else:
        yield CheckResult(subject="sockets", state="good", text="TCP and Unix sockets work")


def _host_name_finding() -> CheckResult:
    """Resolve this host's name, and return the finding: a note if that fails, slow above `_SLOW_NAME_S`."""
    name, begin = socket.gethostname(), perf_counter()
    fix = f"add `127.0.1.1 {name}` to /etc/hosts"
    try:
        address = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0]
    except OSError as error:
        text = f"{name!r} cannot be resolved ({error.strerror or error}); name other machines by address"
        return CheckResult(subject="host name", state="note", text=text, fix=fix)
    took = perf_counter() - begin
    text = f"{name} is {address}"
    if took > _SLOW_NAME_S:
        return CheckResult(subject="host name", state="slow", text=f"{text}; to resolve it took {took:.1f} s", fix=fix)
    return CheckResult(subject="host name", state="good", text=text)


def rails(interfaces: Sequence[str], folder: Path) -> CheckResult:
    """Return the finding about network interfaces.

    Args:
        interfaces: Their names, without the loopback interface.
        folder: Where the system describes them.
    """
    links = [f"{name}{_speed_text(folder / name)}" for name in interfaces if _link_state(folder / name) != "down"]
    if not links:
        return CheckResult(
            subject="rails", state="note", text="no interface but loopback: other machines are out of reach"
        )
    more = f"; `--rails {','.join(link.split()[0] for link in links)}` uses each" if len(links) > 1 else ""
    return CheckResult(subject="rails", state="good", text=", ".join(links) + more)


def _link_state(interface: Path) -> str:
    """Return the state of an interface, such as `up` or `down`; "" if the system does not know it."""
    with suppress(OSError):
        return (interface / "operstate").read_text(encoding="ascii").strip()
    return ""


def _speed_text(interface: Path) -> str:
    """Return the speed of an interface, such as ` (100 Gbit/s)`; "" if the system does not know it."""
    with suppress(OSError, ValueError):
        speed = int((interface / "speed").read_text(encoding="ascii"))
        return f" ({speed / 1000:g} Gbit/s)" if speed > 0 else ""
    return ""


def _congestion_finding() -> Iterator[CheckResult]:
    """Yield the finding about TCP congestion control, a note without bbr; nothing where it cannot be read."""
    with suppress(OSError):
        algorithms = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text(encoding="ascii").split()
        text = f"TCP may use {', '.join(algorithms)}"
        if "bbr" not in algorithms:
            text = f"{text}; where packets are lost, bbr would be faster"
            yield CheckResult(subject="congestion", state="note", text=text, fix="modprobe tcp_bbr")
        else:
            yield CheckResult(subject="congestion", state="good", text=text)


def records(folder: Path) -> Iterator[CheckResult]:
    """Yield the finding about flight records of processes that do not run.

    Args:
        folder: Folder of flight records.
    """
    sizes = list[int]()
    for path in folder.glob(f"*{ENDING}"):
        if not _is_process_alive(path):
            with suppress(FileNotFoundError):  # of a run that has just ended well
                sizes.append(path.stat().st_size)
    if sizes:
        size = format_bytes(sum(sizes))
        text = f"{len(sizes)} of runs that failed, {size}: `overlap why` explains the last"
        yield CheckResult(subject="flight records", state="note", text=text, fix=f"rm -r {folder}")
    else:
        yield CheckResult(subject="flight records", state="good", text="none of failed runs")


def _is_process_alive(path: Path) -> bool:
    """Return whether the process of a flight record still runs; False if the file cannot be read."""
    try:
        flight = read_flight(path)
    except UsageError:
        return False
    return runs(flight.host, flight.pid, flight.born)
