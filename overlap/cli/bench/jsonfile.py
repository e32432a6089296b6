"""The same figures for programs: a JSON document with a versioned schema."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np
import trio

from ... import UsageError
from ..outputs import written
from .data import SEED
from .measuring import Result
from .sampling import BATCH, BATCHED_BYTES, Sampling
from .versus.contenders import ContenderResult

SCHEMA_VERSION = 1
"""Version of what `--json` writes; it rises when a field changes its meaning or goes."""


def document(sampling: Sampling, parts: Mapping[str, object]) -> dict[str, object]:
    """Put together what is known of a run: how, where, and `parts`.

    Of the machine only what is listed here: environments hold secrets, and results are passed around.
    """
    return {
        "schema_version": SCHEMA_VERSION,
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


def measured_rows(rows: Sequence[Result]) -> list[dict[str, object]]:
    """Tell our rows; times in nanoseconds for one operation, bandwidths in bytes per second."""
    return [
        {
            "operation": one.case.operation.name,
            "size_bytes": one.case.size_bytes,
            "count": one.case.count,
            "dtype": one.case.dtype.name,
            "op": one.case.op if one.case.operation.kind.traits.reduces else None,
            "root": one.case.root if one.case.operation.kind.traits.rooted else None,
            "ranks": one.case.ranks,
            "in_place": one.case.in_place,
            "shared": one.case.shared,
            "common": one.case.common,
            **asdict(one.times),
            "algbw_bytes_per_s": one.algbw_bytes_per_s,
            "busbw_bytes_per_s": one.busbw_bytes_per_s,
            "wrong": one.wrong,
        }
        for one in rows
    ]


def contender_rows(ranks: int, results: Sequence[ContenderResult]) -> list[dict[str, object]]:
    """Tell what other libraries measured for the rows of one size of the world."""
    return [
        {
            "name": result.name,
            "version": result.version,
            "ranks": ranks,
            "rows": [asdict(times) | {"wrong": wrong} for times, wrong in zip(result.times, result.wrong, strict=True)],
        }
        for result in results
    ]


def check_path(path: str | None) -> None:
    """Refuse a file that could not be written once everything is measured.

    Raises:
        UsageError: If it is a directory, or there is none for it that may be written.
    """
    if path is None or path == "-":
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"--json: cannot write {path}")


def write(told: Mapping[str, object], path: str) -> bool:
    """Write it to a file, or to stdout for `-`; return whether it could be, after telling the user if not."""
    text = json.dumps(told, indent=2) + "\n"
    if path != "-":
        return written(text, path, option="--json")
    sys.stdout.write(text)
    return True
