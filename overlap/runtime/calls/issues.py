"""Base of the classes with methods that issue operations."""

from __future__ import annotations

from ..messages import Messages
from ..port import Ports


class Issues:
    """Base class of call methods: `_ports` issues the collectives of a group, `_messages` the sends and receives."""

    _messages: Messages
    _ports: Ports
