"""Facts of processes, threads and this host that the kernel reports."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path

PROC = Path("/proc")


class ProcessState(Enum):
    """State of a process, as its kernel reports it."""

    RUNS = "runs"
    STOPPED = "stopped"
    GONE = "gone"
    ELSEWHERE = "elsewhere"  # an id of another kernel's process
    UNKNOWN = "unknown"


def process_identity(pid: int | None = None) -> str:
    """Return a name by which other processes of the host find a process, by default this one; "" without `/proc`."""
    try:
        number = os.getpid() if pid is None else pid
        return f"{_process_namespace()} {number} {read_stat(number)[1]}"
    except (OSError, ValueError, IndexError):
        return ""


def process_state(identity: str) -> ProcessState:
    """Return the state of a process by its `process_identity`; `ELSEWHERE` if that is of another host."""
    namespace, pid, start = identity.split(" ") if identity.count(" ") == 2 else ("", "", "")
    if not pid.isdecimal():
        return ProcessState.UNKNOWN
    if namespace != _process_namespace():
        return ProcessState.ELSEWHERE
    try:
        letter, current_start = read_stat(int(pid))
    except FileNotFoundError:
        return ProcessState.GONE
    except (OSError, ValueError, IndexError):
        return ProcessState.UNKNOWN
    if current_start != start or letter in "ZX":
        return ProcessState.GONE
    return ProcessState.STOPPED if letter == "T" else ProcessState.RUNS


@cache
def _process_namespace() -> str:
    """Name the kernel and the namespace of process ids."""
    with suppress(OSError):
        return _boot_and_namespace("pid")
    return "?"


@cache
def network_namespace() -> str:
    """Name the kernel and the network of this process: processes that share both reach each other over loopback."""
    with suppress(OSError):
        return _boot_and_namespace("net")
    return platform.node()


def _boot_and_namespace(kind: str) -> str:
    """Name the boot of this kernel and a namespace of this process, such as "net"."""
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink(PROC / 'self/ns' / kind)}"


def exists(pid: int | str) -> bool:
    """Whether there is a process with this id, also one that has not been reaped."""
    return (PROC / str(pid)).exists()


def state_letter(pid: int) -> str:
    """Return the state of a process as a letter of proc(5): "T" if it is stopped; "" if there is no such process."""
    with suppress(OSError, IndexError):
        return read_stat(pid)[0]
    return ""


def read_stat(pid: int) -> tuple[str, str]:
    """Return the state of a process as a letter, and its start time in clock ticks."""
    fields = _read_stat_fields(pid)
    return fields[0], fields[19]


def _read_stat_fields(pid: int) -> list[str]:
    return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, as text; "" if it is unknown."""
    with suppress(OSError, IndexError):
        return read_stat(pid)[1]
    return ""


def queued_ns(thread: int) -> int:
    """Return the nanoseconds that a thread has waited for a processor; 0 if the system does not count them.

    Linux does: Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat".

    Args:
        thread: As the kernel numbers it: the first thread of a process has the process's number.
    """
    with suppress(OSError, ValueError, IndexError):
        return int((PROC / str(thread) / "schedstat").read_text().split()[1])
    return 0


def waits_in_kernel(pid: int) -> str:
    """Return the function of the kernel in which a process sleeps: proc(5), "/proc/pid/wchan"; "" if unknown."""
    with suppress(OSError):
        return (PROC / str(pid) / "wchan").read_text().strip().removeprefix("0")  # "0": it runs, or we may not know
    return ""


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this control group the kernel killed for want of memory; 0 if unknown.

    Args:
        root: Folder with `proc` and `sys`; for tests.
    """
    count = 0
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            count += _read_oom_count(root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            count += _read_oom_count(root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control")
    return count


def _read_oom_count(file: Path) -> int:
    """Return the number of processes killed for want of memory from a file of a control group; 0 if it has none."""
    for line in _read_lines(file):
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdecimal():
            return int(value)
    return 0


def _read_lines(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
