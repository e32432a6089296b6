"""`overlap bench OP`: measures an operation, checks every result, and prints a table like that of nccl-tests."""

# In the order data flows:
#
#   options     the cases that a command line asks for, and where their ranks are
#   operations  operations by name;  cases: one row of the table, its buffers and expected results
#   sampling    samples of a time;  measuring: the timed loop on our ranks, in one process or several
#   report      the table and the JSON, from the first row to the exit code
#
# Comparisons with other libraries, and of two settings side by side, are in tests/benchmarks/versus.

from __future__ import annotations

import argparse

from ...collectives.reduce import OPS
from ...errors import UsageError
from ..options import count, transport

BOTH = "both"
"""Value of a setting that `tests.benchmarks.versus` compares on and off."""

_DESCRIPTION = """\
Measure an operation over a range of sizes: time, bandwidth, and whether every result was right.

OP is an operation by its long or short name (all_reduce or allr, reduce_scatter or redsct, all_gather or allg,
all_to_all or alltoall, broadcast, reduce, gather, scatter, permute, send_recv, barrier).
"""

_EPILOG = """\
examples:
  overlap bench all_reduce -b 8 -e 64M --ranks 2,4
  overlap bench allr -b 64M --nnodes 2 --ranks 4   two processes with two ranks each, which share memory
  overlap bench allr -b 64M --nnodes 2 --checksums on    sockets that check all that arrives
  overlap bench all_gather --json result.json

Sizes: K, M, G and KiB, MiB, GiB are binary; kB, MB, GB are decimal. Bandwidths are in 10^9 bytes per second.
The exit code is 1 if a result was wrong.

In a checkout, `python -m tests.benchmarks.versus allr --vs gloo,mpi` measures the operation through torch.distributed
and MPI too, and `python -m tests.benchmarks.versus --peer-direct both` compares two settings side by side.
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.allow_abbrev = False
    add = parser.add_argument
    add("operation", nargs="?", metavar="OP", help="operation to measure")
    add("-b", "--minbytes", metavar="SIZE", help="smallest size; default 8; alone, the only size")
    add("-e", "--maxbytes", metavar="SIZE", help="largest size; default 64M")
    add(
        "-f", "--stepfactor", type=float, default=2.0, metavar="X", help="from one size to the next, times X; default 2"
    )
    add("-n", "--iters", type=int, default=20, metavar="N", help="samples; default 20")
    add("-w", "--warmup_iters", type=int, default=5, metavar="N", help="samples before; default 5")
    add("-d", "--datatype", default="float32", metavar="TYPE", help="such as float32 (or float), int8, bfloat16")
    add("-o", "--op", default="sum", metavar="OP", help=f"{', '.join(OPS)}; default sum")
    add("-r", "--root", type=int, default=0, metavar="RANK", help="of broadcast, reduce, gather, scatter; default 0")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="check results, outside the timed loop; default 1")
    add("--ranks", metavar="N[,N...]", help="sizes of the world; default 2, or one rank a node")
    add("--in-place", action="store_true", help="put results into the memory of the inputs")
    add("--algorithm", metavar="A", help="use this algorithm where it exists, such as ring")
    add("--nnodes", type=count, metavar="N", help="spread the ranks over N processes of this machine")
    add("--tcp", action="store_true", help="join the nodes by TCP, not by Unix sockets")
    add("--rails", metavar="R", help="connections between two nodes: 4")
    either = ("on", "off", BOTH)
    add("--peer-direct", choices=either, metavar="on|off", help="sockets read and write the arrays; default on")
    add("--checksums", choices=either, metavar="on|off", help="sockets check payloads; default on between hosts")
    add("--vs", help=argparse.SUPPRESS)
    add(
        "--transport",
        type=transport,
        metavar="NAME",
        help="transport between nodes: shared memory (default), sockets (efa), mpi, or one installed",
    )
    add("--json", metavar="FILE", help="write the figures there; - is stdout, instead of the table")


def main(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit code: 1 if a result was wrong.

    Raises:
        UsageError: If an option cannot be meant; nothing has been measured then.
    """
    if args.vs is not None or BOTH in (args.peer_direct, args.checksums):
        option = "--vs" if args.vs is not None else "both"
        raise UsageError(f"{option}: moved to `python -m tests.benchmarks.versus` of a checkout")
    if args.operation is None:
        raise UsageError("OP: name the operation to measure (`overlap bench --help` explains)")
    from .report import measure

    return measure(args)
