"""Configuration of a run: the value of each setting, and its source.

The arguments of `run`, the options of `overlap run`, the environment and the launcher each set some values. The first
source of this list that sets one wins:

1. what a command imposes on every run of its program (`overriding_config`);
2. the launcher that started several processes: the number of ranks;
3. the options of `overlap run`; then environment variables such as `OVERLAP_RANKS` for `ranks`, unless they are empty;
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

    # By name of a setting: the source of the value, as text: "argument", an option, a variable, or a launcher.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    # -- sources ----------------------------------------------------------------------------------------------------

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return the `Option` of each setting, by the setting's name."""
        return {entry.name: entry.metadata["option"] for entry in fields(cls) if "option" in entry.metadata}

    @classmethod
    def from_values(cls, source: str = ARGUMENT, **values: Any) -> Self:
        """Return a configuration with these values and their source; a value of None leaves a setting open."""
        settings = {name: value for name, value in values.items() if value is not None}
        return cls(**settings, sources=dict.fromkeys(settings, source))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Return the settings that `OVERLAP_*` environment variables give; an empty variable counts as missing.

        Raises:
            UsageError: A value is invalid; the error names the variable and the value.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name, one in cls.options().items():
            variable = variable_name(name)
            if one.variable and one.read is not None and environ.get(variable):
                try:
                    values[name] = one.read(environ[variable])
                except UsageError as error:
                    raise UsageError(f"{variable}: {error}") from None
                sources[name] = _source_of_variable(name, variable, environ[variable])
        return cls(**values, sources=sources)

    def variables(self) -> dict[str, str]:
        """Return the environment variables, by name, from which `from_environment` reads these settings again."""
        return {
            variable_name(name): format_setting(getattr(self, name))
            for name, one in self.options().items()
            if one.variable and one.read is not None and getattr(self, name) is not None
        }

    def merged_over(self, other: Self) -> Self:
        """Merge two configurations: a setting has its value here, or if it is open here, its value in `other`."""
        own = {name: getattr(self, name) for name in self.options() if getattr(self, name) is not None}
        return replace(other, **own, sources={**other.sources, **{n: s for n, s in self.sources.items() if n in own}})

    def with_changes(self, source: str | None = None, /, **changes: Any) -> Self:
        """Return a copy with some settings changed, and `source` as their source; None keeps the sources."""
        sources = {} if source is None else dict.fromkeys(changes, source)
        return replace(self, **changes, sources={**self.sources, **sources})

    def transport_options(self) -> dict[str, object]:
        """Return the options of the transport between processes, by name, that some source has given."""
        wires = {name: getattr(self, name) for name, option in self.options().items() if option.wire}
        return {name: value for name, value in wires.items() if value is not None}

    def tls_files(self) -> tuple[str, str, str] | None:
        """Return the paths of the certificate, the private key and the trusted authorities; None without encryption.

        Raises:
            UsageError: Only one or two of the three are given.
        """
        if self.tls_cert and self.tls_key and self.tls_ca:
            return self.tls_cert, self.tls_key, self.tls_ca
        files = {"OVERLAP_TLS_CERT": self.tls_cert, "OVERLAP_TLS_KEY": self.tls_key, "OVERLAP_TLS_CA": self.tls_ca}
        missing = [name for name, path in files.items() if not path]
        if len(missing) < len(files):
            raise UsageError(f"TLS needs three files: {', '.join(files)}; missing: {', '.join(missing)}")
        return None

    # -- checks and text ---------------------------------------------------------------------------------------------

    def check_values(self) -> None:
        """Check every value, from whatever source.

        Raises:
            UsageError: A value is invalid; the error names the setting, the value and its source.
        """
        for name, one in self.options().items():
            if one.check is not None and getattr(self, name) is not None:
                try:
                    one.check(getattr(self, name))
                except UsageError as error:
                    raise UsageError(f"{error}{self.source_text(name)}") from None
        self.tls_files()  # raises if only some of the three files are given

    def source_text(self, *names: str) -> str:
        """Return the sources of some settings for the end of an error: " (ranks: --ranks)".

        The text is "" if the program has given all of them as arguments of `run`.
        """
        sources = {name: self.sources[name] for name in names if name in self.sources}
        if set(sources.values()) <= {ARGUMENT}:
            return ""
        return f" ({', '.join(f'{name}: {source}' for name, source in sources.items())})"

    def lines(self) -> Iterator[str]:
        """Yield a line with name, value and source for each setting that an option or a variable can give."""
        for name, one in self.options().items():
            if one.read is not None:
                value = getattr(self, name)
                text = one.default_text if value is None else format_setting(getattr(value, "name", value))
                yield f"{name:<17} {text:<50} {self.sources.get(name, 'default')}".rstrip()


def variable_name(name: str) -> str:
    """Return the name of the environment variable of a setting, such as "OVERLAP_RANKS"."""
    return f"OVERLAP_{name.upper()}"


# -- settings that commands impose ---------------------------------------------------------------------------------

# Configurations of the blocks of `setting_environment` that are open, innermost last; they have the values' sources.
_imposed: list[RunConfig] = []


def _source_of_variable(setting: str, variable: str, text: str) -> str:
    """Return the option that has set a variable, if the variable still has its text; else the variable's name."""
    config = _imposed[-1] if _imposed else RunConfig()
    value = getattr(config, setting, None)  # a test may have further settings
    is_from_command = value is not None and format_setting(value) == text
    return config.sources.get(setting, variable) if is_from_command else variable


@contextmanager
def setting_environment(config: RunConfig) -> Iterator[None]:
    """Set the environment variables of all settings to this configuration during the block.

    Variables of settings that this configuration leaves unset are removed. Runs in the block number their trace files
    from 1.
    """
    names = [variable_name(name) for name, one in config.options().items() if one.variable]
    before = {name: os.environ[name] for name in names if name in os.environ}
    _set_environment(names, config.variables())
    _imposed.append(config)
    trace_files.forget_paths()
    try:
        yield
    finally:
        _imposed.pop()
        _set_environment(names, before)


def _set_environment(names: list[str], variables: Mapping[str, str]) -> None:
    """Set the environment variables in `names` to their values in `variables`; remove those without a value."""
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
def overriding_config(
    *,
    revise: Callable[[RunConfig], RunConfig] | None = None,
    watcher: Callable[[Timeline], None] | None = None,
    pulse: Callable[[int, int | None], None] | None = None,
) -> Iterator[None]:
    """Revise the configuration of every `run` in the block.

    The revision comes after the arguments of `run`, the environment, and the revisions of outer blocks.

    Args:
        revise: Function from the requested configuration to the one to run; None: as requested.
        watcher: Called with the timeline of each run; None: no call.
        pulse: Called repeatedly in virtual time with the instant in ns, and the last step that a rank has begun or
            None; None: no call.
    """

    outer = _overriding.get()

    def apply_overrides(config: RunConfig) -> RunConfig:
        """Apply the outer block's changes, then this block's."""
        config = config if outer is None else outer(config)
        config = config if revise is None else revise(config)
        config = config if watcher is None else replace(config, watcher=watcher)
        return config if pulse is None else replace(config, pulse=pulse)

    token = _overriding.set(apply_overrides)
    try:
        yield
    finally:
        _overriding.reset(token)


def resolve_config(main: object, args: tuple[object, ...], config: RunConfig) -> RunConfig:
    """Return the configuration of a run, from the environment, the arguments of `run`, and `overriding_config` blocks.

    A setting that the environment gives wins over an argument; blocks of `overriding_config` then revise the result.

    Args:
        main: The program of each rank.
        args: Arguments of `main` after the rank.
        config: The configuration that the program passes to `run`.

    Raises:
        UsageError: A value or `main` is invalid.
    """
    warn_of_unknown_variables()
    from_environment = RunConfig.from_environment()
    merged = from_environment.merged_over(config)
    if from_environment.trace is not None:
        merged = merged.with_changes(trace=trace_files.next_path(str(from_environment.trace)))
    overrule = _overriding.get()
    if overrule is not None:
        merged = overrule(merged)
    check_main(main, args)
    merged.check_values()
    return merged


def check_main(main: object, args: tuple[object, ...]) -> None:
    """Refuse a `main` that cannot be called as `main(rank, *args)`.

    Raises:
        UsageError: `main` is no function, or its signature, which the error shows, takes other arguments.
    """
    if not callable(main):
        raise UsageError(f"main: expected an async function, got {type(main).__name__}")
    try:
        taking = signature(main)
    except ValueError:  # a function written in C has no signature
        return
    try:
        taking.bind(None, *args)
    except TypeError as error:
        name, more = getattr(main, "__name__", "main"), f" and {len(args)} further arguments" if args else ""
        advice = "correct its parameters, or the arguments after main"
        raise UsageError(f"main: {name}{taking} is called with the rank{more}: {error}; {advice}") from None


# -- unknown variables ---------------------------------------------------------------------------------------------


def unknown_variable_lines(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each unknown variable `OVERLAP_*`, with the most similar known name.

    In a process that a launcher has started there are none: the launcher has reported them.
    """
    if environ.get("OVERLAP_MEMBER_PID"):
        return []
    valid = {*_FURTHER, *(variable_name(name) for name, option in RunConfig.options().items() if option.variable)}
    unknown = sorted(name for name in environ if name.startswith("OVERLAP_") and name not in valid)
    return [f"{name} is no setting, and has no effect{_suggest_variable(name, valid)}" for name in unknown]


def _suggest_variable(name: str, valid: Iterable[str]) -> str:
    """Return "; did you mean OVERLAP_...?" with the most similar known variable, or "" if none is similar."""
    stems = sorted(other.removeprefix("OVERLAP_") for other in valid)  # the common prefix would make all names similar
    close = get_close_matches(name.removeprefix("OVERLAP_"), stems, n=1, cutoff=0.7)
    return f"; did you mean OVERLAP_{close[0]}?" if close else ""


def warn_of_unknown_variables() -> None:
    """Print unknown `OVERLAP_*` variables to stderr, each once in a process."""
    for line in unknown_variable_lines():
        if line not in _warned:
            _warned.add(line)
            notify(line)
