"""`overlap calibrate`: makes the machine file of a cluster from a benchmark, and says how far to trust it."""

# Without an option: from logs of benchmarks;  here: from measurements of this computer;  published, steps:
# no machine file, but predictions beside published measurements of collectives and steps;  page: of a calibration

from __future__ import annotations

import argparse
from pathlib import Path

import topology

from ...errors import UsageError
from ...planning import products
from ...planning.calibrate import calibrate
from ...settings import Option
from ...units import switch
from ..options import add_options, shared_option
from .here import BETWEEN, calibrate_here
from .page import deliver_machine, page
from .published import show_published

_DESCRIPTION = """\
Read the output of a benchmark (nccl-tests, nccom-test, or `overlap bench --json`), fit the launch of an operation and
the shares of their bandwidth that wires give, and write a machine file for plans and simulations. Every
third row of a collective is left out: its error says how far to trust predictions. All other figures are those of the
machine that --cluster names.

--products FILE reads matrix products that were timed on a chip (CSV: m, n, k, dtype, and tflops, us, ms or s), and fits
the start and the rate of each dtype, by which `overlap model` prices computes.

--here measures this computer instead: ranks of one process, and processes joined by sockets, shared memory or MPI.

--published predicts every published measurement of collectives instead, and prints both. Errors are of times, also
where a bandwidth was published. A few figures of the model are fitted, each to one row, and that row names its figure;
all others are predicted. (Which figures there are was decided with all rows in view.) A row is extrapolated if no
fitted rows of the same machine, ranks and operation enclose its size. --published steps predicts published training
steps (for minutes), each also with the one fitted figure fitted to all others.
"""

_EPILOG = """\
examples:
  overlap calibrate all_reduce.log --cluster "p5.48xlarge x2" --name ours -o ours.toml
  overlap calibrate redsct.txt --collective reduce_scatter --cluster trn2.48xlarge
  overlap plan all_reduce --bytes 1G --cluster "ours.toml x16"
  overlap calibrate --products gemms.csv --cluster p5.48xlarge -o ours.toml
  overlap calibrate --here -o here.toml
  overlap calibrate --published --machine dl1.24xlarge
  overlap calibrate --published steps --machine p5.48xlarge
"""


OPTIONS = {
    "cluster": shared_option("cluster", "of the log"),
    "products": Option(read=str, metavar="FILE", help="matrix products that were timed, instead of a log"),
    "collective": Option(read=str, metavar="NAME", help="collective of a log that does not say it"),
    "ranks": shared_option("ranks", "default: those of the log, or all"),
    "name": Option(read=str, metavar="NAME", help="name of the new machine; default: that of the file"),
    "output": shared_option("output", "the machine file; default: print it"),
}
PUBLISHED_OPTIONS = {
    "machine": Option(read=str, metavar="NAME", help="only this one, such as trn2.48xlarge; default: all"),
    "enforce": Option(
        read=switch,
        help="exit with 1 unless every class of rows has the accuracy that is asked of rows that nothing was fitted "
        "to, and algorithms change where they should",
    ),
    "record": Option(read=switch, help="write the errors of left-out steps, for bands"),
    "json": shared_option("json"),
}


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options of the command to its parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("logs", nargs="*", metavar="LOG", help="output of a benchmark")
    parser.add_argument("--here", action="store_true", help="measure this computer, for a minute or two, not a log")
    parser.add_argument("--between", choices=BETWEEN, help="what joins processes, with --here; default: shared_memory")
    add_options(parser, OPTIONS)
    parser.add_argument(
        "--published", nargs="?", const="collectives", choices=("collectives", "steps"),
        help="compare predictions with published measurements: of collectives (the default), or of training steps",
    )  # fmt: skip
    published = parser.add_argument_group("with --published")
    add_options(published, PUBLISHED_OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code: 0, or 1 if a file cannot be written or `--enforce` fails.

    Raises:
        UsageError: If a log cannot be read, or does not fit the cluster; naming file, row and what was expected.
        TopologyError: If there is no such machine.
    """
    if args.published:
        return show_published(args)
    for option in ("machine", "enforce", "record", "json"):
        if getattr(args, option):
            raise UsageError(f"--{option}: only with --published; add that, or leave this out")
    if args.here:
        return calibrate_here(args)
    if args.between is not None:
        raise UsageError("--between: only with --here; add that, or leave this out")
    if args.products is not None:
        return _calibrate_products(args)
    if not args.logs or args.cluster is None:
        raise UsageError(
            "calibrate: name a LOG and the --cluster that it is of, or --here for this computer, or --published"
        )
    calibration = calibrate(args.logs, args.cluster, op=args.collective, ranks=args.ranks)
    name = args.name or (Path(args.output).stem if args.output else f"{calibration.base} calibrated")
    text = calibration.machine_file(name)
    print("\n".join(page(calibration)))
    return deliver_machine(text, args.output, collective_bytes="1G")


def _calibrate_products(args: argparse.Namespace) -> int:
    """Fit a chip to timed products, print the errors of left-out ones, and write the machine file."""
    base = (args.cluster or "").split(" ")[0]
    if args.logs or args.collective or args.ranks or base not in topology.names():
        raise UsageError(f"--products: expected one of our machines as --cluster, and no LOG beside it; got {base!r}")
    fits = products.fit(products.read(args.products), args.products)
    for dtype, fit in fits.items():
        print(
            f"{dtype}: {fit.rate.flops_per_s / 1e12:.4g} TFLOP/s after {fit.rate.start_s * 1e6:.3g} us; "
            f"{len(fit.errors)} products, each left out: median error {fit.typical:.1%}, worst {fit.worst:.1%}"
        )
    name = args.name or (Path(args.output).stem if args.output else f"{base} calibrated")
    text = products.machine_file(base, name, args.products, fits)
    return deliver_machine(text, args.output)
