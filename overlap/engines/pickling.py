"""Pickling of programs: functions by value where they are not importable, with the names of their files and lines."""

from __future__ import annotations

import io
import marshal
from collections import ChainMap
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any


class Pickling:
    """Writes and reads objects that processes of one job send each other.

    Newer versions of cloudpickle drop the name of a function's file; errors could name no line.

    Args:
        module: `cloudpickle`, or Ray's copy of it.
    """

    def __init__(self, module: ModuleType) -> None:
        kind: Any = module.Pickler
        self.loads: Callable[[bytes], object] = module.loads
        self._pickler = type("Pickler", (kind,), {"dispatch_table": ChainMap({CodeType: _code}, kind.dispatch_table)})

    def dumps(self, value: object) -> bytes:
        """Return the bytes of an object."""
        file = io.BytesIO()
        self._pickler(file).dump(value)
        return file.getvalue()


def _code(code: CodeType) -> tuple[Callable[[bytes], object], tuple[bytes]]:
    """Reduce code as Python's own bytecode files do; all processes of a job have one version of Python."""
    return marshal.loads, (marshal.dumps(code),)
