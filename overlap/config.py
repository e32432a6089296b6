"""Configuration of a run: the value of each setting, and its source.

The arguments of `run`, the options of `overlap run`, the environment and the launcher each set some values. The first
source of this list that sets one wins:

1. what a command imposes on every run of its program (`overriding`);
2. the launcher that started several processes: how many ranks there are;
3. the options of `overlap run`; then `OVERLAP_*` variables, `OVERLAP_RANKS` for `ranks` and so on; empty is unset;
4. the arguments of `run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import signature
from typing import Any, Self

from . import trace_files
from .errors import UsageError
from .notice import notify
from .settings import Option, RunSettings, format_setting
from .timeline.spans import Timeline

ARGUMENT = "argument"
"""Source of the values that the program passes to `run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(RunSettings):
    """Settings of a run with their sources."""

    # The source of each value by name: "argument", an option, a variable, or a launcher.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    # -- sources ----------------------------------------------------------------------------------------------------

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the options of the settings, by the name of the field."""
        return {entry.name: entry.metadata["option"] for entry in fields(cls) if "option" in entry.metadata}

    @classmethod
    def given(cls, source: str = ARGUMENT, **values: Any) -> Self:
        """Return the settings that one source has given; a value of None leaves a setting open."""
        settings = {name: value for name, value in values.items() if value is not None}
        return cls(**settings, sources=dict.fromkeys(settings, source))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the environment variables.

        Raises:
            UsageError: If a value is impossible; names the variable and the value.
        """
        readers = {
            name: (variable_name(name), one.read)
            for name, one in cls.options().items()
            if one.variable and one.read is not None and environ.get(variable_name(name))
        }
        values: dict[str, Any] = {
            name: _read_variable(read, environ[variable], variable) for name, (variable, read) in readers.items()
        }
        return cls(
            **values, sources={name: _find_source(name, environ, variable) for name, (variable, _) in readers.items()}
        )

    def variables(self) -> dict[str, str]:
        """Return the environment variables that describe this configuration."""
        return {
            variable_name(name): format_setting(getattr(self, name))
            for name, one in self.options().items()
            if one.variable and one.read is not None and getattr(self, name) is not None
        }

    def over(self, other: Self) -> Self:
        """Return the settings of this configuration, and those of `other` for settings that this one leaves open."""
        own = {name: getattr(self, name) for name in self.options() if getattr(self, name) is not None}
        return replace(other, **own, sources={**other.sources, **{n: s for n, s in self.sources.items() if n in own}})

    def changed(self, source: str | None = None, /, **changes: Any) -> Self:
        """Return a copy with some settings changed, and `source` as their source; None keeps the sources."""
        sources = {} if source is None else dict.fromkeys(changes, source)
        return replace(self, **changes, sources={**self.sources, **sources})

    def transport_options(self) -> dict[str, object]:
        """Return the given options of the transport between processes."""
        wires = {name: getattr(self, name) for name, option in self.options().items() if option.wire}
        return {name: value for name, value in wires.items() if value is not None}

    def tls_files(self) -> tuple[str, str, str] | None:
        """Return the files of the certificate, its key and the trusted authorities; None without encryption.

        Raises:
            UsageError: If only some of them are given.
        """
        if self.tls_cert and self.tls_key and self.tls_ca:
            return self.tls_cert, self.tls_key, self.tls_ca
        if self.tls_cert or self.tls_key or self.tls_ca:
            raise UsageError("TLS needs three files: OVERLAP_TLS_CERT, OVERLAP_TLS_KEY and OVERLAP_TLS_CA")
        return None

    # -- checks and text ---------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Check every value.

        Raises:
            UsageError: Names the field and the value.
        """
        for name, one in self.options().items():
            if one.check is not None and getattr(self, name) is not None:
                try:
                    one.check(getattr(self, name))
                except UsageError as error:
                    raise UsageError(f"{error}{self.origin(name)}") from None
        self.tls_files()

    def origin(self, *names: str) -> str:
        """Return the sources of some fields for the end of an error; nothing if all are the program itself."""
        sources = {name: self.sources[name] for name in names if name in self.sources}
        if set(sources.values()) <= {ARGUMENT}:
            return ""
        return f" ({', '.join(f'{name}: {source}' for name, source in sources.items())})"

    def lines(self) -> Iterator[str]:
        """Yield a line for each field that text can set: its name, its value and its source."""
        for name, one in self.options().items():
            if one.read is not None:
                value = getattr(self, name)
                text = one.default_text if value is None else format_setting(getattr(value, "name", value))
                yield f"{name:<17} {text:<50} {self.sources.get(name, 'default')}".rstrip()


def variable_name(name: str) -> str:
    """Return the name of the environment variable of a setting, such as "OVERLAP_RANKS"."""
    return f"OVERLAP_{name.upper()}"


def _read_variable(read: Callable[[str], object], text: str, variable: str) -> object:
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{variable}: {error}") from None


# -- settings that commands impose ---------------------------------------------------------------------------------

_imposed: list[RunConfig] = []  # by `setting_environment`, the innermost last; they know the sources of the variables


def _find_source(name: str, environ: Mapping[str, str], variable: str) -> str:
    """Return the source of a variable's value: the option that a command has put into it, else the variable."""
    config = _imposed[-1] if _imposed else RunConfig()
    same = getattr(config, name, None) is not None and format_setting(getattr(config, name)) == environ[variable]
    return config.sources.get(name, variable) if same else variable


@contextmanager
def setting_environment(config: RunConfig) -> Iterator[None]:
    """Set the environment variables to exactly this configuration for the block, and restart trace numbers."""
    names = [variable_name(name) for name, one in config.options().items() if one.variable]
    before = {name: os.environ[name] for name in names if name in os.environ}
    _set_environment(names, config.variables())
    _imposed.append(config)
    trace_files.clear()
    try:
        yield
    finally:
        _imposed.pop()
        _set_environment(names, before)


def _set_environment(names: list[str], variables: Mapping[str, str]) -> None:
    """Set the named environment variables to the given values, and remove those without a value."""
    for name in names:
        if name in variables:
            os.environ[name] = variables[name]
        else:
            os.environ.pop(name, None)


# -- the request of a run ------------------------------------------------------------------------------------------

MEMBER_VARIABLES = frozenset(
    f"OVERLAP_{name}"
    for name in (
        *("RDZV_ENDPOINT", "NODE_RANK", "NNODES", "NPROC_PER_NODE", "JOB", "SECRET_FD", "LISTENER_FD", "LIFELINE_FD"),
        *("STATUS_FD", "MEMBER_PID", "RESTART", "HOSTS", "RANKS_OPEN", "WITNESS"),
    )
)
"""Variables that `overlap run` sets for the processes of a world: see `overlap.processes.place`."""
_FURTHER = MEMBER_VARIABLES | {"OVERLAP_SECRET", "OVERLAP_SECRET_FILE", "OVERLAP_TRACEBACK"}


_warned: set[str] = set()
_overriding: ContextVar[Callable[[RunConfig], RunConfig] | None] = ContextVar("overriding", default=None)


@contextmanager
def overriding(
    *,
    revise: Callable[[RunConfig], RunConfig] | None = None,
    watcher: Callable[[Timeline], None] | None = None,
    pulse: Callable[[int, int | None], None] | None = None,
) -> Iterator[None]:
    """Revise the configuration of every `run` in the block, after its arguments, the environment and outer blocks.

    Args:
        revise: Takes the requested configuration and returns the one to run.
        watcher: Takes the timeline of each run.
        pulse: Takes, again and again, the instant of virtual time in ns, and the step that a rank began last.
    """

    outer = _overriding.get()

    def overrule(config: RunConfig) -> RunConfig:
        """Apply the outer block's changes, then this block's."""
        config = config if outer is None else outer(config)
        config = config if revise is None else revise(config)
        config = config if watcher is None else replace(config, watcher=watcher)
        return config if pulse is None else replace(config, pulse=pulse)

    token = _overriding.set(overrule)
    try:
        yield
    finally:
        _overriding.reset(token)


def resolve_config(main: object, args: tuple[object, ...], config: RunConfig) -> RunConfig:
    """Return the configuration of a run: that of the environment over that of the program, revised by `overriding`.

    Args:
        main: The program of each rank.
        args: Its arguments after the rank.
        config: The configuration that the program passes to `run`.

    Raises:
        UsageError: If a value or `main` cannot be used.
    """
    warn_of_unknown_variables()
    from_environment = RunConfig.from_environment()
    merged = from_environment.over(config)
    if from_environment.trace is not None:
        merged = merged.changed(trace=trace_files.next_path(str(from_environment.trace)))
    overrule = _overriding.get()
    if overrule is not None:
        merged = overrule(merged)
    check_main(main, args)
    merged.verify()
    return merged


def check_main(main: object, args: tuple[object, ...]) -> None:
    """Refuse a `main` that cannot be called with a rank and further arguments.

    Raises:
        UsageError: With the signature.
    """
    if not callable(main):
        raise UsageError(f"main: expected an async function, got {type(main).__name__}")
    try:
        taking = signature(main)
    except ValueError:  # functions written in C have none
        return
    try:
        taking.bind(None, *args)
    except TypeError as error:
        name, more = getattr(main, "__name__", "main"), f" and {len(args)} further arguments" if args else ""
        raise UsageError(f"main: {name}{taking} is called with the rank{more}: {error}") from None


# -- unknown variables ---------------------------------------------------------------------------------------------


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each unknown variable `OVERLAP_*`, with the most similar known one.

    Processes that a launcher has started return nothing: the launcher has checked their variables.
    """
    if environ.get("OVERLAP_MEMBER_PID"):
        return []
    valid = {*_FURTHER, *(variable_name(name) for name, option in RunConfig.options().items() if option.variable)}
    unknown = sorted(name for name in environ if name.startswith("OVERLAP_") and name not in valid)
    return [f"{name} is no setting, and has no effect{_suggest_variable(name, valid)}" for name in unknown]


def _suggest_variable(name: str, valid: Iterable[str]) -> str:
    """Return the end of an error with the most similar known variable; "" if none is similar."""
    stems = sorted(other.removeprefix("OVERLAP_") for other in valid)  # the common prefix would make all names similar
    close = get_close_matches(name.removeprefix("OVERLAP_"), stems, n=1, cutoff=0.7)
    return f"; did you mean OVERLAP_{close[0]}?" if close else ""


def warn_of_unknown_variables() -> None:
    """Report unknown variables, each once in a process."""
    for line in unknown_variables():
        if line not in _warned:
            _warned.add(line)
            notify(line)
