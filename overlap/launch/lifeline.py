"""The lifeline: a pipe that only the launcher can hold open, so that no process outlives its launcher.

The launcher keeps the writing end of a pipe for each process that it starts, and never writes. No other process has the
writing end. However the launcher ends, killed or crashed, the system closes the pipe, and the process at the reading
end ends, too.

A thread that waits for the end of the pipe would need the GIL to act on it, and a process that is stopped, or inside
one long call of C code, would live on. So on Linux the kernel sends SIGKILL to the whole process group (`F_SETSIG`, 1
to 2 ms after the end of the launcher, measured also for a stopped process and for one that keeps the GIL). Elsewhere a
thread does it. PR_SET_PDEATHSIG would be wrong: it fires when the *thread* ends that started the process, and Trio's
threads end when they are idle.

There is no grace period, because no launcher is left to show the output. A launcher that gets Ctrl-C, SIGTERM or
SIGHUP ends its processes with a grace period, and the lifeline stays open until then.
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


def tie_to_pipe(descriptor: int, group: int) -> bool:
    """Let the kernel kill a process group when the other end of a pipe is closed; return whether the kernel can do it.

    It works as long as a process has the reading end open. The launcher calls this, too, because the started process
    needs some time before it can.

    Args:
        descriptor: Reading end of the pipe.
        group: Id of the process group.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return False
    # negative: a group, not a process
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -group)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    return True


def _kill_when_cut(descriptor: int) -> None:
    """Wait until the other end of the pipe is closed, and kill this process group."""
    while not _is_pipe_closed(descriptor, timeout_ms=None):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _is_pipe_closed(descriptor: int, *, timeout_ms: int | None = 0) -> bool:
    """Wait up to `timeout_ms` for the other end of the pipe to be closed; return whether it is. None: no limit."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in waiting.poll(timeout_ms))


def join_launcher(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Make this process a member of the job of its launcher; return whether there is one.

    The process must lead its process group, and have no threads yet. It is tied to its lifeline. The environment is
    marked, so that children of the process are not members, and the children do not inherit the descriptors. Nothing
    happens without a launcher, in a second call, or in a child of a member.

    Raises:
        UsageError: The descriptors of the launcher are not open, because a program between the two has closed them.
    """
    if not environ.get("OVERLAP_LIFELINE_FD") or environ.get("OVERLAP_MEMBER_PID"):
        return False
    environ["OVERLAP_MEMBER_PID"] = str(os.getpid())
    try:
        for name in ("SECRET", "LISTENER", "STATUS", "LIFELINE"):
            if text := environ.get(f"OVERLAP_{name}_FD"):
                os.set_inheritable(int(text), False)
        lifeline = int(environ["OVERLAP_LIFELINE_FD"])
        if not tie_to_pipe(lifeline, os.getpgrp()):
            # No thread joins this one, which lives exactly as long as the process.
            thread = threading.Thread(target=_kill_when_cut, args=(lifeline,), name="overlap lifeline", daemon=True)
            start_thread(thread)
        # the launcher ended before the pipe was tied
        if _is_pipe_closed(lifeline):
            os.killpg(os.getpgrp(), signal.SIGKILL)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"the descriptors of OVERLAP_*_FD are not open here: {error}; a program between `overlap run` and this one "
            "has closed them: let it pass them on, or unset these variables"
        ) from None
    return True
