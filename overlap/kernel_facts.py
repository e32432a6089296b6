"""Facts of processes and threads that the kernel of this host reports."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def stat_of(pid: int) -> tuple[str, str]:
    """Return the state of a process as a letter, and its start time in clock ticks."""
    fields = _fields_of(pid)
    return fields[0], fields[19]


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    return int(_fields_of(pid)[1])


def _fields_of(pid: int) -> list[str]:
    """Return the fields of a process that come after its name: proc(5)."""
    return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def start_of(pid: int) -> str:
    """Return the start time of a process, as its system counts; "" if it is unknown."""
    with suppress(OSError, IndexError):
        return stat_of(pid)[1]
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
