"""Registry of transports by name: a static table of ours, then the entry-point group of installed packages.

A package adds one with a line in its ``pyproject.toml``; the object is a `transports.factory.Factory`::

    [project.entry-points."overlap.transports"]
    pigeon = "pigeon_transport:make"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING

from transports.failures import ArgumentError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from transports.factory import Factory

#: Name of the group of entry points.
GROUP = "overlap.transports"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    module: str
    needs: str | None = None


# Static, because looking for entry points takes 40 ms, which a program that wants none of them should not pay.
_OURS: Mapping[str, _Row] = MappingProxyType(
    {
        "efa": _Row(module="transports.efa"),
        "mpi": _Row(module="transports.mpi", needs="mpi4py"),
        "neuronlink": _Row(module="transports.neuronlink"),
        "shared_memory": _Row(module="transports.shared_memory"),
    }
)


class UnknownTransportError(ArgumentError):
    """No transport has this name, or what it needs is not installed."""


def names() -> tuple[str, ...]:
    """Return every name that `find` knows: ours first, then installed ones, in alphabetical order."""
    return (*_OURS, *sorted(set(_installed()) - set(_OURS)))


def check(name: str) -> None:
    """Raise `UnknownTransportError`, which lists the known names, unless there is a transport of this name."""
    if name not in _OURS and name not in _installed():
        raise UnknownTransportError(f"{name!r} is unknown; known are {', '.join(names())}")


def find(name: str) -> Factory:
    """Return what makes a transport.

    Raises:
        UnknownTransportError: There is none of this name, or it needs an extra that is not installed, or what is
            installed under the name cannot be loaded.
    """
    check(name)
    if name not in _OURS:
        return _loaded(_installed()[name])
    row = _OURS[name]
    if row.needs is not None and find_spec(row.needs) is None:
        raise UnknownTransportError(f"{name!r} needs {row.needs}: pip install {row.needs}")
    factory: Factory = import_module(row.module).factory
    return factory


def _loaded(entry: EntryPoint) -> Factory:
    try:
        factory: Factory = entry.load()
    except Exception as error:  # whatever a stranger's module does when it is imported
        package = entry.dist.name if entry.dist is not None else entry.value
        raise UnknownTransportError(
            f"{entry.name!r} cannot be loaded from {package} ({entry.value}): {error!r}; is one of its extras missing?"
        ) from error
    if not callable(factory):
        raise UnknownTransportError(f"{entry.name!r} ({entry.value}) is {factory!r}; a factory is called")
    return factory


def _installed() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}
