"""The one description of a run: every setting, and who has said it.

The arguments of `run`, the options of `overlap run`, the environment and the launcher each say some of it. What they
say is laid over each other, the first wins:

1. what a command imposes on every run of its program (`requested.overriding`);
2. the launcher that started several processes: how many ranks there are;
3. the options of `overlap run`; then `OVERLAP_*` variables, `OVERLAP_RANKS` for `ranks` and so on; empty is unset;
4. the arguments of `run`.

A field of `RunConfig` is all there is to a setting: its option, its variable, the help and the checks follow from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from transports import Transport

from . import trace_files
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
from .errors import UsageError
from .options import (
    Option,
    count,
    index,
    option,
    parse_check,
    parse_nodes,
    parse_rails,
    parse_transport,
    seconds,
    switch,
    text_of,
)
from .timeline.spans import Timeline
from .units import parse_bytes

if TYPE_CHECKING:
    import topology

    from .virtual.simulated_backend import Virtual

__all__ = ["ARGUMENT", "RunConfig", "Wires", "imposed", "variable_of"]

Wires: TypeAlias = "Transport | Callable[[Transport], Transport]"
"""A transport, or a function that puts one around the transport that the world would have."""

ARGUMENT = "argument"
"""Source of what the program gives to `run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How to run; None leaves it open. What each field means stands in its help.

    Attributes:
        sources: Who has said what: "argument", an option, a variable, or the launcher's name; what is open has none.
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
        read=seconds, metavar="S", flag="--outage", check=check_outage, nodes=True,
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
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    # -- where it comes from -----------------------------------------------------------------------------------------

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return how each field is told."""
        return {each.name: each.metadata["option"] for each in fields(cls) if "option" in each.metadata}

    @classmethod
    def given(cls, source: str = ARGUMENT, **values: Any) -> Self:
        """Return what one source says; None says nothing."""
        said = {name: value for name, value in values.items() if value is not None}
        return cls(**said, sources=dict.fromkeys(said, source))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the variables.

        Raises:
            UsageError: If a value cannot be meant; names the variable and the value.
        """
        told = {
            name: (variable_of(name), one.read)
            for name, one in cls.options().items()
            if one.variable and one.read is not None and environ.get(variable_of(name))
        }
        values: dict[str, Any] = {
            name: _read(read, environ[variable], variable) for name, (variable, read) in told.items()
        }
        return cls(**values, sources={name: _source(name, environ, variable) for name, (variable, _) in told.items()})

    def variables(self) -> dict[str, str]:
        """Return the environment variables that say the same."""
        return {
            variable_of(name): text_of(getattr(self, name))
            for name, one in self.options().items()
            if one.variable and one.read is not None and getattr(self, name) is not None
        }

    def over(self, other: Self) -> Self:
        """Return this laid over another: what is open here is as there."""
        mine = {name: getattr(self, name) for name in self.options() if getattr(self, name) is not None}
        return replace(other, **mine, sources={**other.sources, **{n: s for n, s in self.sources.items() if n in mine}})

    def changed(self, source: str | None = None, /, **changes: Any) -> Self:
        """Return this with some fields changed; without a source, those who have said them have meant it so."""
        told = {} if source is None else dict.fromkeys(changes, source)
        return replace(self, **changes, sources={**self.sources, **told})

    def transport_options(self) -> dict[str, object]:
        """Return what the transport between processes is told, as far as anybody has said it."""
        told = {name: getattr(self, name) for name, one in self.options().items() if one.wire}
        return {name: value for name, value in told.items() if value is not None}

    def tls_files(self) -> tuple[str, str, str] | None:
        """Return the files with the certificate, its key and the trusted authorities; None: no encryption.

        Raises:
            UsageError: If there are some of them only.
        """
        if self.tls_cert and self.tls_key and self.tls_ca:
            return self.tls_cert, self.tls_key, self.tls_ca
        if self.tls_cert or self.tls_key or self.tls_ca:
            raise UsageError("TLS needs three files: OVERLAP_TLS_CERT, OVERLAP_TLS_KEY and OVERLAP_TLS_CA")
        return None

    # -- what it says ------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            UsageError: Naming the field and the value.
        """
        for name, one in self.options().items():
            if one.check is not None and getattr(self, name) is not None:
                try:
                    one.check(getattr(self, name))
                except UsageError as error:
                    raise UsageError(f"{error}{self.told(name)}") from None
        self.tls_files()

    def told(self, *names: str) -> str:
        """Return, for the end of an error, who has said these; nothing if it was the program itself."""
        said = {name: self.sources[name] for name in names if name in self.sources}
        if set(said.values()) <= {ARGUMENT}:
            return ""
        return f" ({', '.join(f'{name}: {source}' for name, source in said.items())})"

    def lines(self) -> Iterator[str]:
        """Yield a line for each field that somebody can say: its name, its value, and who has said it."""
        for name, one in self.options().items():
            if one.read is not None and not one.hidden:
                value = getattr(self, name)
                text = one.default if value is None else text_of(getattr(value, "name", value))
                yield f"{name:<16} {text:<32} {self.sources.get(name, 'default')}".rstrip()


def variable_of(name: str) -> str:
    """Return the environment variable of a field."""
    return f"OVERLAP_{name.upper()}"


def _read(read: Callable[[str], object], text: str, variable: str) -> object:
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{variable}: {error}") from None


# -- what commands impose ------------------------------------------------------------------------------------------

_imposed: list[RunConfig] = []  # by `imposed`, the innermost last: it knows who has said what the variables say


def _source(name: str, environ: Mapping[str, str], variable: str) -> str:
    said = _imposed[-1] if _imposed else RunConfig()
    same = getattr(said, name, None) is not None and text_of(getattr(said, name)) == environ[variable]
    return said.sources.get(name, variable) if same else variable


@contextmanager
def imposed(config: RunConfig) -> Iterator[None]:
    """Make the environment say exactly `config` for the block, and number its traces from the start."""
    names = [variable_of(name) for name, one in config.options().items() if one.variable]
    before = {name: os.environ[name] for name in names if name in os.environ}
    _say(names, config.variables())
    _imposed.append(config)
    trace_files.forget()
    try:
        yield
    finally:
        _imposed.pop()
        _say(names, before)


def _say(names: list[str], variables: Mapping[str, str]) -> None:
    for name in names:
        if name in variables:
            os.environ[name] = variables[name]
        else:
            os.environ.pop(name, None)
