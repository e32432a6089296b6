"""Paths of trace files: where the runs of this process write their traces, and which files they have written."""

from __future__ import annotations

import os
from pathlib import Path

_ENDINGS = (".trace.json.gz", ".trace.json", ".json.gz", ".json")

_given: dict[str, list[Path]] = {}  # the paths that `next_path` has returned, by the path asked for
_kept: set[Path] = set()  # the paths of them that were written


def next_path(path: str) -> Path:
    """Return where the next run of this process writes its trace: `path`, then `name-2.json`, `name-3.json`, ...

    A program may call `run` several times; the numbers keep a later trace from writing over the first.
    """
    given = _given.setdefault(path, [])
    given.append(_numbered(path, len(given) + 1))
    return given[-1]


def keep(file: str | os.PathLike[str]) -> None:
    """Note that a run has written its trace."""
    _kept.add(Path(file))


def asked(path: str) -> list[Path]:
    """Return the files that `next_path(path)` has given: one for each run, in order."""
    return list(_given.get(path, ()))


def written(path: str) -> list[Path]:
    """Return the files that `next_path(path)` has given and runs have written."""
    return [file for file in asked(path) if file in _kept]


def forget() -> None:
    """Forget all paths, so that numbers begin with 1 again."""
    _given.clear()
    _kept.clear()


def _numbered(path: str, number: int) -> Path:
    if number == 1:
        return Path(path)
    folder, name = os.path.split(path)
    ending = next((e for e in _ENDINGS if name.endswith(e) and name != e), os.path.splitext(name)[1])
    return Path(folder, f"{name.removesuffix(ending)}-{number}{ending}")
