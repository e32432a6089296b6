"""Slurm's short form of many host names: `node[01-03,7],login`."""

from __future__ import annotations

import re

from ..errors import UsageError

_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\[\],\s]+(?:,[^\[\],\s]+)*\])+")
_BRACKETS = re.compile(r"\[([^\[\],-]+)[^\[\]]*\]")


def first_host(hosts: str, *, name: str = "hosts") -> str:
    """Return the first host of a Slurm host list.

    >>> first_host("node[01-03,7],login"), first_host("r[2-3]n[10,12]"), first_host("a,b")
    ('node01', 'r2n10', 'a')

    Args:
        hosts: The list.
        name: What the error calls it.

    Raises:
        UsageError: If it is no host list.
    """
    found = _HOST.match(hosts)
    if found is None or hosts[found.end() : found.end() + 1] not in ("", ","):
        raise UsageError(f"{name}: expected a host list such as node[01-03,7],login, got {hosts!r}")
    return _BRACKETS.sub(r"\1", found[0])
