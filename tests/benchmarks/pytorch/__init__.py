"""DistributedDataParallel and single operations on our backend, in turn with gloo in one torchrun."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from overlap.cli.bench.sampling import Sampling
from overlap.units import format_bytes

BUCKETS_MIB = (1, 4, 25)
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
_TIMEOUT_S = 900
_HEAD = "gloo's time over ours"


def lines(how: Sampling) -> Iterator[str]:
    """Measure on 2 and 4 processes, and say how each figure compares.

    Args:
        how: How many samples.
    """
    for processes in (2, 4):
        told = run_ranks(processes, how, {})
        yield f"{processes} processes, eight layers of 1024 x 1024, batch 256, {told['version']}"
        for bucket, each in told["steps"].items():
            alone, gloo, ours = (_ms(each[name]) for name in ("alone", "gloo", "overlap"))
            theirs, exposed, silent = (_exposed_ms(each, name) for name in ("gloo", "overlap", "nothing"))
            yield (
                f"  DDP, buckets of {bucket} MiB: alone {alone:.1f} ms, gloo {gloo:.1f}, overlap {ours:.1f}; exposed "
                f"{theirs:.1f} and {exposed:.1f}: {exposed / theirs:.2f} of gloo's; without messages {silent:.1f}"
            )
        yield from _table(told["operations"], SIZES)


def part(how: Sampling, processes: int, names: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    """Measure a few operations of few sizes: the ratios, and the medians of both in microseconds.

    Args:
        how: How many samples.
        processes: On how many.
        names: Of `operations.OPERATIONS`.
        sizes: In bytes.
    """
    told = run_ranks(processes, how, {"buckets": [], "names": names, "sizes": sizes})["operations"]
    yield from _table(told, sizes)
    for name, measured in told.items():
        times = (f"{median(both['gloo']) / 1e3:.0f}/{median(both['overlap']) / 1e3:.0f}" for both in measured)
        yield f"  {name + ', us':24}" + "".join(f"{each:>16}" for each in times)


def _table(operations: Mapping[str, Sequence[Mapping[str, list[int]]]], sizes: Sequence[int]) -> Iterator[str]:
    """Yield how many times as fast as gloo each operation is, by its bytes."""
    yield f"  {_HEAD:24}" + "".join(f"{format_bytes(size):>10}" for size in sizes)
    ratios = {
        name: [median(both["gloo"]) / median(both["overlap"]) for both in measured]
        for name, measured in operations.items()
    }
    for name, row in ratios.items():
        yield f"  {name:24}" + "".join(f"{ratio:10.2f}" for ratio in row)
    every = [ratio for row in ratios.values() for ratio in row]
    yield f"  mean {fmean(every):.2f}, least {min(every):.2f}"


def _exposed_ms(samples: Mapping[str, list[int]], name: str) -> float:
    """Return how much longer a step takes than one without communication that follows in the same turn."""
    return _ms([step - alone for step, alone in zip(samples[name], samples["alone"], strict=True)])


def _ms(samples_ns: list[int]) -> float:
    return median(samples_ns) / 1e6


def run_ranks(processes: int, how: Sampling, asked: Mapping[str, Any]) -> Any:
    """Return what rank 0 of `ranks.main` prints, which takes more arguments from `asked`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    program = [
        "-m",
        "tests.benchmarks.pytorch.ranks",
        json.dumps({"warmup": how.warmup, "samples": how.iters, **asked}),
    ]
    done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=_TIMEOUT_S)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        raise RuntimeError(f"the ranks failed:\n{done.stderr[-3000:]}")
    return json.loads(found[0])
