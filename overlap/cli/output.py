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
from ..units import wrap_text

# -- standard streams ------------------------------------------------------------------------------------------------

_MODES = {0: ("stdin", "r"), 1: ("stdout", "w"), 2: ("stderr", "w")}


def open_closed_streams() -> None:
    """Open /dev/null as each standard stream that the shell has closed.

    Otherwise the next pipe or socket would get the number of a closed stream, and output would be written into it.
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

    Args:
        path: Path as the user wrote it; None: no file is requested, and None is returned.
        option: The option that requests the file, for messages.

    Raises:
        UsageError: The file cannot be written; the error has the reason.
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
    if not os.path.isdir(folder):
        lack = f"{folder} is no folder;" if os.path.exists(folder) else f"there is no folder {folder}; make it, or"
        raise UsageError(f"{option}: {lack} name a file elsewhere")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option}: cannot write into {folder}; name a file in another folder")
    return os.path.abspath(path)


def write_file(text: str, path: str, *, option: str) -> bool:
    """Write a text to a file; return whether that succeeded. If not, print the reason on stderr.

    Args:
        text: The text.
        path: Path of the file.
        option: The option that requests the file, for messages.
    """
    return try_to_write(lambda: Path(path).write_text(text, encoding="utf-8"), path, option=option)


def try_to_write(write: Callable[[], object], path: str, *, option: str) -> bool:
    """Call a function that writes a file; return whether that succeeded. If not, print the reason on stderr.

    Args:
        write: The function.
        path: Path of the file, for messages.
        option: The option that requests the file, for messages.
    """
    try:
        write()
    except (OSError, UsageError) as error:
        # a `UsageError` of a function that writes has the error of the system as its cause
        cause = error if isinstance(error, OSError) else error.__cause__
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(error)
        notify(f"{option}: cannot write {path}: {reason}; name another file")
        return False
    return True


# -- results ---------------------------------------------------------------------------------------------------------


Result: TypeAlias = tuple[Callable[[], Mapping[str, object]], Callable[[], Iterable[str]]]
"""Result of a command: a function that returns it as fields for JSON, and one that returns the lines of its page."""


def page_width() -> int:
    """Return the columns of pages: COLUMNS if that is set, otherwise those of the terminal, otherwise 80."""
    return shutil.get_terminal_size().columns


def field_lines(name: str, text: str, *, label_width: int = 16, width: int | None = None) -> list[str]:
    """Return "name  text" as wrapped lines of a page; the text is in a column of its own.

    Args:
        name: Name of the field.
        text: Text of the field.
        label_width: Columns for the name.
        width: Columns of the page; None: those of `page_width`.
    """
    return wrap_text(text, width or page_width(), first=f"  {name:<{label_width}}", rest=" " * (label_width + 2))


def print_page_or_json(
    args: argparse.Namespace,
    document: Callable[[], Mapping[str, object]],
    page: Callable[[], Iterable[str]],
    *,
    version: int = 1,
) -> int:
    """Print a result as its page or, with `--json`, as JSON, and return the exit code 0.

    Args:
        args: Options of a command that has `--json`.
        document: Returns the result as fields for JSON.
        page: Returns the lines of the page; it may also print them itself, and return none.
        version: Version of the JSON document, see `json_text`.
    """
    text = json_text(document(), version=version) if args.json else ""
    sys.stdout.writelines([text] if args.json else (f"{line}\n" for line in page()))
    sys.stdout.flush()
    return 0


def json_text(document: Mapping[str, object], *, version: int = 1) -> str:
    """Return a result as JSON text with a field `schema_version`.

    The version is increased when a field changes its meaning, or is removed.
    """
    return json.dumps({"schema_version": version, **document}, indent=2, sort_keys=True) + "\n"
