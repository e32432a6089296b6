"""What the kernel says of a process that says nothing itself: whether it runs, or will never speak again.

A call of C code that keeps the GIL silences every thread of a process, and yet it is healthy; one that is stopped is
silent in the same way and is lost. The kernel of the host on which both live can tell them apart.
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path

_PROC = Path("/proc")


class ProcessState(Enum):
    """What is known of a process."""

    RUNS = "runs"
    STOPPED = "stopped"
    GONE = "gone"
    ELSEWHERE = "elsewhere"  # another kernel has it
    UNKNOWN = "unknown"


def identity(pid: int | None = None) -> str:
    """Name a process, by default this one, so that any other on its host can find it; empty if the system cannot."""
    try:
        number = os.getpid() if pid is None else pid
        return f"{_host()} {number} {_stat(number)[1]}"
    except (OSError, ValueError, IndexError):
        return ""


def state_of(name: str) -> ProcessState:
    """Return what the kernel says of a process that was named by `identity`; of another host's it says nothing."""
    host, pid, began = name.split(" ") if name.count(" ") == 2 else ("", "", "")
    if not pid.isdecimal():
        return ProcessState.UNKNOWN
    if host != _host():
        return ProcessState.ELSEWHERE
    try:
        letter, started = _stat(int(pid))
    except FileNotFoundError:
        return ProcessState.GONE
    except (OSError, ValueError, IndexError):
        return ProcessState.UNKNOWN
    if started != began or letter in "ZX":
        return ProcessState.GONE
    return ProcessState.STOPPED if letter == "T" else ProcessState.RUNS


def _stat(pid: int) -> tuple[str, str]:
    """Return the state of a process as a letter, and when it began; proc(5) tells where, counted after its name."""
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]


@cache
def _host() -> str:
    """Name the kernel and the namespace in which process ids count."""
    with suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    return "?"
