"""`overlap bench OP`: measures an operation, checks every result, and prints a table like that of nccl-tests."""

# In the order data flows:
#
#   cases       operations by name; one row of the table, with its buffers and expected results; those of the options
#   sampling    samples of a time
#   measuring   the route from the options to the exit code: the timed loop on our ranks, the table and the JSON
#
# Comparisons with other libraries, and of two settings side by side, are in tests/benchmarks/versus.

from __future__ import annotations

import argparse

from ...collectives.reduce import OPS
from ...settings import Option
from ...units import parse_count, parse_index, parse_yes_no
from ..options import add_options, as_argument_type, shared_option
from .cases import NAMES

OPTIONS = {
    "ranks": shared_option(
        "ranks",
        "several: 2,4; default: 2, or 1 for each process",
        read=lambda text: [*map(parse_count, text.split(","))],
    ),
    "in_place": Option(read=parse_yes_no, help="put results into the memory of the inputs"),
    "algorithm": shared_option("algorithm"),
    "processes": shared_option("processes", "default: 1", read=parse_count),
    "json": shared_option("json"),
}
"""Options that other commands have, too, and those of the ranks."""

DESCRIPTION = """\
Measure an operation over a range of sizes: time, bandwidth, and whether every result was right.

OP is its long or short name (all_reduce or allr, reduce_scatter or redsct, all_gather or allg,
all_to_all or alltoall, broadcast or bcast, reduce or red, gather, scatter, send_recv or sendrecv).
"""

EPILOG = """\
examples:
  overlap bench all_reduce -b 8 -e 64M --ranks 2,4
  overlap bench allr -b 64M --processes 2 --ranks 4

Sizes: K, M, G and KiB, MiB, GiB are binary; kB, MB, GB are decimal. The exit code is 1 if a result was wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.allow_abbrev = False
    add = parser.add_argument
    add("operation", choices=NAMES, metavar="OP", help="operation to measure")
    add("-b", "--minbytes", metavar="SIZE", help="smallest size; default: 8; alone, the only size")
    add("-e", "--maxbytes", metavar="SIZE", help="largest size; default: 64M")
    add("-f", "--stepfactor", type=float, default=2.0, metavar="X", help="each size is X times the last; default: 2")
    add(
        "-n",
        "--iters",
        type=as_argument_type(parse_count),
        default=20,
        metavar="N",
        help="number of samples; default: 20",
    )
    add(
        "-w",
        "--warmup_iters",
        type=as_argument_type(parse_index),
        default=5,
        metavar="N",
        help="number of samples before these; default: 5",
    )
    add("-d", "--datatype", default="float32", metavar="TYPE", help="such as bfloat16; default: float32")
    add("-o", "--op", default="sum", metavar="OP", help=f"reduction; {', '.join(OPS)}; default: sum")
    add("-r", "--root", type=int, default=0, metavar="RANK", help=shared_option("root").help)
    add_options(parser, OPTIONS, usual={"ranks", "processes", "json"})


def main(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit code: 1 if a result was wrong.

    Raises:
        UsageError: If an option cannot be meant; nothing has been measured then.
    """
    from .measuring import measure_and_print

    return measure_and_print(args)
