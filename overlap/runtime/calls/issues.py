"""Base of the classes with methods that issue operations."""

from __future__ import annotations

from ..issue import Issuer


class Issues:
    """Base class with the issuer of a group."""

    _issuer: Issuer
