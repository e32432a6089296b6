"""Every setting of a run: its name, how it is told from outside, what may be said, and what holds if nobody does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, TypeAlias

from transports import Transport

from .config_checks import (
    check_algorithm,
    check_cluster,
    check_data_check,
    check_folder,
    check_outage,
    check_ranks,
    check_seconds,
    check_trace,
    check_trace_steps,
    check_wires,
)
from .options import count, index, option, parse_check, parse_nodes, parse_rails, parse_transport, seconds, switch
from .timeline.spans import Timeline
from .units import parse_bytes

if TYPE_CHECKING:
    import topology

    from .simulation.simulated_backend import Virtual

Wires: TypeAlias = "Transport | Callable[[Transport], Transport]"
"""A transport, or a function that puts one around the transport that the world would have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to run; None leaves it open. What each field means stands in its help.

    A field is all there is to a setting: its option, its variable, the help and the checks follow from it.
    """

    ranks: int | None = option(
        default="those of the cluster, or 2",
        read=count, metavar="N", check=check_ranks,
        help="how many ranks; default: what the program says",
    )  # fmt: skip
    trace: str | PathLike[str] | None = option(
        default="none is kept",
        read=str, metavar="FILE", check=check_trace,
        help="write the timeline there (.json or .json.gz)",
    )  # fmt: skip
    trace_steps: str | None = option(
        default="what fits into 20,000 spans a rank",
        read=str, metavar="WHICH", check=check_trace_steps,
        help="which steps of a long run the trace keeps: last:N, every:N, or both with a comma between",
    )  # fmt: skip
    cluster: str | topology.Cluster | None = option(
        default="local",
        read=str, metavar="NAME", check=check_cluster,
        help='machine to run as, such as "trn1.32xlarge" or "local"',
    )  # fmt: skip
    timeout_s: float | None = option(
        default="no limit",
        read=seconds, metavar="S", flag="--timeout", check=partial(check_seconds, "timeout_s"),
        help="give up after S seconds; say who waits for whom",
    )  # fmt: skip
    stall_s: float | None = option(
        default="10",
        read=seconds, metavar="S", flag="--stall", check=partial(check_seconds, "stall_s"),
        help="say who waits for whom after S seconds without progress; default: 10",
    )  # fmt: skip
    give_up_s: float | None = option(
        default="300 if nobody can go on",
        read=seconds, metavar="S", flag="--give-up", check=partial(check_seconds, "give_up_s"),
        help="end the run after S seconds without progress; default: 300, and only if no rank can ever go on",
    )  # fmt: skip
    outage_s: float | None = option(
        default="4",
        read=seconds, metavar="S", flag="--outage", check=check_outage, nodes=True, wire=True,
        help="outages of the network that the run lasts through, up to 15 s; who cannot be reached for longer is lost; "
        "default: 4",
    )  # fmt: skip
    algorithm: str | None = option(
        default="the fastest",
        read=str,
        metavar="A",
        help="use this algorithm wherever it exists, such as ring",
        check=check_algorithm,
    )
    nnodes: int | None = option(
        default="1",
        read=parse_nodes,
        metavar="N",
        help="how many nodes; default: 1, this process; 2:4: with --max-restarts, fewer if that gets further",
        nodes=True,
        variable=False,
    )
    nproc_per_node: int | None = option(
        default="those of --ranks, or 1",
        read=count, metavar="N", help="ranks of each; default: what --ranks or --cluster say, or 1", nodes=True,
        variable=False,
    )  # fmt: skip
    processes: int | None = option(
        default="1",
        read=count, metavar="N", nodes=True, variable=False,
        help="spread the ranks over N processes of this machine, which share memory; default: 1",
    )  # fmt: skip
    node_rank: int | None = option(
        default="all of them",
        read=index, metavar="I", help="start only node I; the others are started by hand elsewhere", nodes=True,
        variable=False,
    )  # fmt: skip
    rdzv_endpoint: str | None = option(
        default="a free port of this machine",
        read=str, metavar="HOST:PORT", help="where node 0 listens; default: a free port of this machine", nodes=True,
        variable=False,
    )  # fmt: skip
    job_id: str | None = option(
        default="a name of its own",
        read=str,
        metavar="NAME",
        help="only processes of one job meet",
        nodes=True,
        variable=False,
    )
    transport: str | None = option(
        default="auto",
        read=parse_transport, metavar="NAME",
        help="what joins the nodes: shared memory inside a machine and sockets beyond (auto), or one of efa (sockets), "
        "shared_memory, mpi, one installed",
        nodes=True,
    )  # fmt: skip
    rails: int | tuple[str, ...] | None = option(
        default="1",
        read=parse_rails,
        metavar="R",
        help="connections for each pair of nodes: 4, or interfaces: eth0,eth1",
        nodes=True,
        wire=True,
    )
    peer_direct: bool | None = option(
        default="1",
        read=switch,
        help="sockets read and write the arrays (default)",
        off="through a bounce buffer",
        nodes=True,
        wire=True,
    )
    checksums: bool | None = option(
        default="between hosts",
        read=switch,
        help="sockets check all that arrives (default: between hosts)",
        off="only its headers",
        nodes=True,
        wire=True,
    )
    unix: bool | None = option(
        default="1",
        read=switch,
        help="Unix sockets inside one machine (default)",
        off="TCP there too",
        nodes=True,
        wire=True,
    )
    shared_memory: int | None = option(
        default="half the machine's, together",
        read=partial(parse_bytes, argument="shared_memory"),
        metavar="SIZE",
        help="memory that each process shares with others of its machine, such as 4GiB; 0: sockets there too",
        nodes=True, wire=True,
    )  # fmt: skip
    bind: bool | None = option(
        default="1",
        read=switch,
        help="each node keeps to its share of this machine's cores (default)",
        off="any core",
        nodes=True,
    )
    tls_cert: str | None = option(
        default="no encryption", read=str, metavar="FILE", help="encrypt, with this certificate", nodes=True
    )
    tls_key: str | None = option(default="no encryption", read=str, metavar="FILE", help="its private key", nodes=True)
    tls_ca: str | None = option(
        default="no encryption",
        read=str,
        metavar="FILE",
        help="the authority that signed those of all nodes",
        nodes=True,
    )
    join_timeout_s: float | None = option(
        default="60",
        read=seconds, metavar="S", flag="--join-timeout", help="all must have met after S seconds; default: 60",
        nodes=True,
    )  # fmt: skip
    max_restarts: int | None = option(
        default="0",
        read=index, metavar="N", help="start the world again up to N times if it fails (see --state-dir)",
        nodes=True, variable=False,
    )  # fmt: skip
    log_dir: str | None = option(
        default="the terminal",
        read=str, metavar="DIR", help="what node I prints goes to DIR/node-I.log, not to the terminal", nodes=True,
        variable=False,
    )  # fmt: skip
    prefix: bool | None = option(
        default="1 with several nodes",
        read=switch, help="[node I] before each line (default with several nodes, but for mpi)",
        off="lines as they are", nodes=True, variable=False,
    )  # fmt: skip
    unannounced: bool | None = option(
        read=switch, nodes=True, variable=False, hidden=True
    )  # a command of ours says why
    grace_s: float | None = option(
        default="10",
        read=seconds, metavar="S", flag="--grace", help="from Ctrl-C to the hard end; default: 10", nodes=True,
        variable=False,
    )  # fmt: skip
    check: str | None = option(
        default="nothing", read=parse_check, metavar="nan", check=check_data_check,
        help="fail the first rank that sends a NaN or an infinity: nan",
    )  # fmt: skip
    flight_dir: str | None = option(
        default="in the temporary folder",
        read=str, metavar="DIR", help="where the flight records of a run that fails are (see `overlap autopsy`)",
        check=partial(check_folder, "flight_dir"),
    )  # fmt: skip
    state_dir: str | None = option(
        default="nowhere",
        read=str, metavar="DIR", help="where rank.state keeps what a restart goes on from",
        check=partial(check_folder, "state_dir"),
    )  # fmt: skip
    virtual: Virtual | None = option(variable=False)
    wires: Wires | None = option(variable=False, check=check_wires)
    watcher: Callable[[Timeline], None] | None = option(variable=False)
