"""Findings of the doctor: a subject, its state, and the line that fixes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "note", "slow", "missing", "wrong"]
"""good: as it should be. note: worth knowing. slow: works, but slower. missing: an extra. wrong: does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of one check."""

    subject: str  # Name of the checked part on the page
    state: State
    text: str  # The observation
    fix: str = ""  # The command or the setting that fixes it
