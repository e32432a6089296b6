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
    """State of a process, as the kernel reports it."""

    RUNS = "runs"
    STOPPED = "stopped"  # by SIGSTOP or a debugger
    GONE = "gone"  # ended, or its id now belongs to another process
    ELSEWHERE = "elsewhere"  # of another kernel or namespace of process ids, which cannot be asked
    UNKNOWN = "unknown"


def process_identity(pid: int | None = None) -> str:
    """Return a text that identifies a process for other processes of the host: namespace, process id, start time.

    The start time tells a process from a later one with the same id.

    Args:
        pid: Id of the process; None: this process.

    Returns:
        The text, which `process_state` takes; "" without `/proc` or without such a process.
    """
    try:
        number = os.getpid() if pid is None else pid
        _, started_ticks = read_process_stat(number)
        return f"{_process_namespace()} {number} {started_ticks}"
    except (OSError, ValueError, IndexError):
        return ""


def process_state(identity: str) -> ProcessState:
    """Return the state of the process whose `process_identity` is `identity`; `UNKNOWN` for a text of another form."""
    namespace, pid, start = identity.split(" ") if identity.count(" ") == 2 else ("", "", "")
    if not pid.isdecimal():
        return ProcessState.UNKNOWN
    if namespace != _process_namespace():
        return ProcessState.ELSEWHERE
    try:
        letter, current_start = read_process_stat(int(pid))
    except FileNotFoundError:
        return ProcessState.GONE
    except (OSError, ValueError, IndexError):
        return ProcessState.UNKNOWN
    if current_start != start or letter in "ZX":  # another process with this id, or a zombie or dead one
        return ProcessState.GONE
    return ProcessState.STOPPED if letter == "T" else ProcessState.RUNS


@cache
def _process_namespace() -> str:
    """Return a name of this kernel and its namespace of process ids; "?" if they are unknown."""
    with suppress(OSError):
        return _boot_and_namespace("pid")
    return "?"


@cache
def network_namespace() -> str:
    """Return a name of the kernel and the network namespace of this process; the host's name if they are unknown.

    Processes with the same name reach each other over loopback.
    """
    with suppress(OSError):
        return _boot_and_namespace("net")
    return platform.node()


def _boot_and_namespace(kind: str) -> str:
    """Return "BOOT/NAMESPACE" of this kernel and process; `kind` is a name in /proc/self/ns.

    Raises `OSError` without `/proc`.
    """
    boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink(PROC / 'self/ns' / kind)}"


def process_exists(pid: int | str) -> bool:
    """Whether a process has this id; a zombie, which its parent has not waited for, counts."""
    return (PROC / str(pid)).exists()


def process_state_letter(pid: int) -> str:
    """Return the state of a process as a letter of proc(5): "T" if it is stopped, or "" if there is no such process."""
    with suppress(OSError, IndexError):
        return read_process_stat(pid)[0]
    return ""


def read_process_stat(pid: int) -> tuple[str, str]:
    """Return the state of a process as a letter of proc(5), and its start time in clock ticks since boot, as text.

    Raises:
        OSError: There is no such process, or no `/proc`.
        IndexError: The file has another form.
    """
    # The command's name ends with the last ")". The fields after it are numbers 3 (state), 4, ... of proc(5).
    fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]


def start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, as text, or "" if it is unknown."""
    with suppress(OSError, IndexError):
        return read_process_stat(pid)[1]
    return ""


def processor_wait_ns(thread: int) -> int:
    """Return the nanoseconds that a thread has waited for a processor, or 0 if the system does not count them.

    Source: Linux, Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat".

    Args:
        thread: Id of the thread in the kernel (`threading.get_native_id`).
    """
    with suppress(OSError, ValueError, IndexError):
        return int((PROC / str(thread) / "schedstat").read_text().split()[1])
    return 0


def kernel_wait_function(pid: int) -> str:
    """Return the kernel's function in which a process sleeps (proc(5), "/proc/pid/wchan"); "" if it runs or unknown."""
    with suppress(OSError):
        # The file has "0" if the process runs, or if we have no permission to know.
        return (PROC / str(pid) / "wchan").read_text().strip().removeprefix("0")
    return ""


def count_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this control group the kernel killed for want of memory, or 0 if unknown.

    Args:
        root: Folder in which `proc` and `sys` are; tests pass another one.
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
    """Return the number after "oom_kill" in a file of a control group; 0 if it cannot be read or has no such line."""
    for line in _read_lines(file):
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdecimal():
            return int(value)
    return 0


def _read_lines(file: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
