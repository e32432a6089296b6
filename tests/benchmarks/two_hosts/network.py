"""Two hosts on one machine: network namespaces, joined by pairs of virtual Ethernet devices of a stated speed.

Nothing has to be cleaned up: a namespace lives as long as a process in it, and its devices go with it. The process that
holds each of ours ends when its standard input does, so also after `kill -9`.
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from overlap import OverlapError

_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}

# tbf (tc-tbf(8)): the bucket holds 2 ms of a 1 Gbit/s link, well above the 64 KiB that Linux hands over at once; what
# waits longer than the latency is dropped, so that must be more than TCP's window of some MiB takes.
_BURST_BYTES = 256 * 1024
_LATENCY_MS = 100


class HostsUnavailableError(OverlapError):
    """This machine cannot emulate hosts; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One of the two.

    Attributes:
        index: 0 or 1.
        pid: The process that holds its namespace.
        own_processes: Whether its processes, and what it mounts, are its own too.
    """

    index: int
    pid: int
    own_processes: bool = False

    @property
    def enter(self) -> list[str]:
        """The command that runs another one there."""
        files = {"net": "net"} | ({"pid": "pid_for_children", "mount": "mnt"} if self.own_processes else {})
        return ["nsenter", *(f"--{kind}=/proc/{self.pid}/ns/{file}" for kind, file in files.items()), "--wd=.", "--"]

    def address(self, link: int = 0) -> str:
        """Return its address on a link, whose device is called `rail` and the number on both hosts."""
        return f"10.77.{link}.{self.index + 1}"

    def run(self, *command: str, stdin: str = "") -> None:
        """Run a command of the administrator there.

        Raises:
            HostsUnavailableError: If it fails.
        """
        done = subprocess.run([*self.enter, *command], input=stdin, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HostsUnavailableError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def two_hosts(*, links: int = 1, bits_per_s: int | None, own_processes: bool = False) -> Iterator[tuple[Host, Host]]:
    """Join two hosts for the length of a `with` statement.

    Args:
        links: The number of links between them.
        bits_per_s: The speed of each link in each direction; None: whatever the machine allows.
        own_processes: Whether each host has processes and mounts of its own; all of them end with it.

    Raises:
        HostsUnavailableError: If tools or rights are missing.
    """
    _check_tools()
    with ExitStack() as stack:
        first, second = (stack.enter_context(_host(index, own_processes=own_processes)) for index in range(2))
        for host in (first, second):
            host.run("ip", "link", "set", "lo", "up")  # a host also talks to itself
        for link in range(links):
            name = f"rail{link}"
            pair = ["type", "veth", "peer", "name", name, "netns", str(second.pid)]
            outside = replace(first, own_processes=False)  # where the process of the second host has this number
            outside.run("ip", "link", "add", name, *pair)
            for host in (first, second):
                _set_up(host, link, name, bits_per_s)
        yield first, second


@contextmanager
def _host(index: int, *, own_processes: bool) -> Iterator[Host]:
    """Keep a namespace; `cat` is in it once it answers."""
    pipe = subprocess.PIPE
    own = ["--pid", "--fork", "--kill-child", "--mount-proc"] if own_processes else []
    holder = subprocess.Popen(["unshare", "--net", *own, "cat"], bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe)
    with holder:  # closes its standard input, and waits
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        with suppress(BrokenPipeError):  # it has ended, and said why
            holder.stdin.write(b"\n")
        if not holder.stdout.readline():
            raise HostsUnavailableError(
                f"no rights to make a network namespace: {holder.stderr.read().decode().strip()}"
            )
        yield Host(index=index, pid=holder.pid, own_processes=own_processes)


def _set_up(host: Host, link: int, name: str, bits_per_s: int | None) -> None:
    host.run("ip", "address", "add", f"{host.address(link)}/24", "dev", name)
    if bits_per_s is not None:
        shape = ["rate", f"{bits_per_s}bit", "burst", str(_BURST_BYTES), "latency", f"{_LATENCY_MS}ms"]
        host.run("tc", "qdisc", "add", "dev", name, "root", "tbf", *shape)
    host.run("ip", "link", "set", name, "up")


def _check_tools() -> None:
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise HostsUnavailableError(f"{tool} is not installed: apt-get install {package}")
