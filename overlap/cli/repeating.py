"""Runs of programs whose failures name the command that repeats them, not the line of a test."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from ..testing import Ranks
from ..testing.running import Setting


class RepeatedByCommand(Ranks):
    """Ranks outside pytest."""

    def _repeating(self, path: str | os.PathLike[str], args: Sequence[str], setting: Setting) -> str:
        words = ["overlap", "test", os.fspath(path), "--ranks", str(setting.ranks)]
        words += ["--cluster", str(setting.cluster)] if setting.cluster != "local" else []
        words += ["--seed", str(setting.seed)] if setting.seed else []
        words += ["--faults", ", ".join(map(str, setting.faults))] if setting.faults else []
        return shlex.join([*words, *(["--", *args] if args else [])])
