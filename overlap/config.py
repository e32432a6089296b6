"""The one description of a run: what has been said of each setting, and by whom.

The arguments of `run`, the options of `overlap run`, the environment and the launcher each say some of it. What they
say is laid over each other, the first wins:

1. what a command imposes on every run of its program (`requested.overriding`);
2. the launcher that started several processes: how many ranks there are;
3. the options of `overlap run`; then `OVERLAP_*` variables, `OVERLAP_RANKS` for `ranks` and so on; empty is unset;
4. the arguments of `run`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from . import trace_files
from .errors import UsageError
from .options import Option, text_of
from .settings import Settings

ARGUMENT = "argument"
"""Source of what the program gives to `run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Settings):
    """What has been said of the settings, and by whom."""

    # Who has said what: "argument", an option, a variable, or the launcher's name; what is open has none.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    # -- where it comes from -----------------------------------------------------------------------------------------

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Return how each field is told."""
        return {each.name: each.metadata["option"] for each in fields(cls) if "option" in each.metadata}

    @classmethod
    def given(cls, source: str = ARGUMENT, **values: Any) -> Self:
        """Return what one source says; None says nothing."""
        said = {name: value for name, value in values.items() if value is not None}
        return cls(**said, sources=dict.fromkeys(said, source))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the variables.

        Raises:
            UsageError: If a value cannot be meant; names the variable and the value.
        """
        told = {
            name: (variable_of(name), one.read)
            for name, one in cls.options().items()
            if one.variable and one.read is not None and environ.get(variable_of(name))
        }
        values: dict[str, Any] = {
            name: _read(read, environ[variable], variable) for name, (variable, read) in told.items()
        }
        return cls(**values, sources={name: _source(name, environ, variable) for name, (variable, _) in told.items()})

    def variables(self) -> dict[str, str]:
        """Return the environment variables that say the same."""
        return {
            variable_of(name): text_of(getattr(self, name))
            for name, one in self.options().items()
            if one.variable and one.read is not None and getattr(self, name) is not None
        }

    def over(self, other: Self) -> Self:
        """Return this laid over another: what is open here is as there."""
        mine = {name: getattr(self, name) for name in self.options() if getattr(self, name) is not None}
        return replace(other, **mine, sources={**other.sources, **{n: s for n, s in self.sources.items() if n in mine}})

    def changed(self, source: str | None = None, /, **changes: Any) -> Self:
        """Return this with some fields changed; without a source, those who have said them have meant it so."""
        told = {} if source is None else dict.fromkeys(changes, source)
        return replace(self, **changes, sources={**self.sources, **told})

    def transport_options(self) -> dict[str, object]:
        """Return what the transport between processes is told, as far as anybody has said it."""
        told = {name: getattr(self, name) for name, one in self.options().items() if one.wire}
        return {name: value for name, value in told.items() if value is not None}

    def tls_files(self) -> tuple[str, str, str] | None:
        """Return the files with the certificate, its key and the trusted authorities; None: no encryption.

        Raises:
            UsageError: If there are some of them only.
        """
        if self.tls_cert and self.tls_key and self.tls_ca:
            return self.tls_cert, self.tls_key, self.tls_ca
        if self.tls_cert or self.tls_key or self.tls_ca:
            raise UsageError("TLS needs three files: OVERLAP_TLS_CERT, OVERLAP_TLS_KEY and OVERLAP_TLS_CA")
        return None

    # -- what it says ------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            UsageError: Naming the field and the value.
        """
        for name, one in self.options().items():
            if one.check is not None and getattr(self, name) is not None:
                try:
                    one.check(getattr(self, name))
                except UsageError as error:
                    raise UsageError(f"{error}{self.told(name)}") from None
        self.tls_files()

    def told(self, *names: str) -> str:
        """Return, for the end of an error, who has said these; nothing if it was the program itself."""
        said = {name: self.sources[name] for name in names if name in self.sources}
        if set(said.values()) <= {ARGUMENT}:
            return ""
        return f" ({', '.join(f'{name}: {source}' for name, source in said.items())})"

    def lines(self) -> Iterator[str]:
        """Yield a line for each field that somebody can say: its name, its value, and who has said it."""
        for name, one in self.options().items():
            if one.read is not None and not one.hidden:
                value = getattr(self, name)
                text = one.default if value is None else text_of(getattr(value, "name", value))
                yield f"{name:<16} {text:<32} {self.sources.get(name, 'default')}".rstrip()


def variable_of(name: str) -> str:
    """Return the environment variable of a field."""
    return f"OVERLAP_{name.upper()}"


def _read(read: Callable[[str], object], text: str, variable: str) -> object:
    try:
        return read(text)
    except UsageError as error:
        raise UsageError(f"{variable}: {error}") from None


# -- what commands impose ------------------------------------------------------------------------------------------

_imposed: list[RunConfig] = []  # by `imposed`, the innermost last: it knows who has said what the variables say


def _source(name: str, environ: Mapping[str, str], variable: str) -> str:
    said = _imposed[-1] if _imposed else RunConfig()
    same = getattr(said, name, None) is not None and text_of(getattr(said, name)) == environ[variable]
    return said.sources.get(name, variable) if same else variable


@contextmanager
def imposed(config: RunConfig) -> Iterator[None]:
    """Make the environment say exactly `config` for the block, and number its traces from the start."""
    names = [variable_of(name) for name, one in config.options().items() if one.variable]
    before = {name: os.environ[name] for name in names if name in os.environ}
    _say(names, config.variables())
    _imposed.append(config)
    trace_files.forget()
    try:
        yield
    finally:
        _imposed.pop()
        _say(names, before)


def _say(names: list[str], variables: Mapping[str, str]) -> None:
    for name in names:
        if name in variables:
            os.environ[name] = variables[name]
        else:
            os.environ.pop(name, None)
