"""Base of the classes whose methods issue operations."""

from __future__ import annotations

from ..issue import Issuer


class Issues:
    """One rank's view of a group, on which it issues operations."""

    _issuer: Issuer
