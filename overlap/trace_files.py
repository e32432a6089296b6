"""Paths of trace files: where the runs of this process write their traces, and which files they have written."""

from __future__ import annotations

import os
from pathlib import Path

_ENDINGS = (".trace.json.gz", ".trace.json", ".json.gz", ".json")

_paths_by_name: dict[str, list[Path]] = {}  # by argument of `next_path`: the paths that it has returned
_written_files: set[Path] = set()  # files that runs have written


def next_path(path: str) -> Path:
    """Return the file for the trace of the next run: for "a.json", first a.json, then a-2.json, a-3.json, ...

    A program may call `run` several times; the numbers keep a later trace from overwriting the first.
    """
    paths = _paths_by_name.setdefault(path, [])
    paths.append(_add_number(path, len(paths) + 1))
    return paths[-1]


def give_out(path: str) -> None:
    """Record that a connection writes its trace to this path itself, without a number, when it is closed."""
    _paths_by_name.setdefault(path, [Path(path)])


def record_written(file: str | os.PathLike[str]) -> None:
    """Record that a run has written its trace to `file`, for `written_paths`."""
    _written_files.add(Path(file))


def paths_given_out(path: str) -> list[Path]:
    """Return the files of `next_path(path)` and `give_out(path)` so far: one for each run, in order."""
    return list(_paths_by_name.get(path, ()))


def written_paths(path: str) -> list[Path]:
    """Return those files of `paths_given_out(path)` that runs have written."""
    return [file for file in paths_given_out(path) if file in _written_files]


def forget_paths() -> None:
    """Forget all paths, so that `next_path` begins with 1 again."""
    _paths_by_name.clear()
    _written_files.clear()


def _add_number(path: str, number: int) -> Path:
    """Return a path with "-NUMBER" before its ending, such as a-2.trace.json; for number 1 the path itself."""
    if number == 1:
        return Path(path)
    folder, name = os.path.split(path)
    ending = next((e for e in _ENDINGS if name.endswith(e) and name != e), os.path.splitext(name)[1])
    return Path(folder, f"{name.removesuffix(ending)}-{number}{ending}")
