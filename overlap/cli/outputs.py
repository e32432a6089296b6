"""Files that a command writes at its end: what cannot be written there takes nothing from what has been found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import UsageError
from ..notice import notify


def written(text: str, path: str, *, option: str) -> bool:
    """Write a file; or say on stderr why it cannot be, and return False."""
    return kept(lambda: Path(path).write_text(text, encoding="utf-8"), path, option=option)


def kept(write: Callable[[], object], path: str, *, option: str) -> bool:
    """Call what writes the file; or say on stderr why it cannot be written, and return False."""
    try:
        write()
    except (OSError, UsageError) as error:
        notify(f"{option}: cannot write {path}: {_reason(error)}")
        return False
    return True


def _reason(error: OSError | UsageError) -> str:
    found = error if isinstance(error, OSError) else error.__cause__
    return (found.strerror if isinstance(found, OSError) else None) or str(error)
