"""What a value of the configuration looks like from outside: its option, its environment variable, how text is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from .errors import UsageError

_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How a field of the configuration is told."""

    # Makes the value of text, or raises `UsageError`; None: it cannot be told by text.
    read: Callable[[str], object] | None = None
    metavar: str | None = None  # What stands for the value in the help
    help: str = ""  # One line
    off: str | None = None  # Of a switch, the same for `--no-...`
    default: str = "-"  # What holds where nobody says it, in words; "-" is nothing
    flag: str | None = None  # The option, if it is not made of the field's name
    variable: bool = True  # Whether `OVERLAP_` and its name is an environment variable that says it
    nodes: bool = False  # Whether it concerns several processes
    wire: bool = False  # Whether it is passed on to the transport that joins them
    hidden: bool = False  # Whether the help leaves it out
    check: Callable[[Any], object] | None = None  # Refuses values that cannot be meant, whoever gave them


def option(**details: Any) -> Any:
    """Return a field of the configuration that is unset unless somebody says it; takes what `Option` does."""
    return field(default=None, metadata={"option": Option(**details)})


# -- reading -------------------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """Read a positive whole number."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"expected a positive integer, got {text!r}")
    return int(text)


class NodeCount(int):
    """How many nodes there are at most, and with how few the run may go on."""

    fewest: int  # So few

    def __new__(cls, most: int, fewest: int | None = None) -> Self:
        """Make one; by default all nodes are needed."""
        made = super().__new__(cls, most)
        made.fewest = most if fewest is None else fewest
        return made

    def __str__(self) -> str:
        return repr(int(self)) if self.fewest == self else f"{self.fewest}:{int(self)}"


def parse_nodes(text: str) -> NodeCount:
    """Read "4" as a number of nodes, and "2:4" as from two to four."""
    fewest, colon, most = text.rpartition(":")
    if not colon:
        return NodeCount(count(text))
    try:
        found = NodeCount(count(most), count(fewest))
    except UsageError:
        raise UsageError(f"expected a positive integer, or a range such as 2:4, got {text!r}") from None
    if found.fewest > found:
        raise UsageError(f"expected a range such as 2:4, the smaller number first, got {text!r}")
    return found


def index(text: str) -> int:
    """Read a whole number that may be 0."""
    if not text.isdecimal():
        raise UsageError(f"expected 0 or more, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"expected a positive number of seconds, got {text!r}")
    return value


def switch(text: str) -> bool:
    """Read yes or no."""
    if text.lower() not in _YES + _NO:
        raise UsageError(f"expected 1 or 0, got {text!r}")
    return text.lower() in _YES


def parse_check(text: str) -> str:
    """Read what is to be looked for in what is sent: "nan" is all there is."""
    if text != "nan":
        raise UsageError(f"expected nan, got {text!r}")
    return text


def parse_rails(text: str) -> int | tuple[str, ...]:
    """Read "4" as a number of connections and "eth0,eth1" as interfaces."""
    if text.strip().isdecimal() and int(text) > 0:
        return int(text)
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names) or any(_NUMBER.fullmatch(name) for name in names):
        raise UsageError(f"expected a positive number, or different interfaces such as eth0,eth1, got {text!r}")
    return names


def parse_transport(text: str) -> str:
    """Read the name of a transport, one that the registry knows; "auto" leaves the choice."""
    from transports import registry

    try:
        if text != "auto":
            registry.check(text)
    except registry.UnknownTransportError as error:
        raise UsageError(str(error).replace("known are ", "known are auto, ", 1)) from None
    return text


def text_of(value: object) -> str:
    """Write a value so that it is read back."""
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
