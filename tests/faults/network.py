"""Two hosts on this machine: namespaces of networks and of processes, joined by one wire that can fail.

Nothing has to be cleaned up: the process that holds the namespaces of a host ends when its standard input does, so also
after `kill -9`, and all that was started in them ends with it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "nft": "nftables"}


class Host:
    """A host: the process that holds its namespaces.

    Attributes:
        address: Its address on the wire.
    """

    def __init__(self, index: int, pid: int) -> None:
        self.address: str = f"10.77.0.{index + 1}"
        namespaces = {"net": "net", "pid": "pid_for_children", "mount": "mnt"}
        self.enter: list[str] = [
            *("nsenter", *(f"--{kind}=/proc/{pid}/ns/{file}" for kind, file in namespaces.items())),
            *("--wd=.", "--"),
        ]

    def run(self, *command: str, stdin: str = "") -> None:
        """Run a command of the administrator."""
        subprocess.run([*self.enter, *command], input=stdin, text=True, check=True, capture_output=True, timeout=60)


class Network:
    """The wire between two hosts."""

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        self.hosts = hosts

    def cut(self) -> None:
        """Take the wire away, as a switch that loses power: both hosts notice."""
        self.hosts[0].run("ip", "link", "set", "wire", "down")

    def drop(self, percent: int = 100, *, to: tuple[int, ...] = (0, 1)) -> None:
        """Drop packets in silence, at random, those that arrive at some of the hosts."""
        for index in to:
            rule = "drop" if percent == 100 else f"numgen random mod 100 < {percent} drop"
            chain = f"chain arriving {{ type filter hook input priority 0; iifname wire {rule}; }}"
            self.hosts[index].run("nft", "-f", "-", stdin=f"table inet faults {{ {chain}; }}")

    def heal(self) -> None:
        """Let all packets through."""
        for host in self.hosts:
            host.run("nft", "flush", "ruleset")
            host.run("ip", "link", "set", "wire", "up")


@contextmanager
def two_hosts() -> Iterator[Network]:
    """Join two hosts by a wire for the length of the block; skip the test where namespaces cannot be made."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            pytest.skip(f"not installed: {tool} of {package}")
    with ExitStack() as stack:
        pids = [stack.enter_context(_namespaces()) for _ in range(2)]
        hosts = Host(0, pids[0]), Host(1, pids[1])
        wire = ("link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", str(pids[1]))
        subprocess.run(["nsenter", f"--net=/proc/{pids[0]}/ns/net", "ip", *wire], check=True, timeout=60)
        for host in hosts:
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "wire")
            host.run("ip", "link", "set", "wire", "up")
        yield Network(hosts)


@contextmanager
def _namespaces() -> Iterator[int]:
    """Hold namespaces; yield the process that does. `cat` is in them once it answers."""
    pipe = subprocess.PIPE
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "cat"]
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        holder.stdin.write(b"\n")
        if not holder.stdout.readline():
            pytest.skip(f"no rights to make a network namespace: {holder.stderr.read().decode().strip()}")
        yield holder.pid
