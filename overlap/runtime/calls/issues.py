"""Base of the classes with methods that issue operations."""

from __future__ import annotations

from ..messages import Messages
from ..port import Ports


class Issues:
    """Base class with the ports of a group, for collectives, and its messages."""

    _messages: Messages
    _ports: Ports
