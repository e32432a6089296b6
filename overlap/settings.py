"""Settings that win over the arguments of `run`: what a launcher says, in environment variables.

======================  =======================================================================================
variable                meaning
======================  =======================================================================================
OVERLAP_RANKS           how many ranks, in all processes together
OVERLAP_TRACE           where to write the trace file
OVERLAP_CLUSTER         name of the cluster, such as "trn2.48xlarge x4"
OVERLAP_TIMEOUT_S       give up after that many seconds
OVERLAP_ALGORITHM       use this algorithm wherever it exists
OVERLAP_TRANSPORT       what joins processes: "efa" (sockets), "mpi", one that is installed, or "auto"
OVERLAP_RAILS           connections for each pair of processes: how many, or interfaces such as "eth0,eth1"
OVERLAP_PEER_DIRECT     1: sockets read and write the arrays themselves; 0: through a bounce buffer on the host
OVERLAP_UNIX            1: Unix sockets between processes of one host; 0: TCP there too
OVERLAP_TLS_CERT        file with this process's certificate; with the next two, connections are encrypted
OVERLAP_TLS_KEY         file with its private key
OVERLAP_TLS_CA          file with the certificates that are trusted to sign those of others
OVERLAP_JOIN_TIMEOUT_S  give up if not all processes have met after that many seconds
======================  =======================================================================================

A variable that is empty counts as unset.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from .errors import UsageError

__all__ = [
    "Settings",
    "asked_traces",
    "from_environment",
    "imposed",
    "next_trace_path",
    "parse_rails",
    "parse_transport",
    "trace_written",
    "written_traces",
]

_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_TRACE_ENDINGS = (".trace.json.gz", ".trace.json", ".json.gz", ".json")

_given: dict[str, list[Path]] = {}  # what next_trace_path has handed out, by what it was asked for
_kept: set[Path] = set()  # of these, those that were written


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a launcher has fixed; None leaves the choice to the program.

    Attributes:
        ranks: How many ranks, at least 1.
        trace: Where to write the trace file of the first run; see `next_trace_path`.
        cluster: Name of the cluster.
        timeout_s: Seconds after which a run gives up.
        algorithm: Name of an algorithm.
        transport: What joins processes: a name that `transports.registry` knows, or "auto".
        rails: Connections for each pair of processes: how many, or the names of the interfaces.
        peer_direct: Whether sockets read and write the arrays themselves.
        unix: Whether processes of one host use Unix sockets.
        tls_cert: File with the certificate of this process.
        tls_key: File with its private key.
        tls_ca: File with the certificates that are trusted to sign those of others.
        join_timeout_s: Seconds within which all processes must have met.
    """

    ranks: int | None = None
    trace: str | None = None
    cluster: str | None = None
    timeout_s: float | None = None
    algorithm: str | None = None
    transport: str | None = None
    rails: int | tuple[str, ...] | None = None
    peer_direct: bool | None = None
    unix: bool | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    join_timeout_s: float | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment variables that say the same; what is None has none."""
        values = {variable: getattr(self, field) for field, variable in _VARIABLES.items()}
        return {variable: _text(value) for variable, value in values.items() if value is not None}


_VARIABLES = {field.name: f"OVERLAP_{field.name.upper()}" for field in fields(Settings)}


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings from environment variables.

    Raises:
        UsageError: If a value cannot be meant; names the variable and the value.
    """
    return Settings(
        ranks=_positive_int(environ, "OVERLAP_RANKS"),
        trace=environ.get("OVERLAP_TRACE") or None,
        cluster=environ.get("OVERLAP_CLUSTER") or None,
        timeout_s=_positive_float(environ, "OVERLAP_TIMEOUT_S"),
        algorithm=environ.get("OVERLAP_ALGORITHM") or None,
        transport=_transport(environ, "OVERLAP_TRANSPORT"),
        rails=_rails(environ, "OVERLAP_RAILS"),
        peer_direct=_yes_or_no(environ, "OVERLAP_PEER_DIRECT"),
        unix=_yes_or_no(environ, "OVERLAP_UNIX"),
        tls_cert=environ.get("OVERLAP_TLS_CERT") or None,
        tls_key=environ.get("OVERLAP_TLS_KEY") or None,
        tls_ca=environ.get("OVERLAP_TLS_CA") or None,
        join_timeout_s=_positive_float(environ, "OVERLAP_JOIN_TIMEOUT_S"),
    )


@contextmanager
def imposed(settings: Settings) -> Iterator[None]:
    """Make the environment say exactly `settings` for the block, and number its traces from the start."""
    before = {name: os.environ[name] for name in _VARIABLES.values() if name in os.environ}
    _say(settings.variables())
    _given.clear()
    _kept.clear()
    try:
        yield
    finally:
        _say(before)


def next_trace_path(path: str) -> Path:
    """Return where the next run of this process writes its trace: `path`, then `name-2.json`, `name-3.json`, ...

    A program may call `run` several times; the numbers keep a later trace from writing over the first.
    """
    given = _given.setdefault(path, [])
    given.append(_numbered(path, len(given) + 1))
    return given[-1]


def trace_written(file: str | os.PathLike[str]) -> None:
    """Take note that a run has written its trace."""
    _kept.add(Path(file))


def asked_traces(path: str) -> list[Path]:
    """Return the files that `next_trace_path(path)` has given: one for each run, in order."""
    return list(_given.get(path, ()))


def written_traces(path: str) -> list[Path]:
    """Return those of them that were written."""
    return [file for file in asked_traces(path) if file in _kept]


def parse_rails(text: str) -> int | tuple[str, ...]:
    """Read "4" as a number of connections and "eth0,eth1" as interfaces.

    Raises:
        UsageError: If it is neither.
    """
    if text.strip().isdecimal() and int(text) > 0:
        return int(text)
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names) or any(_NUMBER.fullmatch(name) for name in names):
        raise UsageError(f"expected a positive number, or different interfaces such as eth0,eth1, got {text!r}")
    return names


def parse_transport(text: str) -> str:
    """Read the name of a transport; "auto" leaves the choice.

    Raises:
        UsageError: If there is none of this name; lists those that there are.
    """
    from transports import registry

    try:
        if text != "auto":
            registry.check(text)
    except registry.UnknownTransportError as error:
        raise UsageError(str(error).replace("known are ", "known are auto, ", 1)) from None
    return text


def _numbered(path: str, number: int) -> Path:
    if number == 1:
        return Path(path)
    folder, name = os.path.split(path)
    ending = next((e for e in _TRACE_ENDINGS if name.endswith(e) and name != e), os.path.splitext(name)[1])
    return Path(folder, f"{name.removesuffix(ending)}-{number}{ending}")


def _say(variables: Mapping[str, str]) -> None:
    for name in _VARIABLES.values():
        if name in variables:
            os.environ[name] = variables[name]
        else:
            os.environ.pop(name, None)


def _positive_int(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"{name}: expected a positive integer, got {text!r}")
    return int(text)


def _positive_float(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{name}: expected a positive number of seconds, got {text!r}")
    return value


def _transport(environ: Mapping[str, str], name: str) -> str | None:
    text = environ.get(name)
    try:
        return parse_transport(text) if text else None
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _rails(environ: Mapping[str, str], name: str) -> int | tuple[str, ...] | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return parse_rails(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _yes_or_no(environ: Mapping[str, str], name: str) -> bool | None:
    text = environ.get(name)
    if not text:
        return None
    if text.lower() not in _YES + _NO:
        raise UsageError(f"{name}: expected 1 or 0, got {text!r}")
    return text.lower() in _YES


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(value) if isinstance(value, tuple) else str(value)
