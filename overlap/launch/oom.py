"""How often the kernel has killed a process of our control group because memory ran out, where it counts that."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def oom_kills(root: Path = Path("/")) -> int:
    """Return the count so far; 0 where none is kept.

    Args:
        root: Above `proc` and `sys`; for tests.
    """
    count = 0
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            count += _counted(root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            count += _counted(root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control")
    return count


def _counted(file: Path) -> int:
    for line in _lines(file):
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdecimal():
            return int(value)
    return 0


def _lines(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
