"""Paths of trace files: where the runs of this process write their traces, and which files they have written."""

from __future__ import annotations

import os
from pathlib import Path

_ENDINGS = (".trace.json.gz", ".trace.json", ".json.gz", ".json")

_paths_by_name: dict[str, list[Path]] = {}  # the paths that `next_path` has returned, by its argument
_written_files: set[Path] = set()  # paths that were written


def next_path(path: str) -> Path:
    """Return where the next run of this process writes its trace: `path`, then `name-2.json`, `name-3.json`, ...

    A program may call `run` several times; the numbers keep a later trace from writing over the first.
    """
    paths = _paths_by_name.setdefault(path, [])
    paths.append(_add_number(path, len(paths) + 1))
    return paths[-1]


def record_written(file: str | os.PathLike[str]) -> None:
    """Note that a run has written its trace."""
    _written_files.add(Path(file))


def reserved_paths(path: str) -> list[Path]:
    """Return the files that `next_path(path)` has returned: one for each run, in order."""
    return list(_paths_by_name.get(path, ()))


def written_paths(path: str) -> list[Path]:
    """Return the files that `next_path(path)` has returned and runs have written."""
    return [file for file in reserved_paths(path) if file in _written_files]


def clear() -> None:
    """Clear all paths, so that numbers begin with 1 again."""
    _paths_by_name.clear()
    _written_files.clear()


def _add_number(path: str, number: int) -> Path:
    """Return a path with "-NUMBER" before its ending; with number 1, the path itself."""
    if number == 1:
        return Path(path)
    folder, name = os.path.split(path)
    ending = next((e for e in _ENDINGS if name.endswith(e) and name != e), os.path.splitext(name)[1])
    return Path(folder, f"{name.removesuffix(ending)}-{number}{ending}")
