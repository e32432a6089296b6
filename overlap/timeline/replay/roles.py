"""Roles of recorded spans. Traces that say none have names only, by which the roles are guessed."""

from __future__ import annotations

import re

from ..span import Role, Span

_OF_STAGES = re.compile(r"\d+[FBI]\d+ to \d+")
"""The names of messages between stages, such as "0F2 to 1"."""


def role_of(span: Span) -> Role:
    """Return the role of a compute or an operation; a guess where the trace says none, as older ones do."""
    if span.role:
        return span.role
    if span.kind == "compute":
        return "pack" if span.name == "pack" else "update" if span.name == "update" else "program"
    return "bucket" if "bucket " in span.name else "stage" if _OF_STAGES.fullmatch(span.name) else "program"
