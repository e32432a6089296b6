"""What the processes that the bench starts find in their environment."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["environment"]

_ROOT = str(Path(__file__).parents[3])


def environment(*, bytecode: str | None = None) -> dict[str, str]:
    """Return this process's environment, changed so that a child imports the same `overlap` and nothing by accident.

    With PYTHONSAFEPATH a file of the current directory cannot stand in for a module of the standard library.

    Args:
        bytecode: A folder for compiled modules, so that all processes but the first find them compiled, whatever the
            environment says and whoever owns the installation.
    """
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if bytecode is not None:
        changed.pop("PYTHONDONTWRITEBYTECODE", None)
        changed["PYTHONPYCACHEPREFIX"] = bytecode
    return changed
