"""Output of commands: standard streams, files that are written at the end, and JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import UsageError
from ..notice import notify
from ..units import wrapped

STDOUT = "-"
"""Name of a file that means stdout."""

# -- standard streams ------------------------------------------------------------------------------------------------

_MODES = {0: ("stdin", "r"), 1: ("stdout", "w"), 2: ("stderr", "w")}


def open_missing() -> None:
    """Open /dev/null as each standard stream that the shell has closed.

    The numbers of closed streams would go to the next pipe or socket, and output would be written into it.
    """
    for descriptor, (name, mode) in _MODES.items():
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this descriptor
            os.set_inheritable(opened, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - stays open


# -- files -----------------------------------------------------------------------------------------------------------


def output_path(path: str | os.PathLike[str] | None, *, option: str = "--trace") -> str | None:
    """Return the absolute path of a file to write at the end of a run; the program may change its directory meanwhile.

    Raises:
        UsageError: If the file could not be written, with the reason.
    """
    if path is None:
        return None
    if not os.fspath(path):
        raise UsageError(f"{option}: expected the name of a file, got ''")
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path) and os.access(path, os.W_OK):
        return os.path.abspath(path)  # a device such as /dev/stdout, whose folder need not be writable
    if os.path.isdir(path):
        raise UsageError(f"{option}: {path} is a directory; name a file in it")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"{option}: cannot write into {folder}; name a folder of yours")
    return os.path.abspath(path)


def result_path(path: str | None, *, option: str) -> str | None:
    """Return the absolute path of a file for a result, or `-` for stdout; raises like `output_path`."""
    return path if path == STDOUT else output_path(path, option=option)


def written(text: str, path: str, *, option: str) -> bool:
    """Write a text to a file or, for `-`, to stdout; or say on stderr why that failed, and return False."""
    if path == STDOUT:
        sys.stdout.write(text)
        return True
    return kept(lambda: Path(path).write_text(text, encoding="utf-8"), path, option=option)


def kept(write: Callable[[], object], path: str, *, option: str) -> bool:
    """Call a function that writes a file; or say on stderr why it failed, and return False."""
    try:
        write()
    except (OSError, UsageError) as error:
        notify(f"{option}: cannot write {path}: {_reason(error)}")
        return False
    return True


def _reason(error: OSError | UsageError) -> str:
    found = error if isinstance(error, OSError) else error.__cause__
    return (found.strerror if isinstance(found, OSError) else None) or str(error)


# -- pages -----------------------------------------------------------------------------------------------------------


def field(name: str, text: str, *, label: int = 16) -> list[str]:
    """Return the lines of a figure with its name before it, in a column of `label` characters."""
    return wrapped(text, first=f"  {name:<{label}}", rest=" " * (label + 2))


# -- JSON ------------------------------------------------------------------------------------------------------------


def as_json(document: Mapping[str, object], *, version: int = 1) -> str:
    """Return a result as JSON text with its `schema_version`, which rises when a field changes its meaning or goes."""
    return json.dumps({"schema_version": version, **document}, indent=2, sort_keys=True) + "\n"
