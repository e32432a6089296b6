"""Factories of transports, their argument, and their registry by name: built-in ones and entry points.

A package adds one with a line in its ``pyproject.toml``; the object is a `Factory`::

    [project.entry-points."overlap.transports"]
    pigeon = "pigeon_transport:make"
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from transports.failures import ArgumentError
from transports.identity import Identity

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from transports.base import Transport

#: All-gather among the processes of a world, before any transport is open: called with a name and bytes, returns the
#: bytes of each process, by index. All must call it with the same names. 48 KiB are always allowed.
Exchange: TypeAlias = Callable[[str, bytes], Awaitable[list[bytes]]]


def _ignore_line(line: str) -> None:
    """Ignore a line; the default of `report` and `note`."""


def spare_none() -> Collection[int]:
    """Return no process; the default of `spared`, with which a transport joins all processes itself."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap(Identity):
    """A process before a transport joins it to the others: its place in the world, and the user's options."""

    members: int = field(init=False)  # Number of processes, the length of `placement`
    placement: Sequence[Sequence[int]]  # The ranks of each process, by index
    exchange: Exchange  # All-gather among the processes, by which they send each other their addresses
    host: str = "127.0.0.1"  # Address of this machine at which the other processes reach it
    # The user's options by name, such as ``rails``, ``peer_direct``, ``unix``; a transport ignores options that it
    # does not have.
    options: Mapping[str, object] = field(default_factory=dict)
    # Prints a line for the user, such as one about a lost process.
    report: Callable[[str], None] = _ignore_line
    # Records an event for the timeline the moment it happens, such as the loss of a connection.
    note: Callable[[str], None] = _ignore_line
    # Returns the processes that this transport need not join, because another transport reaches them. Called when this
    # transport is opened; both processes of a pair must return the same about their pair.
    spared: Callable[[], Collection[int]] = spare_none
    # Whether the control plane detects lost processes. A transport must not take silence for a loss then: a program
    # may keep its event loop busy for as long as it wants.
    watched: bool = False

    def __post_init__(self) -> None:
        # the class is frozen
        object.__setattr__(self, "members", len(self.placement))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process."""
        return tuple(self.placement[self.member])

    @property
    def constructor_arguments(self) -> dict[str, Any]:
        """Keyword arguments for the constructors of transports between processes: those that all of them have."""
        names = ("member", "placement", "secret", "exchange", "job", "epoch", "report")
        return {name: getattr(self, name) for name in names}


#: Makes one process's end of a fabric, not open yet, without waiting: addresses are exchanged when it is opened. Raises
#: `ArgumentError` for impossible options, at the call or when it is opened.
Factory: TypeAlias = "Callable[[Bootstrap], Transport]"


#: Name of the group of entry points.
GROUP = "overlap.transports"


# A table of modules: a search for entry points takes 40 ms, which a program without such packages should not pay.
_BUILT_IN: Mapping[str, str] = {
    "efa": "transports.efa",
    "neuronlink": "transports.neuronlink",
    "shared_memory": "transports.shared_memory",
    "sockets": "transports.efa",
}


class UnknownTransportError(ArgumentError):
    """No transport has this name, or the one of an installed package cannot be loaded."""


def known_names() -> tuple[str, ...]:
    """Return every name that `find_factory` accepts: built-in ones, then those of other packages, sorted."""
    return (*_BUILT_IN, *sorted(set(_find_entry_points()) - set(_BUILT_IN)))


def check_name(name: str) -> None:
    """Raise `UnknownTransportError`, which lists the known names, unless there is a transport of this name."""
    if name not in _BUILT_IN and name not in _find_entry_points():
        raise UnknownTransportError(f"{name!r} is an unknown transport; known are {', '.join(known_names())}")


def find_factory(name: str) -> Factory:
    """Return the factory of a transport.

    Raises:
        UnknownTransportError: No transport has this name, or the object that a package has registered under the name
            cannot be loaded.
    """
    check_name(name)
    if name not in _BUILT_IN:
        return _load_entry(_find_entry_points()[name])
    factory: Factory = import_module(_BUILT_IN[name]).factory
    return factory


def _load_entry(entry: EntryPoint) -> Factory:
    """Import the factory; `UnknownTransportError` if that fails, or if the object is no function."""
    try:
        factory: Factory = entry.load()
    except Exception as error:  # the import of another package may raise anything
        package = entry.dist.name if entry.dist is not None else entry.value
        reason = f"{entry.name!r} cannot be loaded from {package} ({entry.value}): {error!r}"
        raise UnknownTransportError(f"{reason}; is one of its extras missing?") from error
    if not callable(factory):
        raise UnknownTransportError(f"{entry.name!r} ({entry.value}) is {factory!r}; register a function")
    return factory


def _find_entry_points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}
