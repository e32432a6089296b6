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
from ...settings import Option
from ...units import count, switch
from ..options import add_options, shared_option

OPTIONS = {
    "ranks": shared_option("ranks", "several: 2,4; default: 2, or 1 for each process", read=str),
    "in_place": Option(read=switch, help="put results into the memory of the inputs"),
    "algorithm": shared_option("algorithm"),
    "processes": shared_option("processes", "default: 1", read=count),
    "tcp": Option(read=switch, help="join the processes by TCP, not by Unix sockets"),
    "rails": shared_option("rails"),
    "peer_direct": shared_option("peer_direct"),
    "checksums": shared_option("checksums"),
    "transport": shared_option("transport"),
    "json": shared_option("json"),
    "json_file": shared_option("json_file"),
}
"""Options that other commands have, too, and those of the ranks."""

_DESCRIPTION = """\
Measure an operation over a range of sizes: time, bandwidth, and whether every result was right.

OP is an operation by its long or short name (all_reduce or allr, reduce_scatter or redsct, all_gather or allg,
all_to_all or alltoall, broadcast, reduce, gather, scatter, permute, send_recv, barrier).
"""

_EPILOG = """\
examples:
  overlap bench all_reduce -b 8 -e 64M --ranks 2,4
  overlap bench allr -b 64M --processes 2 --ranks 4   two processes with two ranks each, which share memory
  overlap bench allr -b 64M --processes 2 --checksums    sockets that check all that arrives
  overlap bench all_gather --json-file result.json

Sizes: K, M, G and KiB, MiB, GiB are binary; kB, MB, GB are decimal. Bandwidths are in 10^9 bytes per second.
The exit code is 1 if a result was wrong.

In a checkout, `python -m tests.benchmarks.versus allr --vs gloo,mpi` measures the operation through torch.distributed
and MPI too, and `python -m tests.benchmarks.versus --compare peer-direct` compares two settings side by side.
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
    add("-r", "--root", type=int, default=0, metavar="RANK", help=shared_option("root").help)
    add("-c", "--verify", type=int, choices=(0, 1), default=1, help="check results, outside the timed loop")
    add_options(parser, OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit code: 1 if a result was wrong.

    Raises:
        UsageError: If an option cannot be meant; nothing has been measured then.
    """
    if args.operation is None:
        raise UsageError("OP: name the operation to measure (`overlap bench --help` explains)")
    from .report import measure

    return measure(args)
