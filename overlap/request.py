"""What a run is asked to be: the arguments of `run`, and who may overrule them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from transports import Transport

from .errors import UsageError
from .settings import from_environment, next_trace_path
from .timeline.spans import Timeline

if TYPE_CHECKING:
    import topology

    from .virtual.simulated_backend import Virtual

__all__ = ["Request", "Wires", "overriding", "requested"]

Wires: TypeAlias = "Transport | Callable[[Transport], Transport]"
"""A transport, or a function that puts one around the transport that the world would have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of a run, checked.

    Attributes:
        ranks: How many; None: those of the cluster.
        cluster: A cluster or its name.
        virtual: The assumptions of a simulation; None on the real clock.
        trace: Where to write the timeline.
        timeout_s: Seconds after which to give up.
        transport: What carries the bytes, or what to put around that which would.
        algorithm: The one to use wherever it exists.
        watcher: Is given the timeline at the end.
    """

    ranks: int | None = None
    cluster: str | topology.Cluster = "local"
    virtual: Virtual | None = None
    trace: str | PathLike[str] | None = None
    timeout_s: float | None = None
    transport: Wires | None = None
    algorithm: str | None = None
    watcher: Callable[[Timeline], None] | None = None


_overriding: ContextVar[Callable[[Request], Request] | None] = ContextVar("overriding", default=None)


@contextmanager
def overriding(
    *, revise: Callable[[Request], Request] | None = None, watcher: Callable[[Timeline], None] | None = None
) -> Iterator[None]:
    """Let this win over the arguments of every `run` in the block, and over the environment.

    Args:
        revise: Is given what a run is asked to be, and returns what it shall be.
        watcher: Is given the timeline of each run.
    """

    def overrule(asked: Request) -> Request:
        wanted = asked if revise is None else revise(asked)
        return wanted if watcher is None else replace(wanted, watcher=watcher)

    token = _overriding.set(overrule)
    try:
        yield
    finally:
        _overriding.reset(token)


def requested(main: object, clock: object, asked: Request) -> Request:
    """Check what is asked, and overrule it: the environment does, and before it `overriding`.

    Raises:
        UsageError: For what cannot be meant.
    """
    told = from_environment()
    wanted = replace(
        asked,
        ranks=told.ranks or asked.ranks,
        timeout_s=told.timeout_s or asked.timeout_s,
        algorithm=told.algorithm or asked.algorithm,
        cluster=told.cluster or asked.cluster,
        trace=next_trace_path(told.trace) if told.trace else asked.trace,
    )
    if clock != "real":
        from .virtual.simulated_backend import virtual_of  # and with it the model of the machines

        wanted = replace(wanted, virtual=virtual_of(clock))
    overrule = _overriding.get()
    if overrule is not None:
        wanted = overrule(wanted)
    _check_run(main, wanted.ranks, wanted.timeout_s, wanted.trace)
    if wanted.algorithm is not None:
        from .collectives.select import check_algorithm  # and with it the generators

        check_algorithm(wanted.algorithm)
    return wanted


def _check_run(main: object, ranks: object, timeout_s: float | None, trace: str | PathLike[str] | None) -> None:
    if not callable(main):
        raise UsageError(f"main: expected an async function, got {type(main).__name__}")
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
        raise UsageError(f"ranks: expected a positive integer, got {ranks!r}")
    if timeout_s is not None and not timeout_s > 0:
        raise UsageError(f"timeout_s: expected a positive number of seconds, got {timeout_s!r}")
    if trace is not None and not Path(trace).parent.is_dir():
        raise UsageError(f"trace: the folder {str(Path(trace).parent)!r} does not exist")
