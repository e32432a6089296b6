"""Lines and JSON that comparisons have in common."""

import argparse
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import trio

from overlap.cli.bench.cases import SEED, Case
from overlap.cli.bench.measuring import Result
from overlap.cli.bench.sampling import BATCH, BATCHED_BYTES, Sampling
from overlap.cli.output import json_text, write_file
from overlap.units import format_bytes, wrap_text


def printer(args: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints a line at once; it prints nothing where the JSON goes to stdout."""
    return (lambda text: None) if args.json else (lambda text: print(text, flush=True))


def remark(text: str) -> str:
    """Return a text as lines of at most 80 columns that begin with #."""
    return "\n".join(line for each in text.splitlines() for line in wrap_text(each, first="# ", rest="# "))


def title(what: str, sampling: Sampling, units: str) -> str:
    """Return what is measured, how, and in which units, as lines that begin with #."""
    return remark(
        f"{what}\n"
        f"time: median, 10th and 90th percentile of {sampling.iters} samples after {sampling.warmup} of warm-up;\n"
        "a sample is the slowest rank's time from a common barrier to its result; up to\n"
        f"{format_bytes(BATCHED_BYTES)} it is {BATCH} operations back to back, divided by {BATCH}\n"
        f"{units}"
    )


def place_of(case: Case) -> str:
    """Return in words whether results are in the memory of the inputs."""
    return "in place" if case.in_place else "out of place"


def summary(measured: Sequence[Result]) -> str:
    """Return the last line, which says whether results were right."""
    wrong = sum(result.wrong for result in measured)
    return f"# {wrong} wrong elements: FAILED" if wrong else "# every result checked: none wrong"


def finish(args: argparse.Namespace, how: Sampling, parts: Mapping[str, object], rows: Sequence[Result]) -> int:
    """Print or write the JSON, if it is asked for, and return the exit code."""
    text = json_text(document(how, parts))
    if args.json:
        print(text, end="")
    is_written = args.json_file is None or write_file(text, args.json_file, option="--json-file")
    return 1 if not is_written or any(row.wrong for row in rows) else 0


def document(sampling: Sampling, parts: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON document of a run: its sampling, the machine, and `parts`.

    It lists only these figures of the machine: environments hold secrets, and results are passed around.
    """
    return {
        "sampling": asdict(sampling) | {"batch": BATCH, "batched_bytes": BATCHED_BYTES, "seed": SEED},
        "machine": {
            "cpu_count": os.cpu_count(),
            "system": platform.system(),
            "processor": platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "trio": trio.__version__,
        },
        **parts,
    }
