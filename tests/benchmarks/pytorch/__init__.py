"""DistributedDataParallel and single all-reduces on our backend, in turn with gloo in one torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from overlap.cli.bench.sampling import Sampling

__all__ = ["lines"]

BUCKETS_MIB = (1, 4, 25)
SIZES = (8, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
_TIMEOUT_S = 600


def lines(how: Sampling) -> Iterator[str]:
    """Measure on 2 and 4 processes, and say how each figure compares.

    Args:
        how: How many samples.
    """
    for processes in (2, 4):
        told = _ran(processes, how)
        yield f"{processes} processes, eight layers of 1024 x 1024, batch 256, {told['version']}"
        alone_ms = _ms(told["alone"])
        yield f"  a step without communication {alone_ms:.1f} ms"
        for bucket, both in told["steps"].items():
            gloo_ms, ours_ms = _ms(both["gloo"]), _ms(both["overlap"])
            yield (
                f"  DDP, buckets of {bucket} MiB: gloo {gloo_ms:.1f} ms, overlap {ours_ms:.1f} ms; exposed "
                f"{gloo_ms - alone_ms:.1f} and {ours_ms - alone_ms:.1f}"
            )
        yield f"  overlap.torch.DataParallel: {_ms(told['model']):.1f} ms"
        for size, both in told["sizes"].items():
            gloo_ms, ours_ms = _ms(both["gloo"]), _ms(both["overlap"])
            ratio = gloo_ms / ours_ms
            yield f"  all_reduce, {size} B: gloo {gloo_ms:.3f} ms, overlap {ours_ms:.3f} ms, {ratio:.2f} times as fast"


def _ms(samples_ns: list[int]) -> float:
    return median(samples_ns) / 1e6


def _ran(processes: int, how: Sampling) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    program = ["-m", "tests.benchmarks.pytorch.ranks", json.dumps([how.warmup, how.iters])]
    done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=_TIMEOUT_S)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        raise RuntimeError(f"the ranks failed:\n{done.stderr[-3000:]}")
    return json.loads(found[0])
