"""A part of the table: `python -m tests.benchmarks.pytorch broadcast,gather --bytes 8,1048576`."""

import argparse

from overlap.cli.bench.sampling import Sampling

from . import SIZES, part
from .operations import OPERATIONS


def _listed(text: str) -> list[str]:
    return text.split(",")


def _operations(text: str) -> list[str]:
    names = _listed(text)
    if unknown := [name for name in names if name not in OPERATIONS]:
        raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(OPERATIONS)}")
    return names


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pytorch")
    parser.add_argument("names", type=_operations, help=f"of {', '.join(OPERATIONS)}")
    parser.add_argument("--bytes", type=_listed, default=SIZES, metavar="N,N", help="sizes; by default all")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("-n", "--iters", type=int, default=20, metavar="N", help="samples; default 20")
    parser.add_argument("-w", "--warmup_iters", type=int, default=5, metavar="N", help="samples before; default 5")
    args = parser.parse_args()
    how = Sampling(iters=args.iters, warmup=args.warmup_iters)
    for line in part(how, args.processes, args.names, [int(size) for size in args.bytes]):
        print(line, flush=True)


main()
