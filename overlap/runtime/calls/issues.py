"""Base of the classes with methods that issue operations."""

from __future__ import annotations

from ..issue import Issuer
from ..port import Ports


class Issues:
    """Base class with the ports of a group, for collectives, and its issuer of messages."""

    _issuer: Issuer
    _ports: Ports
