"""Output of commands: standard streams, files that are written at the end, and JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from ..errors import UsageError
from ..notice import notify
from ..units import wrapped

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
    """Return the absolute path of a file to write at the end of a run: the program may change its directory.

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


def write_file(text: str, path: str, *, option: str) -> bool:
    """Write a text to a file; if that fails, say why on stderr and return False."""
    return try_to_write(lambda: Path(path).write_text(text, encoding="utf-8"), path, option=option)


def try_to_write(write: Callable[[], object], path: str, *, option: str) -> bool:
    """Call a function that writes a file; if that fails, say why on stderr and return False."""
    try:
        write()
    except (OSError, UsageError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(error)
        notify(f"{option}: cannot write {path}: {reason}; name another file")
        return False
    return True


# -- results ---------------------------------------------------------------------------------------------------------


Result: TypeAlias = tuple[Callable[[], Mapping[str, object]], Callable[[], Iterable[str]]]
"""Functions that return a result for JSON, and the lines of its page."""


def page_width() -> int:
    """Return the columns of pages: those of COLUMNS, else of the terminal, else 80."""
    return shutil.get_terminal_size().columns


def field(name: str, text: str, *, label: int = 16, width: int | None = None) -> list[str]:
    """Return the lines of a figure with its name before it, in a column of `label` characters."""
    return wrapped(text, width or page_width(), first=f"  {name:<{label}}", rest=" " * (label + 2))


def show(
    args: argparse.Namespace,
    document: Callable[[], Mapping[str, object]],
    page: Callable[[], Iterable[str]],
    *,
    version: int = 1,
) -> int:
    """Print a result as its page or, with `--json`, as JSON; return the exit code 0.

    Args:
        args: Options of a command that has `--json`.
        document: Returns the result for JSON.
        page: Returns the lines of the page, with tables of `units.columns`; it may print them itself.
        version: Version of the document.
    """
    text = as_json(document(), version=version) if args.json else ""
    sys.stdout.writelines([text] if args.json else (f"{line}\n" for line in page()))
    sys.stdout.flush()
    return 0


def as_json(document: Mapping[str, object], *, version: int = 1) -> str:
    """Return a result as JSON text with its `schema_version`, which rises when a field changes its meaning or goes."""
    return json.dumps({"schema_version": version, **document}, indent=2, sort_keys=True) + "\n"
