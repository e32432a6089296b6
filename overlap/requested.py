"""What a run is asked to be, in the end: by its program, the environment, and the command that runs the program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from difflib import get_close_matches
from inspect import signature

from . import trace_files
from .config import RunConfig, variable_of
from .errors import UsageError
from .notice import notify
from .timeline.spans import Timeline

_OF_LAUNCHERS = frozenset(
    f"OVERLAP_{name}"
    for name in (
        *("SECRET", "SECRET_FILE", "RDZV_ENDPOINT", "NODE_RANK", "NNODES", "NPROC_PER_NODE", "JOB"),
        *("SECRET_FD", "LISTENER_FD", "LIFELINE_FD", "STATUS_FD", "MEMBER_PID", "RESTART"),
    )
)  # what `overlap.processes.place` knows besides


_warned: set[str] = set()
_overriding: ContextVar[Callable[[RunConfig], RunConfig] | None] = ContextVar("overriding", default=None)


@contextmanager
def overriding(
    *, revise: Callable[[RunConfig], RunConfig] | None = None, watcher: Callable[[Timeline], None] | None = None
) -> Iterator[None]:
    """Let this win over the arguments of every `run` in the block, and over the environment.

    Args:
        revise: Is given what a run is asked to be, and returns what it shall be.
        watcher: Is given the timeline of each run.
    """

    def overrule(asked: RunConfig) -> RunConfig:
        wanted = asked if revise is None else revise(asked)
        return wanted if watcher is None else replace(wanted, watcher=watcher)

    token = _overriding.set(overrule)
    try:
        yield
    finally:
        _overriding.reset(token)


def requested(main: object, args: tuple[object, ...], asked: RunConfig) -> RunConfig:
    """Check what the program asks for, and overrule it: the environment does, and before it `overriding`.

    Args:
        main: The program of each rank.
        args: What it is given besides the rank.
        asked: What the program has said.

    Raises:
        UsageError: For what cannot be meant.
    """
    warn_of_unknown_variables()
    told = RunConfig.from_environment()
    wanted = told.over(asked)
    if told.trace is not None:
        wanted = wanted.changed(trace=trace_files.next_path(str(told.trace)))
    overrule = _overriding.get()
    if overrule is not None:
        wanted = overrule(wanted)
    _check_main(main, args)
    wanted.verify()
    return wanted


def _check_main(main: object, args: tuple[object, ...]) -> None:
    if not callable(main):
        raise UsageError(f"main: expected an async function, got {type(main).__name__}")
    try:
        taking = signature(main)
    except ValueError:  # what is written in C has none
        return
    try:
        taking.bind(None, *args)
    except TypeError as error:
        name, more = getattr(main, "__name__", "main"), f" and {len(args)} further arguments" if args else ""
        raise UsageError(f"main: {name}{taking} is called with the rank{more}: {error}") from None


# -- variables that say nothing --------------------------------------------------------------------------------------


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each variable that looks like one of ours and is none, naming the one that may be meant.

    A launcher has looked at those of its processes.
    """
    known = {*_OF_LAUNCHERS, *(variable_of(name) for name, one in RunConfig.options().items() if one.variable)}
    unknown = sorted(name for name in environ if name.startswith("OVERLAP_") and name not in known)
    if environ.get("OVERLAP_MEMBER_PID"):
        return []
    return [f"{name} is no setting, and says nothing{_meant(name, known)}" for name in unknown]


def _meant(name: str, known: Iterable[str]) -> str:
    own = sorted(each.removeprefix("OVERLAP_") for each in known)  # what all have in common would make all alike
    close = get_close_matches(name.removeprefix("OVERLAP_"), own, n=1, cutoff=0.7)
    return f"; did you mean OVERLAP_{close[0]}?" if close else ""


def warn_of_unknown_variables() -> None:
    """Tell the user of them, once in a process."""
    for line in unknown_variables():
        if line not in _warned:
            _warned.add(line)
            notify(line)
