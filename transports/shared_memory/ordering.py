"""The order in which processes see what each of them writes to memory that they share.

An x86 processor keeps the order of writes, and that of reads; only a read may come before an earlier write, which a
fence forbids. Others keep no order at all.
"""

from __future__ import annotations

import platform
import threading

#: Whether the processor keeps the order of writes, and of reads, and taking a lock orders reads after writes.
FENCED = platform.machine() in ("x86_64", "AMD64")

#: A processor may read the others' words before its own is written; taking and releasing a lock forbids that.
FENCE = threading.Lock()


def fence() -> None:
    """Make earlier writes visible before anything more is read."""
    with FENCE:
        pass


def keep_order() -> None:
    """Keep earlier reads and writes before later ones, on processors that do not; on others there is no need to call.

    A lock that is released and taken again is a barrier both ways: on ARM no acquisition comes before an earlier
    release (Arm Architecture Reference Manual, B2.3: load-acquire and store-release).
    """
    fence()
    fence()
