"""What to start: the processes of one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LaunchSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What to start.

    Attributes:
        command: The program and its arguments, the same on each node.
        environ: Environment of all.
        nodes: How many nodes the world has.
        here: The nodes to start on this machine.
        ranks_per_node: Ranks of each node; 0: there is one node, and its program says it.
        endpoint: Host and port where node 0 listens.
        listener: Descriptor of the socket that listens there; node 0 inherits it.
        job: Name of the job.
        secret: What proves membership.
        prefix: Whether to put the node before each line.
        colour: Whether to colour that.
        log_dir: Folder for what the nodes print; None: the terminal.
        grace_s: Between being asked to end and being killed.
        report: Takes lines for the user while the processes run.
        attempt: How often they have been started before.
        bind: Whether each of several processes keeps to its share of the cores, if this machine lets them.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    nodes: int
    here: Sequence[int]
    ranks_per_node: int
    endpoint: tuple[str, int]
    listener: int | None
    job: str
    secret: bytes
    prefix: bool
    colour: bool
    log_dir: str | None
    grace_s: float
    report: Callable[[str], None]
    attempt: int = 0
    bind: bool = False

    def log_path(self, node: int) -> str:
        """Return where the output of a node goes; each attempt has a file of its own."""
        again = f".restart-{self.attempt}" if self.attempt else ""
        return f"{self.log_dir}/node-{node}{again}.log"

    def __repr__(self) -> str:
        return f"<LaunchSpec of nodes {list(self.here)} of {self.nodes}, job {self.job!r}>"
