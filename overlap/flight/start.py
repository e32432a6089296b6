"""What a flight record says of a world when it begins, and the name of its file."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import time_ns

_worlds = count()
"""A program may run several worlds, one after the other."""


def attempt(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often this job has been started again; 0 in the first attempt, and where nobody counts."""
    told = environ.get("OVERLAP_RESTART") or environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    return int(told) if told.isdecimal() else 0


def began(
    *, job: str | None, restart: int, process: int, processes: int, world_size: int, script: str
) -> tuple[str, dict[str, object]]:
    """Return the name of this process's next record, and what stands in it.

    Args:
        job: Name of the job; None: this process is a world of its own.
        restart: How often it has been started before.
        process: Index of this process.
        processes: How many there are.
        world_size: Ranks in the world.
        script: The program.
    """
    pid, world = os.getpid(), next(_worlds)
    told: dict[str, object] = {
        "job": job or f"process-{pid}-{time_ns() // 1_000_000}",
        "attempt": restart,
        "world": world,
        "process": process,
        "processes": processes,
        "world_size": world_size,
        "host": platform.node()[:100],
        "pid": pid,
        "born": born(pid),
        "script": script[-200:],
    }
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in str(told["job"]))
    return f"{plain}-attempt{restart}-world{world}-process{process}-{pid}", told


def born(pid: int) -> str:
    """Return when a process began, as its system counts; "" if that is not known."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def runs(host: str, pid: int, since: str) -> bool:
    """Whether the process of a record runs on this machine, as far as that is known."""
    return bool(since) and host == platform.node()[:100] and born(pid) == since
