"""`overlap bench OP`: measure, always check, and print a table like that of nccl-tests."""

# In the order data flows:
#
#   options             which cases a command line asks for, and where their ranks are to be
#   operations, data    what can be measured, with which data and right results;  cases: one line of the table
#   layout              how ranks are spread over nodes;  sampling: how a time is taken
#   measuring           the timed loop on our ranks, here or (member) in each of several processes
#   versus              the same through other libraries
#   turns               ours and other libraries, row by row in turn
#   comparison          the same with and without something, side by side
#   columns, jsonfile   what is told, as text and as JSON
#   session             goes through it all

from __future__ import annotations

import argparse

from ..configoptions import count, transport

_DESCRIPTION = """\
Measure an operation over a range of sizes: time, bandwidth, and whether every result was right.

OP is an operation by its long or short name (all_reduce or allr, reduce_scatter or redsct, all_gather or allg,
all_to_all or alltoall, broadcast, reduce, gather, scatter, permute, send_recv, barrier).

Without OP, --peer-direct both measures all_reduce, all_gather and reduce_scatter at 32 MB, through a bounce buffer and
with Peer Direct, side by side; --checksums both, without and with checksums of what sockets carry.
"""

_EPILOG = """\
examples:
  overlap bench all_reduce -b 8 -e 64M --ranks 2,4
  overlap bench allr -b 64M --vs gloo,mpi          the same through torch.distributed and MPI, with ratios
  overlap bench allr -b 64M --nnodes 2 --ranks 4   two processes with two ranks each, which share memory
  overlap bench allr -b 64M --nnodes 2 --shared    results that lie there once, for all processes
  overlap bench --peer-direct both --tcp
  overlap bench allr --checksums both -b 8 -f 64   what checking all that arrives costs
  overlap bench all_gather --json result.json

Sizes: K, M, G and KiB, MiB, GiB are binary; kB, MB, GB are decimal. Bandwidths are in 10^9 bytes per second.
The exit code is 1 if a result was wrong.
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Tell the front door's parser what the command is for and what it takes."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.allow_abbrev = False
    add = parser.add_argument
    add("operation", nargs="?", metavar="OP", help="what to measure")
    add("-b", "--minbytes", metavar="SIZE", help="smallest size; default 8; alone, the only size")
    add("-e", "--maxbytes", metavar="SIZE", help="largest size; default 64M")
    add("-f", "--stepfactor", type=float, metavar="X", help="from one size to the next, times X; default 2")
    add("-i", "--stepbytes", metavar="SIZE", help="from one size to the next, plus SIZE")
    add("-n", "--iters", type=int, default=20, metavar="N", help="samples; default 20")
    add("-w", "--warmup_iters", "--warmup-iters", type=int, default=5, metavar="N", help="samples before; default 5")
    add("-d", "--datatype", default="float32", metavar="TYPE", help="such as float32 (or float), int8, bfloat16")
    add("-o", "--op", default="sum", metavar="OP", help="sum, mean, max, min, prod; default sum")
    add("-r", "--root", type=int, default=0, metavar="RANK", help="of broadcast, reduce, gather, scatter; default 0")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="check results, outside the timed loop; default 1")
    add("--ranks", metavar="N[,N...]", help="sizes of the world; default 2, or one rank a node")
    add("--in-place", action="store_true", help="put results into the memory of the inputs")
    add("--shared", action="store_true", help="put results where all ranks of the machine have them together")
    add("--common", action="store_true", help="put inputs where the other processes of this machine read them at once")
    add("--algorithm", metavar="A", help="use this algorithm where it exists, such as ring")
    add("--vs", metavar="PEERS", help="also measure gloo, mpi: if both can, in place, one after the other")
    add("--nnodes", type=count, metavar="N", help="spread the ranks over N processes of this machine")
    add("--tcp", action="store_true", help="join the nodes by TCP, not by Unix sockets")
    add("--rails", metavar="R", help="connections between two nodes: 4")
    add("--peer-direct", choices=("on", "off", "both"), help="sockets read and write the arrays; default on")
    add("--checksums", choices=("on", "off", "both"), help="sockets check all that arrives; default on between hosts")
    add(
        "--transport",
        type=transport,
        metavar="NAME",
        help="what joins the nodes: shared memory (default), sockets (efa), mpi, or one installed",
    )
    add("--json", metavar="FILE", help="write the figures there; - is stdout, instead of the table")


def main(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit code: 1 if a result was wrong.

    Raises:
        UsageError: If an option cannot be meant; nothing has been measured then.
    """
    from .session import measure

    return measure(args)
