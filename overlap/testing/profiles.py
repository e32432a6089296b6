"""Prices of PyTorch's functions from a profile that `torch.profiler` has exported."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from os import PathLike
from typing import Any

from ..errors import UsageError


def read_prices(path: str | PathLike[str]) -> dict[str, float]:
    """Return the mean time of each function in a profile, in seconds, by its name without namespace.

    Where the profile has kernels of a GPU, a function takes what its kernels took; else what it took on the CPU.

    Args:
        path: A file of `torch.profiler.profile(...).export_chrome_trace(path)`; `.gz` is read too.

    Raises:
        UsageError: If it is none.
    """
    try:
        with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
            events = json.load(file)["traceEvents"]
        functions = [event for event in events if event.get("cat") == "cpu_op" and event.get("ph") == "X"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        return _mean_times(functions, kernels)
    except OSError as error:
        raise UsageError(f"cost: cannot read {path}: {error.strerror}; pass a profile of torch.profiler") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"cost: {path} is no profile; expected a file of torch.profiler's export_chrome_trace"
        ) from None


def _mean_times(functions: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean seconds of each function: of its kernels, which share its "External id", if there are any."""
    launched_us: dict[object, float] = defaultdict(float)
    for kernel in kernels:
        launched_us[kernel["args"].get("External id")] += kernel["dur"]
    times_us: dict[str, list[float]] = defaultdict(list)
    for function in functions:
        took_us = launched_us[function["args"].get("External id")] if kernels else function["dur"]
        times_us[function["name"].rpartition("::")[2]].append(took_us)
    return {name: sum(function_us) / len(function_us) * 1e-6 for name, function_us in times_us.items()}
