"""Place of this process in a world of several, from its environment. Starts nothing and connects to nothing.

A world of several processes is recognised by the variables of its launcher. The rows are tried from the top; the first
with more than one process decides.

=============  =========================================================  ======================================
started by     process, processes                                         node
=============  =========================================================  ======================================
overlap run    OVERLAP_NODE_RANK, OVERLAP_NNODES                          the process itself
torchrun       RANK, WORLD_SIZE                                           GROUP_RANK, LOCAL_RANK, LOCAL_WORLD_SIZE
Open MPI       OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE                 OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE
MPICH          PMI_RANK, PMI_SIZE                                         MPI_LOCALRANKID, MPI_LOCALNRANKS
Slurm (srun)   SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS)       SLURM_NODEID, SLURM_STEP_NUM_NODES
=============  =========================================================  ======================================

Further rows must agree, or the program ends with both values: a launcher that was started once a node by another one,
as in `srun torchrun`, does agree. The same names serve scripts that set them by hand.

Processes meet at `OVERLAP_RDZV_ENDPOINT`; else at `MASTER_ADDR` and `MASTER_PORT` (at the next port if a store of torch
listens there: that of torchrun, by `TORCHELASTIC_USE_AGENT_STORE`, or of a torch.distributed that has started in
these processes); else, under Slurm, at the first host of the step's node list, at a port made from the numbers of job
and step. Without any of these only an MPI library can introduce them. Processes that all run on one machine meet on
its loopback interface. Tasks of Slurm that do not follow each other on their nodes, or of which nodes have unequally
many, count as nodes of their own.

`overlap run` sets, in `member_variables`:

==========================================  ==================================================================
variable                                    value
==========================================  ==================================================================
RANK, WORLD_SIZE                            first rank of the process; ranks of the world
LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK    0; ranks of the node; the node
OVERLAP_RDZV_ENDPOINT                       HOST:PORT where process 0 listens
MASTER_ADDR, MASTER_PORT                    that host and the next port, for a store of torch
OVERLAP_NODE_RANK, OVERLAP_NNODES           the node; how many
OVERLAP_NPROC_PER_NODE                      ranks of each node
OVERLAP_JOB                                 name of the job; only processes of one job meet
OVERLAP_SECRET_FD                           descriptor: the secret, see `secret`
OVERLAP_LISTENER_FD                         descriptor, process 0 only: the socket that listens already
OVERLAP_LIFELINE_FD                         descriptor: see `lifeline`
OVERLAP_STATUS_FD                           descriptor: see `status`
OVERLAP_HOSTS                               set with `--processes` or several launchers: nodes of the cluster
OVERLAP_RANKS_OPEN                          set with `--processes` alone: `overlap.run` sets the number of ranks
OVERLAP_RESTART                             number of earlier attempts, if the world may be restarted
OVERLAP_WITNESS                             the folder of the witness of runs that survive, see `survival.witness`
==========================================  ==================================================================

The process that reads them adds its own id as `OVERLAP_MEMBER_PID`: processes that it starts inherit the variables,
and are no members. Settings of transports (rails, TLS, ...) are in `overlap.config`. Other launchers start one rank a
process, or `OVERLAP_RANKS` in all; `OVERLAP_NNODES` then divides the processes into nodes that are not machines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

from ..config import MEMBER_VARIABLES, RunConfig
from ..errors import UsageError
from .launchers import LAUNCHER_READERS, LauncherValues, find_endpoint, is_loopback, next_port, read_number
from .secret import ADVICE, find_secret
from .sockets import format_endpoint

DEFAULT_JOB = "overlap"
LONGEST_JOB = 64  # characters; the handshake has 256 bytes for everything

_TORCH_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlace:
    """The index of a process in a world of several processes, its ranks, and the means to join the others."""

    source: str  # Launcher of the process: "overlap run", "torchrun", "Open MPI", "MPICH" or "Slurm"
    process: int  # Index of this process
    processes: int  # Number of processes, at least 2
    ranks_per_process: int  # Number of ranks that each process hosts
    node: int  # Index of the machine of this process; each has `processes // nodes` processes, in order
    nodes: int  # Number of machines
    # Host and port where process 0 listens; None: only an MPI library can introduce them.
    endpoint: tuple[str, int] | None
    job: str  # Name of the job; only processes of one job meet
    # Proof of membership. None with an endpoint: all processes are on this machine, and use `secret.user_secret`.
    secret: bytes | None = field(default=None, repr=False)
    listener: int | None = None  # Descriptor of the socket on which process 0 listens already
    ranks_open: bool = False  # Whether the program sets the number of ranks; by default 1 a process

    @property
    def ranks(self) -> range:
        """World ranks that this process hosts."""
        return self.placement[self.process]

    @property
    def placement(self) -> list[range]:
        """World ranks of each process."""
        first_ranks = range(0, self.world_size, self.ranks_per_process)
        return [range(first, first + self.ranks_per_process) for first in first_ranks]

    @property
    def world_size(self) -> int:
        """Ranks in the world."""
        return self.processes * self.ranks_per_process

    @property
    def unique_job_name(self) -> str:
        """Name of this job, unique on this machine, and the same in all processes of the job."""
        if self.job != DEFAULT_JOB or self.endpoint is None:
            return self.job
        return f"{self.job}-port{self.endpoint[1]}"  # a job without a name: only the port tells it apart from others


def find_place(environ: Mapping[str, str] = os.environ) -> ProcessPlace | None:
    """Return the place of this process among several, from the variables of its launcher; None if it is alone.

    If OVERLAP_MEMBER_PID names another process, this one is only its child, and None is returned.

    Args:
        environ: The environment.

    Raises:
        UsageError: Two launchers disagree, or a value is invalid; the error names the variables and the values. Or
            processes of several machines have no secret.
    """
    if environ.get("OVERLAP_MEMBER_PID") not in (None, "", str(os.getpid())):
        return None
    settings = RunConfig.from_environment(environ)
    row = _read_overlap_run(environ) or _read_other_launchers(environ)
    if row is None or row.processes == 1:
        return None
    endpoint = find_endpoint(environ, row)
    ranks_per_process = row.ranks_per_process or _count_ranks_per_process(settings, row)
    nodes, node = _node_count_and_index(environ, row, endpoint)
    secret = find_secret(environ)
    if endpoint and not is_loopback(endpoint[0]) and secret is None:
        raise UsageError(f"no secret: whatever reaches {format_endpoint(endpoint)} could join the job; {ADVICE}")
    # a name that a launcher has made may be longer; jobs differ in its last characters
    job = environ.get("OVERLAP_JOB") or (row.job or DEFAULT_JOB)[-LONGEST_JOB:]
    if len(job) > LONGEST_JOB or not job.isprintable():
        raise UsageError(f"job: expected at most {LONGEST_JOB} printable characters, got {job[:80]!r}")
    return ProcessPlace(
        source=row.source,
        process=row.process,
        processes=row.processes,
        ranks_per_process=ranks_per_process,
        node=node,
        nodes=nodes,
        endpoint=endpoint,
        job=job,
        secret=secret,
        listener=read_number(environ, "OVERLAP_LISTENER_FD") if environ.get("OVERLAP_NODE_RANK") else None,
        ranks_open=bool(environ.get("OVERLAP_RANKS_OPEN")),
    )


def set_rank_count(
    own_place: ProcessPlace, ranks: int | None, environ: MutableMapping[str, str] = os.environ
) -> ProcessPlace:
    """Return a place with the number of ranks that the program sets, if its launcher permits that; else the same place.

    Args:
        own_place: Place of this process.
        ranks: Ranks of the world; None: the program sets no number.
        environ: The environment, whose variables are updated.

    Raises:
        UsageError: The ranks cannot be divided evenly among the processes.
    """
    if not own_place.ranks_open:
        return own_place
    ranks_per_process, rest = divmod(ranks or own_place.processes, own_place.processes)
    if rest:
        reason = f"{ranks} ranks cannot be divided among --processes {own_place.processes}"
        raise UsageError(f"ranks: {reason}; set a multiple of {own_place.processes} by --ranks")
    environ.update(_rank_variables(own_place.process, own_place.processes, ranks_per_process))
    return replace(own_place, ranks_per_process=ranks_per_process)


def member_variables(
    *, node: int, nodes: int, ranks_per_node: int, endpoint: tuple[str, int], job: str, descriptors: Mapping[str, int]
) -> dict[str, str]:
    """Return the variables that `overlap run` sets for the process of one node.

    Args:
        node: Index of the node.
        nodes: Number of nodes.
        ranks_per_node: Ranks of each node.
        endpoint: Host and port where node 0 listens.
        job: Name of the job.
        descriptors: Inherited descriptors. The one of "secret", for example, gets the variable OVERLAP_SECRET_FD.
    """
    host, port = endpoint
    return {
        **_rank_variables(node, nodes, ranks_per_node),
        "LOCAL_RANK": "0",
        "GROUP_RANK": str(node),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(next_port(port)),
        "OVERLAP_RDZV_ENDPOINT": format_endpoint(endpoint),
        "OVERLAP_NODE_RANK": str(node),
        "OVERLAP_NNODES": str(nodes),
        "OVERLAP_JOB": job,
        **{f"OVERLAP_{name.upper()}_FD": str(descriptor) for name, descriptor in descriptors.items()},
    }


def set_place_variables(place: ProcessPlace, environ: MutableMapping[str, str] = os.environ) -> None:
    """Update the environment of this process for its place in a later world of the job, which numbers ranks again."""
    environ.update(_rank_variables(place.process, place.processes, place.ranks_per_process))
    environ.update({"OVERLAP_NODE_RANK": str(place.process), "OVERLAP_NNODES": str(place.processes)})
    if place.nodes > 1:
        environ["GROUP_RANK"] = str(place.process)


def _rank_variables(node: int, nodes: int, ranks_per_node: int) -> dict[str, str]:
    """Return the variables of torchrun for the first rank of a node, and OVERLAP_NPROC_PER_NODE."""
    return {
        "RANK": str(node * ranks_per_node),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "OVERLAP_NPROC_PER_NODE": str(ranks_per_node),
    }


def count_even_nodes(machines: Sequence[object]) -> int:
    """Return the number of machines if all have equally many processes, in order; else the number of processes.

    >>> count_even_nodes(["a", "a", "b", "b"]), count_even_nodes(["a", "b", "a", "b"])
    (2, 4)

    Args:
        machines: The machine of each process, by index.
    """
    different = list(dict.fromkeys(machines))
    in_order = [machine for machine in different for _ in range(len(machines) // len(different))] == list(machines)
    return len(different) if in_order else len(machines)


def without_launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment without the variables of launchers, for a process that is to run alone."""
    return {name: value for name, value in environ.items() if name not in MEMBER_VARIABLES | _TORCH_VARIABLES}


# -- rows --------------------------------------------------------------------------------------------------------


def _read_overlap_run(environ: Mapping[str, str]) -> LauncherValues | None:
    """Raise `UsageError` if the values are incomplete, or contradict each other."""
    process = read_number(environ, "OVERLAP_NODE_RANK")
    if process is None:
        return None
    nodes = read_number(environ, "OVERLAP_NNODES", at_least=1)
    if nodes is None:
        raise UsageError(f"OVERLAP_NODE_RANK={process} needs OVERLAP_NNODES, the number of nodes; set it too")
    if process >= nodes:
        raise UsageError(f"OVERLAP_NODE_RANK: expected 0 to {nodes - 1}, as OVERLAP_NNODES={nodes}, got {process}")
    ranks = read_number(environ, "OVERLAP_NPROC_PER_NODE", at_least=1) or 1
    for name, value in (("RANK", process * ranks), ("WORLD_SIZE", nodes * ranks)):
        if read_number(environ, name) not in (None, value):
            own = f"OVERLAP_NODE_RANK={process}, OVERLAP_NNODES={nodes}, OVERLAP_NPROC_PER_NODE={ranks}"
            raise UsageError(f"{name}={environ[name]} does not fit {own}, which make it {value}; unset one of them")
    return LauncherValues(
        source="overlap run", process=process, processes=nodes, ranks_per_process=ranks, node=process, nodes=nodes
    )


def _read_other_launchers(environ: Mapping[str, str]) -> LauncherValues | None:
    """Return the values of the innermost launcher; raise `UsageError` if an outer one disagrees.

    An outer launcher agrees if it started a single process, the same processes, or one on each node, which is the
    innermost launcher.
    """
    rows = [row for read in LAUNCHER_READERS if (row := read(environ)) is not None]
    for further in rows[1:]:
        first, started = rows[0], (further.process, further.processes)
        if further.processes != 1 and started not in ((first.process, first.processes), (first.node, first.nodes)):
            both = [f"{row.process} of {row.processes} by {row.source}" for row in (first, further)]
            raise UsageError(f"two launchers disagree: process {', '.join(both)}; unset the variables of one")
    return next(iter(rows), None)


# -- details -----------------------------------------------------------------------------------------------------


def _count_ranks_per_process(settings: RunConfig, row: LauncherValues) -> int:
    """Return 1, unless the settings have a number for the world."""
    ranks = settings.ranks
    if ranks is not None and ranks % row.processes:
        reason = f"{ranks} ranks cannot be divided among the {row.processes} processes of {row.source}"
        raise UsageError(f"{settings.sources['ranks']}: {reason}; choose a multiple of {row.processes}")
    return ranks // row.processes if ranks else 1


def _node_count_and_index(
    environ: Mapping[str, str], row: LauncherValues, endpoint: tuple[str, int] | None
) -> tuple[int, int]:
    """Return the number of nodes and the index of this process's node; raise `UsageError` if nodes would be unequal.

    The number is OVERLAP_HOSTS if it divides the processes, else OVERLAP_NNODES, else the launcher's. Without any of
    these, all processes are on one node if they meet on a loopback address, and else each is on a node of its own.
    """
    parts = read_number(environ, "OVERLAP_NNODES", at_least=1)
    hosts = read_number(environ, "OVERLAP_HOSTS", at_least=1)
    if hosts is not None and row.processes % hosts == 0:  # after losses they may have unequally many processes
        parts = hosts
    if parts is not None and row.processes % parts:
        reason = f"does not divide the {row.processes} processes of {row.source}"
        raise UsageError(f"OVERLAP_NNODES={parts}: {reason}; choose a divisor")
    alone = endpoint is not None and is_loopback(endpoint[0])
    nodes = parts or row.nodes or (1 if alone else row.processes)
    return nodes, row.process // (row.processes // nodes)
