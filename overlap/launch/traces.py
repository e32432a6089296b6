"""One trace file of the timelines of all processes, on the clock of the first."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import trio

from ..errors import OverlapError
from ..notice import notify
from ..timeline.merge import merged, shifted
from ..timeline.spans import Timeline
from ..timeline.tracefile import pack_trace, unpack_trace, write_trace
from .membership import Membership

__all__ = ["part_path", "write_together"]

# How long the processes wait for each other's timelines: a run that has failed may have lost some.
TIMEOUT_S = 10.0


async def write_together(timeline: Timeline, path: str | PathLike[str], membership: Membership) -> bool:
    """Let process 0 write everybody's timeline to `path`; those that cannot be brought together write their own.

    These say so on stderr.

    Returns:
        Whether this process has written that of all.

    Raises:
        UsageError: If it cannot be written there.
    """
    clock = membership.clock
    mine = shifted(timeline, offset_ns=clock.offset_ns, error_ns=clock.error_ns)
    try:
        with trio.CancelScope(shield=True), trio.fail_after(TIMEOUT_S):
            parts = await membership.gather("trace", pack_trace(mine))
    except (OverlapError, trio.TooSlowError):
        part = part_path(path, membership.member)
        write_trace(mine, part)
        notify(f"no {path}, for not all processes could give their timelines; that of this one is in {part}")
        return False
    if parts is not None:
        write_trace(merged([unpack_trace(part) for part in parts]), path)
    return parts is not None


def part_path(path: str | PathLike[str], member: int) -> Path:
    """Return where a process writes its part if it cannot give it to process 0.

    >>> str(part_path("run.trace.json.gz", 2)), str(part_path("run.json", 0))
    ('run-process2.trace.json.gz', 'run-process0.json')
    """
    target = Path(path)
    stem, dot, ending = target.name.partition(".")
    return target.with_name(f"{stem}-process{member}{dot}{ending}")
