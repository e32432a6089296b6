"""Settings that win over the arguments of `run`: what a launcher says, in environment variables.

==================  ===========================================================
variable            meaning
==================  ===========================================================
OVERLAP_RANKS       how many ranks
OVERLAP_TRACE       where to write the trace file
OVERLAP_CLUSTER     name of the cluster, such as "trn2.48xlarge x4"
OVERLAP_TIMEOUT_S   give up after that many seconds
OVERLAP_ALGORITHM   use this algorithm wherever it exists
==================  ===========================================================

A variable that is empty counts as unset.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError

__all__ = ["Settings", "from_environment", "imposed", "next_trace_path", "written_traces"]

_VARIABLES = ("OVERLAP_RANKS", "OVERLAP_TRACE", "OVERLAP_CLUSTER", "OVERLAP_TIMEOUT_S", "OVERLAP_ALGORITHM")
_TRACE_ENDINGS = (".trace.json.gz", ".trace.json", ".json.gz", ".json")

_given: dict[str, list[Path]] = {}  # what next_trace_path has handed out, by what it was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a launcher has fixed; None leaves the choice to the program.

    Attributes:
        ranks: How many ranks, at least 1.
        trace: Where to write the trace file of the first run; see `next_trace_path`.
        cluster: Name of the cluster.
        timeout_s: Seconds after which a run gives up.
        algorithm: Name of an algorithm.
    """

    ranks: int | None = None
    trace: str | None = None
    cluster: str | None = None
    timeout_s: float | None = None
    algorithm: str | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment variables that say the same; what is None has none."""
        values = (self.ranks, self.trace, self.cluster, self.timeout_s, self.algorithm)
        return {name: str(value) for name, value in zip(_VARIABLES, values, strict=True) if value is not None}


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings from environment variables.

    Raises:
        UsageError: If a value cannot be meant; names the variable and the value.
    """
    return Settings(
        ranks=_positive_int(environ, "OVERLAP_RANKS"),
        trace=environ.get("OVERLAP_TRACE") or None,
        cluster=environ.get("OVERLAP_CLUSTER") or None,
        timeout_s=_positive_float(environ, "OVERLAP_TIMEOUT_S"),
        algorithm=environ.get("OVERLAP_ALGORITHM") or None,
    )


@contextmanager
def imposed(settings: Settings) -> Iterator[None]:
    """Make the environment say exactly `settings` for the block, and number its traces from the start."""
    before = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    _say(settings.variables())
    _given.clear()
    try:
        yield
    finally:
        _say(before)


def next_trace_path(path: str) -> Path:
    """Return where the next run of this process writes its trace: `path`, then `name-2.json`, `name-3.json`, ...

    A program may call `run` several times; the numbers keep a later trace from writing over the first.
    """
    given = _given.setdefault(path, [])
    given.append(_numbered(path, len(given) + 1))
    return given[-1]


def written_traces(path: str) -> list[Path]:
    """Return the files that `next_trace_path(path)` has given and that exist by now, in order."""
    return [file for file in _given.get(path, ()) if file.exists()]


def _numbered(path: str, number: int) -> Path:
    if number == 1:
        return Path(path)
    folder, name = os.path.split(path)
    ending = next((e for e in _TRACE_ENDINGS if name.endswith(e) and name != e), os.path.splitext(name)[1])
    return Path(folder, f"{name.removesuffix(ending)}-{number}{ending}")


def _say(variables: Mapping[str, str]) -> None:
    for name in _VARIABLES:
        if name in variables:
            os.environ[name] = variables[name]
        else:
            os.environ.pop(name, None)


def _positive_int(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"{name}: expected a positive integer, got {text!r}")
    return int(text)


def _positive_float(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{name}: expected a positive number of seconds, got {text!r}")
    return value
