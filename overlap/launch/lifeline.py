"""The lifeline: a pipe that only the launcher can hold open, so that no process outlives its launcher.

The launcher keeps the writing end of one pipe for each process it starts and never writes; every other process has it
closed on exec. However the launcher ends, killed or crashed, the system closes the pipe and the process at the reading
end is told.

Told by whom matters. A thread that waits for the end of the pipe needs the GIL to act on it, and a process that is
stopped, or inside one long call of C code, would live on. On Linux the kernel itself sends SIGKILL to the whole
process group instead (`F_SETSIG`, 1 to 2 ms after the end of the launcher, measured also for a stopped process and for
one that keeps the GIL). Elsewhere a thread does it. PR_SET_PDEATHSIG would be wrong: it fires when the *thread* ends
that started the process, and Trio's threads end when they are idle.

There is no grace: the launcher that could still show what the process has to say is gone. A launcher that is asked to
end (Ctrl-C, SIGTERM, SIGHUP) is another matter: it ends its processes in peace, and the lifeline stays.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import threading
from collections.abc import MutableMapping

from ..errors import UsageError
from ..threads import start_thread


def hold(descriptor: int) -> None:
    """End this process group, hard, when the other end of the pipe is closed; from now on, or if it is by now.

    Call it once, in a process that leads its group and before it starts threads. The descriptor stays open as long as
    the process lives, and is not passed on to what it starts.

    Args:
        descriptor: The reading end.
    """
    os.set_inheritable(descriptor, False)
    if not tie(descriptor, os.getpgrp()):
        # Nobody joins it: it lives exactly as long as the process, whose end is all it is for.
        start_thread(threading.Thread(target=_wait, args=(descriptor,), name="overlap lifeline", daemon=True))
    if _is_cut(descriptor):
        _end()


def tie(descriptor: int, group: int) -> bool:
    """Let the kernel kill a process group when the other end of the pipe is closed; return whether it can.

    The launcher calls it too, at once: the process itself takes a while to start. It holds as long as anybody has the
    reading end open.

    Args:
        descriptor: The reading end.
        group: The process group.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -group)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    return True


def _wait(descriptor: int) -> None:
    while not _is_cut(descriptor, timeout_ms=None):
        pass
    _end()


def _is_cut(descriptor: int, *, timeout_ms: int | None = 0) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in waiting.poll(timeout_ms))


def _end() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def take(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Become the member that the launcher has started; return whether one has.

    Ties this process to its lifeline, and keeps what it starts later from taking itself for a member. Nothing happens
    without a launcher, or if the process has been here before, or if a member has started it.

    Raises:
        UsageError: If the launcher's descriptors are not open: something between has closed them.
    """
    if not environ.get("OVERLAP_LIFELINE_FD") or environ.get("OVERLAP_MEMBER_PID"):
        return False
    environ["OVERLAP_MEMBER_PID"] = str(os.getpid())
    try:
        for name in ("SECRET", "LISTENER", "STATUS"):
            if text := environ.get(f"OVERLAP_{name}_FD"):
                os.set_inheritable(int(text), False)
        hold(int(environ["OVERLAP_LIFELINE_FD"]))
    except (ValueError, OSError) as error:
        raise UsageError(f"the descriptors of OVERLAP_*_FD are not those of `overlap run`: {error}") from None
    return True
