"""A process that has imported what overlap needs, and for each request forks one that becomes what was asked for.

Started by `tests/interpreters.py`, which tells it the socket. A request is JSON: `argv` as for `python`, `cwd`, `env`,
and `session`, whether it leads a session of its own. With it come four descriptors: the standard streams, and a pipe
that is told, in lines, the pid and at the end the exit code, as `subprocess` counts it.
"""

import gc
import json
import os
import runpy
import select
import socket
import sys
import warnings
from contextlib import suppress
from importlib import import_module

PRELOADED = (
    "overlap.cli.run",
    "overlap.launch.restarts",
    "overlap.cli.simulate",
    "overlap.cli.timeline",
    "overlap.processes.connect",
)
REQUEST_BYTES = 1 << 20


class ForkServer:
    """Forks, and waits for what it has forked."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._running: dict[int, tuple[int, int]] = {}  # a descriptor of each process: its pid, and the pipe
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)

    def serve(self) -> list[str]:
        """Return only in a process that was forked, with what `python` would be given."""
        while True:
            for ready, _ in self._poll.poll():
                if ready != self._requests.fileno():
                    self._reap(ready)
                elif (argv := self._fork()) is not None:
                    return argv

    def _fork(self) -> list[str] | None:
        request, descriptors, _, _ = socket.recv_fds(self._requests, REQUEST_BYTES, 4)
        if not request:
            os._exit(0)  # whoever asked is gone
        with warnings.catch_warnings():  # of the threads of numpy's BLAS, which ends and starts them around a fork
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            self._requests.detach()
            return become(json.loads(request), descriptors[:3])
        for stream in descriptors[:3]:
            os.close(stream)
        watched = os.pidfd_open(pid)
        self._running[watched] = pid, descriptors[3]
        self._poll.register(watched, select.POLLIN)
        tell(descriptors[3], pid)
        return None

    def _reap(self, watched: int) -> None:
        pid, pipe = self._running.pop(watched)
        self._poll.unregister(watched)
        os.close(watched)
        tell(pipe, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(pipe)


def tell(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it
        os.write(pipe, b"%d\n" % number)


def become(request: dict, streams: list[int]) -> list[str]:
    """Let this process be as one that was started so, with no other files open."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    return request["argv"]


def run(argv: list[str]) -> None:
    """Run a module or a script, as `python` does with these arguments."""
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, os.path.dirname(os.path.realpath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        import_module(name)
    gc.collect()
    gc.freeze()  # or collections would write to, and so copy, all these pages
    run(ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve())
