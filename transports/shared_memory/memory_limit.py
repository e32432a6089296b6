"""The memory that processes here may use: of the machine, or of their container."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes of memory this process may use: the machine's, or a lower limit of its control groups.

    A limit of a control group holds for the groups below it. Inside a container, the path of the group may be the one
    that it has outside, where it does not exist; so all parents of the path are tried, too.

    Args:
        root: Parent of `proc` and `sys`; for tests.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                limits += _read_limits(groups, path, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _read_limits(groups / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def _read_limits(mount: Path, path: str, name: str) -> list[int]:
    """Return the readable limits of a control group, at `path` below `mount`, and of the groups above it, in bytes."""
    inside = PurePosixPath(path.lstrip("/"))
    limits: list[int] = []
    for group in (inside, *inside.parents):
        with suppress(OSError, ValueError):  # "max" is no number
            limits.append(int((mount / group / name).read_text()))
    return limits
