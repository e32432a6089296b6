"""The options of `overlap run` that concern several processes."""

from __future__ import annotations

import argparse
import math
from typing import Any

from ..errors import UsageError
from ..settings import parse_rails, parse_transport

__all__ = ["add_options", "count", "index", "seconds", "transport"]

GRACE_S = 10.0  # as torchrun's users know it


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them; a name may be written with dashes or with underscores."""
    group = parser.add_argument_group("several processes, one for each node")

    def add(name: str, **details: Any) -> None:
        group.add_argument(name, **details)
        if "-" in name[2:]:
            group.add_argument(f"--{name[2:].replace('-', '_')}", **details | {"help": argparse.SUPPRESS})

    def add_switch(name: str, *, help: str, off: str) -> None:
        field = name.replace("-", "_")
        add(f"--{name}", dest=field, action="store_true", default=None, help=help)
        add(f"--no-{name}", dest=field, action="store_false", default=None, help=off)

    add("--nnodes", type=count, metavar="N", help="how many nodes; default: 1, this process")
    add("--nproc-per-node", type=count, metavar="N", help="ranks of each; default: what --ranks or --cluster say, or 1")
    add("--node-rank", type=index, metavar="I", help="start only node I; the others are started by hand elsewhere")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="where node 0 listens; default: a free port of this machine")
    add("--job-id", metavar="NAME", help="only processes of one job meet")
    add(
        "--transport", type=transport, metavar="NAME", help="what joins the nodes: sockets (efa), mpi, or one installed"
    )
    add("--rails", type=_rails, metavar="R", help="connections for each pair of nodes: 4, or interfaces: eth0,eth1")
    add_switch("peer-direct", help="sockets read and write the arrays (default)", off="through a bounce buffer")
    add_switch("unix", help="Unix sockets inside one machine (default)", off="TCP there too")
    add("--tls-cert", metavar="FILE", help="encrypt, with this certificate")
    add("--tls-key", metavar="FILE", help="its private key")
    add("--tls-ca", metavar="FILE", help="the authority that signed those of all nodes")
    add("--join-timeout", type=seconds, metavar="S", help="all must have met after S seconds; default: 60")
    add("--log-dir", metavar="DIR", help="what node I prints goes to DIR/node-I.log, not to the terminal")
    add_switch("prefix", help="[node I] before each line (default with several nodes)", off="lines as they are")
    group.add_argument("--unannounced", action="store_true", help=argparse.SUPPRESS)  # a command of ours says why
    add("--grace", type=seconds, default=GRACE_S, metavar="S", help="from Ctrl-C to the hard end; default: 10")


def count(text: str) -> int:
    """Read a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def index(text: str) -> int:
    """Read a whole number that may be 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text!r}")
    return int(text)


def _rails(text: str) -> int | tuple[str, ...]:
    try:
        return parse_rails(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def transport(text: str) -> str:
    """Read the name of a transport."""
    try:
        return parse_transport(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
