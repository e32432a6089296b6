"""Launchers other than `overlap run`: the variables that they set for their processes.

`LauncherValues` has the values of one launcher. Slurm also writes its hosts in a short form: `node[01-03,7],login`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UsageError
from .sockets import parse_endpoint

# Slurm gives no port. These are above the well-known ones and below those that systems hand out by themselves
# (from 32768 on Linux), and jobs that follow each other get different ones.
SLURM_FIRST_PORT, SLURM_PORTS = 15_000, 15_000
# Names of distributions, as for `srun -m`; Slurm adds a colon and the distribution within a node.
_OUT_OF_ORDER = ("cyclic", "plane", "arbitrary")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherValues:
    """Values that one launcher has set for this process; None: it has not set the value."""

    source: str  # Name of the launcher
    process: int  # Index of this process
    processes: int  # Number of processes
    node: int | None = None  # Index of the machine of this process
    nodes: int | None = None  # Number of machines
    ranks_per_process: int | None = None  # Number of ranks of each process
    host: str | None = None  # Host of process 0
    port: int | None = None  # Port at which process 0 can listen
    job: str | None = None  # Name of this attempt of the job


def _read_torchrun(environ: Mapping[str, str]) -> LauncherValues | None:
    """Return None if it has not started this process. A restart is another job: earlier processes cannot join it."""
    job = ".".join(filter(None, (environ.get("TORCHELASTIC_RUN_ID"), environ.get("TORCHELASTIC_RESTART_COUNT"))))
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return _read_launcher_values("torchrun", environ, ("RANK", "WORLD_SIZE"), local, job=job)


def _read_open_mpi(environ: Mapping[str, str]) -> LauncherValues | None:
    """Return None if it has not started this process."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", None)
    return _read_launcher_values("Open MPI", environ, names, local, job=environ.get("PMIX_NAMESPACE"))


def _read_mpich(environ: Mapping[str, str]) -> LauncherValues | None:
    """Return None if it has not started this process."""
    return _read_launcher_values(
        "MPICH", environ, ("PMI_RANK", "PMI_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", None)
    )


def _read_slurm(environ: Mapping[str, str]) -> LauncherValues | None:
    """Return None unless `srun` has started this process as a task of a step.

    A batch script is not such a task: it has only the variables of its job, and is a single process.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    if not step:
        return None
    # variables of the step take precedence over those of the job
    size = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    row = _read_index_and_size("Slurm", environ, "SLURM_PROCID", size)
    if row is None:
        return None
    process, processes = row
    nodes = "SLURM_STEP_NUM_NODES" if environ.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
    hosts = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    count, node = read_number(environ, nodes, at_least=1), read_number(environ, "SLURM_NODEID")
    if count is not None and node is not None:
        # If nodes do not have blocks of successive tasks, each task counts as a node of its own.
        if processes > count > 1 and not _tasks_fill_nodes_in_order(environ, processes, count):
            node, count = process, processes
        _check_node_blocks("Slurm", process, processes, node=node, nodes=count)
    job = read_number(environ, "SLURM_JOB_ID") or 0
    attempt = environ.get("SLURM_RESTART_COUNT") or "0"
    return LauncherValues(
        source="Slurm",
        process=process,
        processes=processes,
        node=node,
        nodes=count,
        host=first_host(environ[hosts], name=hosts) if environ.get(hosts) else None,
        # 31 steps of a job follow each other before the ports of the next job begin
        port=SLURM_FIRST_PORT + (31 * job + int(step if step.isdecimal() else 0)) % SLURM_PORTS,
        job=f"slurm-{job}.{step}.{attempt}",
    )


def _tasks_fill_nodes_in_order(environ: Mapping[str, str], tasks: int, nodes: int) -> bool:
    """Whether Slurm fills the nodes of a step one after the other, each with the same number of tasks."""
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    tasks_here = [int(task) for task in environ.get("SLURM_GTIDS", "").split(",") if task.isdecimal()] or [0]
    # gaps between the numbers of this node's tasks: Slurm has placed tasks on the nodes in turn
    has_gaps = tasks_here[-1] - tasks_here[0] >= len(tasks_here)
    in_turn = environ.get("SLURM_DISTRIBUTION", "").startswith(_OUT_OF_ORDER) or has_gaps
    # "2(x3)" means equal nodes; "2,1" nodes with different numbers of tasks
    return not in_turn and "," not in per_node and tasks % nodes == 0


LAUNCHER_READERS = (_read_torchrun, _read_open_mpi, _read_mpich, _read_slurm)
"""From the innermost launcher to the outermost."""


def find_endpoint(environ: Mapping[str, str], row: LauncherValues) -> tuple[str, int] | None:
    """Return the host and the port at which process 0 listens, or None if no variable names them.

    Args:
        environ: The environment.
        row: Values of the launcher.

    Raises:
        UsageError: The address or the port is invalid or missing.
    """
    if text := environ.get("OVERLAP_RDZV_ENDPOINT"):
        try:
            endpoint = parse_endpoint(text)
        except UsageError as error:
            raise UsageError(f"OVERLAP_RDZV_ENDPOINT: {error}") from None
        if endpoint[1] == 0:  # a free port, which other processes would not know
            advice = "write HOST:PORT, with the port where process 0 is to listen"
            raise UsageError(f"OVERLAP_RDZV_ENDPOINT: {text!r} has no port; {advice}")
        return endpoint
    host, port = row.host, row.port
    if address := environ.get("MASTER_ADDR"):
        host, port = address, read_number(environ, "MASTER_PORT", at_least=1, at_most=65535)
        if port is None:
            raise UsageError(f"MASTER_ADDR={address} needs MASTER_PORT, the port on that host; set it too")
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or (environ is os.environ and _torch_is_initialized()):
            port = next_port(port)
    if host is None or port is None:
        return None
    # processes of one machine meet on its loopback interface, which no other machine reaches
    return ("127.0.0.1" if row.nodes == 1 else host), port


def next_port(port: int) -> int:
    """Return the port after `port`, or before the last one: a store of torch has one of the two, overlap the other."""
    return port + 1 if port < 65535 else port - 1


def _torch_is_initialized() -> bool:
    """If torch.distributed has started in this process, its store already listens at `MASTER_PORT`."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address; False for any name but "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_number(environ: Mapping[str, str], name: str, *, at_least: int = 0, at_most: int = 2**31 - 1) -> int | None:
    """Return a whole number from the environment, or None if there is none.

    Args:
        environ: The environment.
        name: Name of the variable.
        at_least: Smallest number allowed.
        at_most: Largest number allowed.

    Raises:
        UsageError: The value is no such number; the error names the variable and the value.
    """
    text = environ.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or not at_least <= int(text) <= at_most:
        raise UsageError(f"{name}: expected a whole number from {at_least} to {at_most}, got {text!r}")
    return int(text)


def _read_launcher_values(
    source: str,
    environ: Mapping[str, str],
    names: tuple[str, str],
    local: tuple[str, str, str | None],
    *,
    job: str | None = None,
) -> LauncherValues | None:
    """Return None if the launcher has set neither variable of `names`; raise `UsageError` if a value does not fit.

    `names` are the variables of this process's index and of the number of processes in the world; `local` those of its
    node, and that of the node's index, or None.
    """
    if (pair := _read_index_and_size(source, environ, *names)) is None:
        return None
    process, processes = pair
    index, size, node = (read_number(environ, name) if name else None for name in local)
    if size is None:
        return LauncherValues(source=source, process=process, processes=processes, job=job)
    if size < 1 or processes % size or (index is not None and process % size != index):
        values = f"process {process} of {processes}, {local[0]}={index}, {local[1]}={size}"
        raise _uneven_nodes_error(source, f"this is {values}")
    nodes = processes // size
    if node is not None:
        _check_node_blocks(source, process, processes, node=node, nodes=nodes)
    return LauncherValues(
        source=source, process=process, processes=processes, node=process // size, nodes=nodes, job=job
    )


def _read_index_and_size(source: str, environ: Mapping[str, str], index: str, size: str) -> tuple[int, int] | None:
    """Return None if neither variable is set; raise `UsageError` if only one is, or if the index is too large."""
    process, processes = read_number(environ, index), read_number(environ, size, at_least=1)
    if process is None and processes is None:
        return None
    if process is None or processes is None:
        present, missing = (index, size) if processes is None else (size, index)
        reason = f"{present}={environ[present]} ({source}) needs {missing}, which is not set"
        raise UsageError(f"{reason}; set both, or none")
    if process >= processes:
        allowed = f"with {size}={processes} it can be 0 to {processes - 1}"
        raise UsageError(f"{index}={process} is too large: {allowed}; correct what {source} sets")
    return process, processes


def _check_node_blocks(source: str, process: int, processes: int, *, node: int, nodes: int) -> None:
    """Raise `UsageError` if nodes have different numbers of processes, or processes are not in the order of nodes."""
    if processes % nodes or process // (processes // nodes) != node:
        raise _uneven_nodes_error(source, f"process {process} of {processes} is on node {node} of {nodes}")


def _uneven_nodes_error(source: str, found: str) -> UsageError:
    """`found` is where the launcher has placed this process."""
    rule = "nodes must have equally many processes, in order"
    return UsageError(f"{source}: {rule}; {found}; start equally many on each")


_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\[\],\s]+(?:,[^\[\],\s]+)*\])+")
_BRACKETS = re.compile(r"\[([^\[\],-]+)[^\[\]]*\]")


def first_host(hosts: str, *, name: str = "hosts") -> str:
    """Return the first host of a Slurm host list.

    >>> first_host("node[01-03,7],login"), first_host("r[2-3]n[10,12]"), first_host("a,b")
    ('node01', 'r2n10', 'a')

    Args:
        hosts: The list.
        name: Name of the list in the error.

    Raises:
        UsageError: The text is no host list.
    """
    match = _HOST.match(hosts)
    if match is None or hosts[match.end() : match.end() + 1] not in ("", ","):
        raise UsageError(f"{name}: expected a host list such as node[01-03,7],login, got {hosts!r}")
    return _BRACKETS.sub(r"\1", match[0])
