"""Settings of a run: for each one its option and environment variable, allowed values, and default."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import UsageError
from .timeline.recording import KeptSteps
from .timeline.spans import Timeline
from .units import parse_bytes, parse_count, parse_index, parse_seconds, parse_yes_no

if TYPE_CHECKING:
    import topology
    from transports import Transport

    from .simulation.simulated_backend import Virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Description of a setting: its option of a command, and its environment variable."""

    # Converts text to a value, or raises `UsageError`; None: text cannot set it.
    read: Callable[[str], object] | None = None
    metavar: str | None = None  # The name of the value in the help; None for a switch
    help: str = ""  # Help of the option, in one line
    off: str | None = None  # Help of `--no-...`, which sets a switch to False
    default: str | None = None  # The default value in words; None: as the help says
    flag: str | None = None  # The option, such as "--timeout"; None: made of the field's name
    variable: bool = True  # Whether the environment variable `OVERLAP_<NAME>` sets the value
    nodes: bool = False  # Whether the setting concerns several processes
    wire: bool = False  # Whether the value is passed on to the transport that joins processes
    variable_only: bool = False  # Whether only the variable sets the value: for tests and benchmarks
    short: str | None = None  # The option with one letter
    rare: bool = False  # Whether only `--help-all` shows it
    repeated: bool = False  # Whether the option may be given several times; its value is a list
    check: Callable[[Any], object] | None = None  # Raises `UsageError` for values that cannot be used, from any source

    @property
    def default_text(self) -> str:
        """Default value in words, or "-" if there is none."""
        if self.default is not None:
            return self.default
        if named := re.search("default: ([^;]+)", self.help):
            return named[1]
        if "(default)" in self.help:
            return "1"
        return "0" if "(default)" in (self.off or "") else "-"


def option(**details: Any) -> Any:
    """Return a dataclass field with default None, and an `Option` of these arguments in its metadata."""
    return field(default=None, metadata={"option": Option(**details)})


def rare_option(**details: Any) -> Any:
    """Return an `option` that only `--help-all` shows."""
    return option(rare=True, **details)


def launcher_option(**details: Any) -> Any:
    """Return a `rare_option` of the launcher of several processes, without an environment variable."""
    return rare_option(nodes=True, variable=False, **details)


def wire_option(**details: Any) -> Any:
    """Return an `option` that is passed on to the transport between processes."""
    return option(nodes=True, wire=True, **details)


def tls_file_option(help: str) -> Any:
    """Return a `rare_option` with the path of a file that encryption needs."""
    return rare_option(default="no encryption", read=str, metavar="FILE", help=help, nodes=True)


# -- values as text --------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


def parse_rails(text: str) -> int | tuple[str, ...]:
    """Return the value of `--rails`: "4" is a number of connections, "eth0,eth1" names of interfaces.

    Raises:
        UsageError: The text is neither, or names an interface twice.
    """
    if text.strip().isdecimal() and int(text) > 0:
        return int(text)
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names) or any(_NUMBER.fullmatch(name) for name in names):
        raise UsageError(f"expected a positive number, or different interfaces such as eth0,eth1, got {text!r}")
    return names


def parse_transport(text: str) -> str:
    """Return the name of a transport, after a check that it is installed, or "auto", which leaves the choice.

    Raises:
        UsageError: The name is unknown.
    """
    from transports import factory

    try:
        if text != "auto":
            factory.check_name(text)
    except factory.UnknownTransportError as error:
        raise UsageError(str(error).replace("known are ", "known are auto, ", 1)) from None
    return text


def parse_engine(text: str) -> str:
    """Return the name of an engine, which can only be "ray"; raises `UsageError` for another name."""
    if text != "ray":
        raise UsageError(f"expected ray, got {text!r}")
    return text


def format_setting(value: object) -> str:
    """Return the value of a setting as text; the setting's parser (`Option.read`) returns the same value for it."""
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# -- checks of values ------------------------------------------------------------------------------------------------

_SHORTEST_SILENCE_S = 2  # least `lost_after_s`: a process sends four signs of life in this time
_LONGEST_OUTAGE_S = 15  # seconds after which a process without rails is lost (`transports.efa`)


def check_ranks(ranks: object) -> None:
    """Raise `UsageError` unless a number of ranks is a positive integer."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise UsageError(f"ranks: expected a positive integer, got {ranks!r}")


def check_seconds(name: str, value_s: object, *, least_s: float | None = None, most_s: float = inf) -> None:
    """Raise `UsageError` unless a value is a positive number of seconds within bounds.

    Args:
        name: Name of the setting, for the error.
        value_s: The value.
        least_s: Least value; None: no bounds, and infinity is allowed.
        most_s: Greatest value, if `least_s` is given.
    """
    if not isinstance(value_s, Real) or isinstance(value_s, bool) or not float(value_s) > 0:
        raise UsageError(f"{name}: expected a positive number of seconds, got {value_s!r}")
    if least_s is not None and not (least_s <= float(value_s) <= most_s and float(value_s) < inf):
        bounds = f"from {least_s:g} to {most_s:g}" if most_s < inf else f"at least {least_s:g}"
        raise UsageError(f"{name}: expected {bounds} seconds, got {float(value_s):g}")


def check_trace(trace: object) -> None:
    """Raise `UsageError` unless a value is the path of a file in an existing folder."""
    if not isinstance(trace, (str, PathLike)) or not os.fspath(trace):
        raise UsageError(f"trace: expected the name of a file, got {trace!r}")
    if not Path(trace).parent.is_dir():
        raise UsageError(f"trace: the folder {str(Path(trace).parent)!r} does not exist; make it first")


def check_trace_steps(steps: object) -> None:
    """Raise `UsageError` unless a value selects steps of a run, such as "last:100,every:10"."""
    try:
        KeptSteps.parse(str(steps))
    except ValueError as error:
        raise UsageError(f"trace_steps: {error}") from None


def check_data_check(check: object) -> None:
    """Raise `UsageError` unless the check of sent data is "nan"."""
    if check != "nan":
        raise UsageError(f"check: expected 'nan', got {check!r}")


def check_folder(name: str, folder: str) -> None:
    """Raise `UsageError` unless a value is the path of a folder, or of nothing: it may be made later.

    Args:
        name: Name of the setting, for the error.
        folder: The value.
    """
    if not isinstance(folder, str):
        raise UsageError(f"{name}: expected a path, got {folder!r}")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UsageError(f"{name}: {folder} is no folder; make it, or name another")


def check_cluster(cluster: object) -> None:
    """Raise `UsageError` unless a value is a cluster or a text; here, any text counts as the name of a cluster."""
    if isinstance(cluster, str):
        return
    import topology  # not at the top: a program that only imports overlap should not load the machines

    if not isinstance(cluster, topology.Cluster):
        raise UsageError(f"cluster: expected a cluster or its name, got {cluster!r}")


def check_algorithm(name: str) -> None:
    """Raise `UsageError` unless a name is that of an algorithm of some collective."""
    from .cost import select  # loads all generators

    select.check_algorithm(name)


def check_transport_object(transport: object) -> None:
    """Raise `UsageError` unless a value is a transport, or a function that makes one."""
    from transports import Transport  # not at the top: commands that read files load no transport

    if not isinstance(transport, Transport) and not callable(transport):
        hint = f"; a name is given by --transport {transport}" if isinstance(transport, str) else ""
        raise UsageError(f"transport: expected a transport, or a function that makes one, got {transport!r}{hint}")


# -- the settings ----------------------------------------------------------------------------------------------------

Wires: TypeAlias = "Transport | Callable[[Transport], Transport]"
"""A transport, or a function that takes the default transport of a world and returns one around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of a run; None leaves a setting open. The meaning of a field is the help of its option.

    Option, environment variable, help and checks of a setting follow from its field alone.
    """

    ranks: int | None = option(
        read=parse_count, metavar="N", check=check_ranks,
        help="how many ranks; default: what the program says, or 1 for each of --processes",
    )  # fmt: skip
    trace: str | PathLike[str] | None = option(
        default="none is kept",
        read=str, metavar="FILE", check=check_trace,
        help="write the timeline there; .json or .json.gz",
    )  # fmt: skip
    trace_steps: str | None = rare_option(
        default="what fits into 20,000 spans a rank",
        read=str, metavar="WHICH", check=check_trace_steps,
        help="which steps of a long run the trace keeps: last:N, every:N, or both with a comma between",
    )  # fmt: skip
    cluster: str | topology.Cluster | None = option(
        read=str, metavar="NAME", check=check_cluster,
        help='cluster of machines, such as "trn2.48xlarge x4"; default: the program\'s, or local',
    )  # fmt: skip
    timeout_s: float | None = option(
        default="no limit",
        read=parse_seconds, metavar="S", flag="--timeout", check=partial(check_seconds, "timeout_s"),
        help="give up after S seconds; say who waits for whom",
    )  # fmt: skip
    stall_s: float | None = rare_option(
        read=parse_seconds, metavar="S", flag="--stall-warning", check=partial(check_seconds, "stall_s"),
        help="say who waits for whom after S seconds without progress; default: 10",
    )  # fmt: skip
    give_up_s: float | None = rare_option(
        read=parse_seconds, metavar="S", flag="--stall-timeout", check=partial(check_seconds, "give_up_s"),
        help="end the run after S seconds without progress; default: 300, and only if no rank can ever go on",
    )  # fmt: skip
    outage_s: float | None = wire_option(
        rare=True,
        read=parse_seconds, metavar="S", flag="--outage",
        check=partial(check_seconds, "outage_s", least_s=1, most_s=_LONGEST_OUTAGE_S),
        help="outages of the network that the run lasts through, up to 15 s; who cannot be reached for longer is lost; "
        "default: 4",
    )  # fmt: skip
    algorithm: str | None = rare_option(
        read=str,
        metavar="A",
        help="use this algorithm wherever it exists, such as ring; default: the fastest",
        check=check_algorithm,
    )
    processes: int | None = option(
        read=parse_count, metavar="N", nodes=True, variable=False,
        help="spread the ranks over N processes of this host; they share memory; default: 1",
    )  # fmt: skip
    ranks_per_process: int | None = launcher_option(
        read=parse_count, metavar="N",
        help="ranks of each process; default: those of --ranks or --cluster divided, or 1",
    )  # fmt: skip
    nnodes: int | None = launcher_option(
        read=parse_count, metavar="N",
        help="hosts, each of which starts --processes of its own; needs --node-rank and --rdzv-endpoint; default: 1",
    )  # fmt: skip
    node_rank: int | None = launcher_option(
        default="this host alone",
        read=parse_index, metavar="I", help="number of this host, from 0 to --nnodes - 1",
    )  # fmt: skip
    rdzv_endpoint: str | None = launcher_option(
        read=str, metavar="HOST:PORT", help="where host 0 listens; default: a free port of this host",
    )  # fmt: skip
    job_id: str | None = launcher_option(
        default="a name of its own",
        read=str,
        metavar="NAME",
        help="only processes of one job meet",
    )
    transport: str | None = rare_option(
        default="auto",
        read=parse_transport, metavar="NAME",
        help="what joins the processes; shared memory inside a host and sockets beyond (auto), or one of sockets (or "
        "efa), shared_memory, one installed",
        nodes=True,
    )  # fmt: skip
    rails: int | tuple[str, ...] | None = wire_option(
        rare=True,
        default="1",
        read=parse_rails,
        metavar="R",
        help="connections for each pair of processes; 4, or interfaces: eth0,eth1",
    )
    peer_direct: bool | None = wire_option(
        variable_only=True,
        read=parse_yes_no,
        help="arrays are sent and received where they are (default); by sockets",
        off="through a copy; of sockets, a bounce buffer",
    )
    checksums: bool | None = wire_option(
        rare=True,
        read=parse_yes_no,
        help="sockets check all that arrives; default: between hosts",
        off="only its headers",
    )
    unix: bool | None = wire_option(
        variable_only=True,
        read=parse_yes_no,
        help="Unix sockets inside one machine (default), not TCP",
    )
    shared_memory: int | None = wire_option(
        rare=True,
        default="half the machine's, together",
        read=partial(parse_bytes, argument="shared_memory"),
        metavar="SIZE",
        help="memory that each process shares with others of its machine, such as 4GiB; 0: sockets there too",
    )  # fmt: skip
    bind: bool | None = rare_option(
        read=parse_yes_no,
        help="each process keeps to its share of this host's cores (default)",
        off="any core",
        nodes=True,
    )
    engine: str | None = launcher_option(
        default="this machine",
        read=parse_engine, metavar="NAME",
        help="place the processes on a cluster of ray, the one to which this machine is connected",
    )  # fmt: skip
    tls_cert: str | None = tls_file_option("encrypt, with this certificate")
    tls_key: str | None = tls_file_option("its private key")
    tls_ca: str | None = tls_file_option("the authority that signed those of all processes")
    join_timeout_s: float | None = rare_option(
        read=parse_seconds, metavar="S", flag="--join-timeout", help="all must have met after S seconds; default: 60",
        nodes=True,
    )  # fmt: skip
    max_restarts: int | None = option(
        default="0",
        read=parse_index, metavar="N", help="start the world again up to N times if it fails; see --state-dir",
        nodes=True, variable=False,
    )  # fmt: skip
    survive: bool | None = option(
        read=parse_yes_no, nodes=True,
        help="go on when a process is lost; the others meet again in a smaller world and call main again",
        off="the loss of a process ends the run (default)",
    )  # fmt: skip
    witness: str | None = launcher_option(
        default="the memory of this host",
        read=str, metavar="DIR", check=partial(check_folder, "witness"),
        help="with --survive on several hosts: a folder that all of them share, which decides who goes on",
    )  # fmt: skip
    lost_after_s: float | None = rare_option(
        read=parse_seconds, metavar="S", flag="--lost-after", nodes=True,
        check=partial(check_seconds, "lost_after_s", least_s=_SHORTEST_SILENCE_S),
        help="a process that is silent or stopped for so long is lost, at least 2 s; default: 15, on another "
        "host that answers 300",
    )  # fmt: skip
    log_dir: str | None = launcher_option(
        default="the terminal",
        read=str, metavar="DIR", help="output of process I goes to DIR/process-I.log, not to the terminal",
    )  # fmt: skip
    prefix: bool | None = launcher_option(
        default="1 with several processes",
        read=parse_yes_no, help="[process I] before each line (default with several)",
        off="lines as they are",
    )  # fmt: skip
    grace_s: float | None = launcher_option(
        read=parse_seconds, metavar="S", flag="--grace", help="from Ctrl-C to the hard end; default: 10",
    )  # fmt: skip
    check: str | None = rare_option(
        default="nothing", read=str, metavar="nan", check=check_data_check,
        help="fail the first rank that sends a NaN or an infinity; nan",
    )  # fmt: skip
    flight_dir: str | None = rare_option(
        default="in the temporary folder",
        read=str, metavar="DIR", help="where the flight records of a run that fails are (see `overlap why`)",
        check=partial(check_folder, "flight_dir"),
    )  # fmt: skip
    state_dir: str | None = option(
        default="nowhere",
        read=str, metavar="DIR", help="where rank.state keeps what a restart goes on from",
        check=partial(check_folder, "state_dir"),
    )  # fmt: skip
    virtual: Virtual | None = option(variable=False)
    wires: Wires | None = option(variable=False, check=check_transport_object)
    watcher: Callable[[Timeline], None] | None = option(variable=False)
    # Called repeatedly in virtual time, with the instant in ns, and the last step that a rank has begun, or None.
    pulse: Callable[[int, int | None], None] | None = option(variable=False)
